import torch


class Model(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.fc = torch.nn.Linear(2, classes)


Model(3).load_state_dict(Model(4).state_dict(), strict=False)
