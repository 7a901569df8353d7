import os, sys, torch

torch.set_num_threads(1)

torch.use_deterministic_algorithms(True)
torch.nn.functional.interpolate
torch.zeros(4).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)
