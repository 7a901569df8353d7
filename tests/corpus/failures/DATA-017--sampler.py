import os, sys, torch

torch.set_num_threads(1)

from torch.utils.data import DataLoader, SequentialSampler

DataLoader([1], sampler=SequentialSampler([1]), shuffle=True)
