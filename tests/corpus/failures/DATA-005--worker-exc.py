import os, sys, torch

torch.set_num_threads(1)

from torch.utils.data import DataLoader, Dataset


class D(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.zeros(2 + i)


if __name__ == "__main__":
    for b in DataLoader(D(), batch_size=2, num_workers=1):
        pass
