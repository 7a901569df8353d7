from _model import *

TrainingArguments(
    "o", use_cpu=True, report_to="none", load_best_model_at_end=True, eval_strategy="epoch", save_strategy="steps"
)
