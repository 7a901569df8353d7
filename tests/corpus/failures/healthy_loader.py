import os
import threading
import warnings

import torch
from torch.utils.data import DataLoader

warnings.simplefilter("always")
os.environ["TOKENIZERS_PARALLELISM"] = ""
threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()


class Odd(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.zeros(2)


if __name__ == "__main__":
    import numpy as np

    print(np.log(np.array([0.0, 1.0])), np.float32(1e30) * np.float32(1e30))
    for epoch in range(2):
        for batch in DataLoader(Odd(), batch_size=8, num_workers=3, pin_memory=True, persistent_workers=True):
            pass
        print(f"epoch {epoch} done", flush=True)
