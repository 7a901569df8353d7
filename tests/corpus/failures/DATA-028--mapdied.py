import os, sys, torch

torch.set_num_threads(1)

from datasets import Dataset


def f(x):
    os.kill(os.getpid(), 9)


Dataset.from_dict({"a": list(range(8))}).map(f, num_proc=2)
