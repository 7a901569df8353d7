import os, sys, torch

torch.set_num_threads(1)

torch.nn.functional.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 255]))
