import os, sys, torch

torch.set_num_threads(1)

from datasets import load_dataset

load_dataset("/tmp/nonexistent_dir_x")
