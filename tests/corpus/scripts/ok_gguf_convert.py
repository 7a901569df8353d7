# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "transformers>=5.2",
#   "peft>=0.21",
#   "torch>=2.8",
#   "accelerate>=1.10",
#   "huggingface_hub>=2.0",
#   "sentencepiece>=0.2",
#   "protobuf>=5",
#   "numpy>=2",
#   "gguf>=0.10",
# ]
# ///
"""Merge an adapter into its base and convert the result to GGUF."""

import os
import subprocess
import sys

import torch
from huggingface_hub import HfApi
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

ADAPTER = os.environ.get("ADAPTER_MODEL", "rehearsal/qwen-capybara-lora")
BASE = os.environ.get("BASE_MODEL", "Qwen/Qwen2.5-0.5B")
OUTPUT = os.environ.get("OUTPUT_REPO", "rehearsal/qwen-capybara-gguf")


def run(command):
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(done.stdout[-2000:])
    except subprocess.CalledProcessError as error:
        print("failed:", command, error.stdout, error.stderr)
        raise


model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float16, device_map="auto")
model = PeftModel.from_pretrained(model, ADAPTER).merge_and_unload()
model.save_pretrained("merged")
AutoTokenizer.from_pretrained(ADAPTER).save_pretrained("merged")

run(["apt-get", "update", "-qq"])
run(["apt-get", "install", "-y", "-qq", "build-essential", "cmake", "git"])
run(["git", "clone", "--depth", "1", "https://github.com/ggml-org/llama.cpp.git", "llama.cpp"])
run([sys.executable, "llama.cpp/convert_hf_to_gguf.py", "merged", "--outfile", "out/model.gguf", "--outtype", "f16"])
run(["cmake", "-B", "llama.cpp/build", "-S", "llama.cpp", "-DGGML_CUDA=OFF"])
run(["cmake", "--build", "llama.cpp/build", "--target", "llama-quantize", "-j", "4"])
run(["llama.cpp/build/bin/llama-quantize", "out/model.gguf", "out/model-Q4_K_M.gguf", "Q4_K_M"])

api = HfApi()
api.create_repo(OUTPUT, exist_ok=True)
api.upload_folder(folder_path="out", repo_id=OUTPUT)
