import warnings

from _model import *
from trl import SFTConfig, SFTTrainer

warnings.simplefilter("always")
tok.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
trainer = SFTTrainer(
    model=model,
    processing_class=tok,
    args=SFTConfig(
        "o",
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_steps=6,
        logging_steps=1,
        save_steps=3,
        max_length=4,
        packing=True,
        dataloader_num_workers=2,
        gradient_checkpointing=True,
    ),
    train_dataset=Dataset.from_dict({"text": ["a b c d hello world"] * 64}),
)
trainer.train()
trainer.train(resume_from_checkpoint=True)
trainer.save_model("o/final")
