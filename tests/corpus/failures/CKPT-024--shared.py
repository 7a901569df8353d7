import os, sys, torch

torch.set_num_threads(1)

from safetensors.torch import save_file

w = torch.zeros(4)
save_file({"a": w, "b": w}, "s.safetensors")
