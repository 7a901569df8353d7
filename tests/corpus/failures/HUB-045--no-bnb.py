from _model import *
from transformers import BitsAndBytesConfig

model.save_pretrained("m")
LlamaForCausalLM.from_pretrained("m", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
