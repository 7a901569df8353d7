from _model import *

from trl import SFTTrainer, SFTConfig

SFTConfig("o", bf16=True, report_to="none")
from transformers import TrainingArguments

TrainingArguments("o", fp16=True, bf16=True)
