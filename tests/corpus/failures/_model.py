"""A model of a few thousand weights and a tokenizer of nine words."""

import os
import sys

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

words = ["<unk>", "<s>", "</s>", "a", "b", "c", "d", "hello", "world"]
t = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
t.pre_tokenizer = pre_tokenizers.Whitespace()
tok = PreTrainedTokenizerFast(
    tokenizer_object=t, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
)
cfg = LlamaConfig(
    vocab_size=len(words),
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(cfg)
from datasets import Dataset

ARGS = dict(use_cpu=True, report_to="none", max_steps=1)
