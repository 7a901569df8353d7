import os, sys, torch

torch.set_num_threads(1)

torch.save({"a": torch.zeros(1)}, "c.pt")
import pickle

torch.load("c.pt", map_location="cuda")
