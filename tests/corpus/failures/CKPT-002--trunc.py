import os, sys, torch

torch.set_num_threads(1)

torch.save({"a": torch.randn(1000)}, "x.pt")
b = open("x.pt", "rb").read()
open("x.pt", "wb").write(b[: len(b) // 2])
torch.load("x.pt")
