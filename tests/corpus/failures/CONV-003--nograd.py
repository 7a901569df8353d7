import os, sys, torch

torch.set_num_threads(1)

torch.zeros(2).sum().backward()
