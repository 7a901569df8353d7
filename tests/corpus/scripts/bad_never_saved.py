# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.8",
#   "torchvision>=0.20",
#   "numpy>=2",
# ]
# ///
import os
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc = nn.Linear(9216, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(torch.flatten(x, 1))


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = os.environ.get("OUT_DIR", "out")
    os.makedirs(out, exist_ok=True)
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.13,), (0.31,))])
    train = DataLoader(datasets.MNIST("data", train=True, download=True, transform=tf), batch_size=64, shuffle=True)
    net, epochs = Net().to(device), 3
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in train:
            opt.zero_grad()
            loss = F.cross_entropy(net(x.to(device)), y.to(device))
            loss.backward()
            opt.step()
        print(epoch, loss.item(), flush=True)


if __name__ == "__main__":
    main()
