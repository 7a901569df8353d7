from _model import *
from peft import LoraConfig, PeftModel, get_peft_model

peft = get_peft_model(model, LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"))
peft.print_trainable_parameters()
Trainer(
    model=peft,
    args=TrainingArguments("o", use_cpu=True, report_to="none", max_steps=4, logging_steps=1, save_steps=2, fp16=False),
    train_dataset=Dataset.from_dict({"input_ids": [[1, 2]] * 32, "labels": [[1, 2]] * 32}),
).train()
peft.save_pretrained("adapter")
print(PeftModel.from_pretrained(LlamaForCausalLM(cfg), "adapter").merge_and_unload().lm_head)
