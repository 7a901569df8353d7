import os, sys, torch

torch.set_num_threads(1)

torch.nn.functional.binary_cross_entropy(torch.tensor([2.0]), torch.tensor([1.0]))
