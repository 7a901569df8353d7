import os, sys, torch

torch.set_num_threads(1)

import collections, datetime

torch.save({"a": datetime.datetime.now()}, "y.pt")
torch.load("y.pt")
