from _model import *

TrainingArguments("o", evaluation_strategy="steps")
