import logging

import datasets
from datasets import Dataset, load_dataset

logging.basicConfig(level=logging.INFO)
datasets.logging.set_verbosity_info()
Dataset.from_dict({"a": list(range(100)), "b": ["x"] * 100}).to_csv("d.csv")
data = load_dataset("csv", data_files="d.csv", split="train")
data = data.map(lambda row: {"c": row["a"] * 2}, num_proc=2)
data = data.map(lambda row: {"c": row["a"] * 2}, num_proc=2)
data = data.filter(lambda row: row["a"] > 200)
print("left", len(data))
data.save_to_disk("saved")
