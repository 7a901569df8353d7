import os, sys, torch

torch.set_num_threads(1)

open("e1.jsonl", "w").write('{"a":1}\n')
open("e2.jsonl", "w").write('{"a":1,"b":{"c":1}}\n')
from datasets import load_dataset

load_dataset("json", data_files=["e1.jsonl", "e2.jsonl"])
