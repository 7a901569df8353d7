import os, sys, torch

torch.set_num_threads(1)

torch.save({"a": torch.randn(100000)}, "/dev/full")
