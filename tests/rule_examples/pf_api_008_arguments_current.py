from rule_kit import script, submit

HEADER = '# /// script\n# dependencies = ["trl=={trl}", "transformers=={transformers}"]\n# ///\n'
TRAINER = HEADER + "from trl import SFTTrainer\nSFTTrainer(model='m', {given})\n"
TRAINING = HEADER + "from transformers import TrainingArguments\nTrainingArguments(output_dir='out', {given})\n"
OLD = {"trl": "0.12.2", "transformers": "4.46.3"}

FIRES = [
    script(TRAINER.format(given="tokenizer=tokenizer", **OLD)),
    script(TRAINING.format(given="evaluation_strategy='steps'", trl="0.9.6", transformers="4.42.4")),
]
SILENT = [
    submit(),
    script(TRAINER.format(given="processing_class=tokenizer", **OLD)),
    script(TRAINING.format(given="eval_strategy='steps'", trl="0.9.6", transformers="4.42.4")),
]
