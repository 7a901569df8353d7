import os, sys, torch

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)

from transformers import AutoConfig

AutoConfig.from_pretrained("nobody/none-such")
