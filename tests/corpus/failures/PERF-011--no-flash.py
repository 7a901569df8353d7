from _model import *

model.save_pretrained("m")
LlamaForCausalLM.from_pretrained("m", attn_implementation="flash_attention_2", dtype=torch.bfloat16)
