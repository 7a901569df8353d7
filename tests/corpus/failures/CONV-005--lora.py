from _model import *

from peft import LoraConfig, get_peft_model

get_peft_model(model, LoraConfig(target_modules=["query_key_value"]))
