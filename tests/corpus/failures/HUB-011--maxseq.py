import os, sys, torch

torch.set_num_threads(1)

from trl import SFTConfig

SFTConfig(max_seq_length=1)
