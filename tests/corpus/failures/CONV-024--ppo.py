import os, sys, torch

torch.set_num_threads(1)

from trl import PPOTrainer
