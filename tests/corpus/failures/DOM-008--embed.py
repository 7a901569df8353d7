import os, sys, torch

torch.set_num_threads(1)

torch.nn.Embedding(4, 2)(torch.tensor([9]))
