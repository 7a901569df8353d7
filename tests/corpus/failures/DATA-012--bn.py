import os, sys, torch

torch.set_num_threads(1)

torch.nn.BatchNorm1d(4)(torch.zeros(1, 4))
