"""Real training runs that succeed, with the warnings and recovered errors that such runs print.

`record.py` runs each function of `RUNS` in its own process, and keeps the output as `../logs/healthy/run_<name>.log`.
"""

import logging
import os
import sys
import time
import traceback
import warnings
from functools import partial

import peft
import pytorch_lightning
import sentence_transformers as sentences
import trl
from _model import *

RUNS = {}


def run(function):
    """Register a run under the name of its function."""
    RUNS[function.__name__] = function
    return function


def arguments(**more):
    base = {"use_cpu": True, "report_to": "none", "max_steps": 6, "logging_steps": 1, "bf16": False}
    return TrainingArguments("o", **{**base, **more})


def trainer(args=None, callbacks=(), train=None, **more):
    data = train or Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 64, "labels": [[1, 2, 3, 4]] * 64})
    return Trainer(
        model=model, args=args or arguments(), train_dataset=data, eval_dataset=data, callbacks=[*callbacks], **more
    )


def texts(*columns, rows=32):
    return Dataset.from_dict({name: [f"a b c {name} hello world"] * rows for name in columns})


def trl_arguments(kind, **more):
    base = {"use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 4, "logging_steps": 1}
    return kind("o", **{**base, **more})


@run
def trainer_plain():
    trainer().train()


@run
def trainer_evaluates():
    trainer(arguments(eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True)).train()


@run
def trainer_resumes():
    trainer(arguments(save_steps=3)).train()
    trainer(arguments(save_steps=3, max_steps=9)).train(resume_from_checkpoint=True)


@run
def trainer_accumulates():
    trainer(
        arguments(gradient_accumulation_steps=4, per_device_train_batch_size=2, gradient_checkpointing=True)
    ).train()


@run
def trainer_without_bars():
    trainer(arguments(disable_tqdm=True, log_level="info", logging_first_step=True)).train()


@run
def trainer_debug_log():
    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    trainer(arguments(log_level="debug")).train()


@run
def trainer_stops_early():
    from transformers import EarlyStoppingCallback

    args = arguments(
        max_steps=40,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        learning_rate=1e-9,
    )
    trainer(args, [EarlyStoppingCallback(2)]).train()


@run
def trainer_workers():
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tok(["a b c"] * 4)
    trainer(arguments(dataloader_num_workers=4, dataloader_pin_memory=True)).train()


@run
def trainer_iterable():
    from datasets import IterableDataset

    rows = IterableDataset.from_generator(lambda: ({"input_ids": [1, 2], "labels": [1, 2]} for _ in range(99)))
    Trainer(model=model, args=arguments(), train_dataset=rows).train()


@run
def trainer_long_texts():
    tok.model_max_length = 8
    rows = Dataset.from_dict({"text": ["a b c " * 40] * 32}).map(lambda r: tok(r["text"]), num_proc=2)
    rows = rows.map(lambda r: {"labels": r["input_ids"]}).remove_columns("text").select_columns(["input_ids", "labels"])
    trainer(train=rows).train()


@run
def trainer_new_head():
    from transformers import AutoModelForSequenceClassification

    model.save_pretrained("base")
    head = AutoModelForSequenceClassification.from_pretrained("base", num_labels=3)
    head.config.pad_token_id = 0
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 32, "labels": [n % 3 for n in range(32)]})
    Trainer(model=head, args=arguments(), train_dataset=rows).train()


@run
def trainer_skips_a_failed_evaluation():
    from transformers import TrainerCallback

    class Report(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            if state.global_step == 2:
                try:
                    raise ConnectionError("HTTPSConnectionPool(host='example.invalid', port=443): Max retries exceeded")
                except ConnectionError:
                    traceback.print_exc()
                    print("could not report, going on", flush=True)

    trainer(arguments(max_steps=12), [Report()]).train()


@run
def trainer_halves_the_batch():
    for size in (8, 4, 2):
        try:
            if size > 2:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.64 GiB total capacity)")
            trainer(arguments(per_device_train_batch_size=size)).train()
        except RuntimeError as error:
            print(f"batch size {size}: {error}; trying {size // 2}", flush=True)


@run
def trainer_seq2seq():
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    small = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 32, "labels": [[1, 2, 3]] * 32})
    args = Seq2SeqTrainingArguments(
        "o",
        use_cpu=True,
        report_to="none",
        max_steps=6,
        logging_steps=2,
        predict_with_generate=True,
        eval_strategy="epoch",
    )
    Seq2SeqTrainer(model=small, args=args, train_dataset=rows, eval_dataset=rows).train()


@run
def trainer_warns():
    warnings.simplefilter("always")
    warnings.warn("This overload of add_ is deprecated: error rate may differ", FutureWarning, stacklevel=1)
    logging.getLogger("loader").error("no error in 64 files; 0 failed")
    trainer(arguments(warmup_steps=2, lr_scheduler_type="cosine", label_smoothing_factor=0.1)).train()


@run
def trainer_bf16():
    trainer(arguments(bf16=True)).train()


@run
def lora():
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM"))
    peft.print_trainable_parameters()
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 64, "labels": [[1, 2, 3, 4]] * 64})
    Trainer(model=peft, args=arguments(gradient_checkpointing=True), train_dataset=rows).train()
    peft.save_pretrained("adapter")


@run
def lora_merged():
    from peft import LoraConfig, PeftModel, get_peft_model

    peft = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=4))
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 64, "labels": [[1, 2, 3, 4]] * 64})
    Trainer(model=peft, args=arguments(), train_dataset=rows).train()
    peft.merge_and_unload().save_pretrained("merged")
    print("saved", sorted(os.listdir("merged")))


def _sft(**more):
    from trl import SFTConfig, SFTTrainer

    rows = texts("text")
    return SFTTrainer(
        model=model, processing_class=tok, args=trl_arguments(SFTConfig, **more), train_dataset=rows, eval_dataset=rows
    )


@run
def sft():
    _sft(max_length=8, eval_strategy="steps", eval_steps=2).train()


@run
def sft_packed():
    _sft(max_length=4, packing=True).train()


@run
def sft_prompts():
    from trl import SFTConfig, SFTTrainer

    rows = texts("prompt", "completion")
    SFTTrainer(model=model, processing_class=tok, args=trl_arguments(SFTConfig), train_dataset=rows).train()


@run
def sft_lora():
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    made = SFTTrainer(
        model=model,
        processing_class=tok,
        args=trl_arguments(SFTConfig, learning_rate=1e-3),
        train_dataset=texts("text"),
        peft_config=LoraConfig(target_modules="all-linear", r=4),
    )
    made.train()


@run
def dpo():
    from trl import DPOConfig, DPOTrainer

    model.config._name_or_path = "base"
    model.save_pretrained("base")
    DPOTrainer(
        model=model,
        processing_class=tok,
        args=trl_arguments(DPOConfig),
        train_dataset=texts("prompt", "chosen", "rejected"),
    ).train()


@run
def reward():
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    model.save_pretrained("base")
    head = AutoModelForSequenceClassification.from_pretrained("base", num_labels=1)
    head.config.pad_token_id = tok.pad_token_id
    RewardTrainer(
        model=head,
        processing_class=tok,
        args=trl_arguments(RewardConfig),
        train_dataset=texts("prompt", "chosen", "rejected"),
    ).train()


def _online(config, kind, **more):
    model.config._name_or_path = "base"
    model.save_pretrained("base")
    args = trl_arguments(config, num_generations=2, per_device_train_batch_size=2, max_completion_length=4, **more)
    kind(
        model=model,
        processing_class=tok,
        reward_funcs=lambda completions, **k: [float(n % 2) for n in range(len(completions))],
        args=args,
        train_dataset=texts("prompt"),
    ).train()


@run
def grpo():
    from trl import GRPOConfig, GRPOTrainer

    _online(GRPOConfig, GRPOTrainer, log_completions=True)


@run
def rloo():
    from trl import RLOOConfig, RLOOTrainer

    _online(RLOOConfig, RLOOTrainer)


def _loop(steps, every=1, fails=(), log=print):
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(steps):
        if step in fails:
            try:
                raise OSError(5, "Input/output error", "shard-0003.tar")
            except OSError:
                logging.exception("skipped a sample")
        loss = net(torch.ones(2, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            log(f"step {step}/{steps} loss {loss.item():.4f}", flush=True)


@run
def loop_skips_samples():
    _loop(12, fails=(3, 7))
    torch.save({"a": 1}, "model.pt")


@run
def loop_retries_a_download():
    for attempt in range(3):
        try:
            if attempt < 2:
                raise TimeoutError("The read operation timed out")
            print("downloaded")
        except TimeoutError as error:
            print(f"attempt {attempt + 1} failed: {error!r}; retrying in 0 s", flush=True)
    _loop(8)


@run
def loop_epochs():
    for epoch in range(1, 4):
        print(f"Epoch [{epoch}/3]", flush=True)
        _loop(4)
        print(f"val_loss: {1 / epoch:.3f} acc: {0.3 * epoch:.2f} error_rate: {1 - 0.3 * epoch:.2f}")
    print("Training complete. Best checkpoint: epoch 3")


@run
def loop_bar():
    from tqdm import tqdm

    for _ in tqdm(range(40), desc="train"):
        time.sleep(0.001)
    print("finished in 1.2s")


@run
def loop_old_interfaces():
    scaler = torch.cuda.amp.GradScaler(enabled=False)
    with torch.cuda.amp.autocast(enabled=False):
        _loop(4)
    torch.save({"w": torch.ones(2)}, "m.pt")
    torch.load("m.pt", weights_only=False)
    torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1), 1).step()
    print("done", scaler.is_enabled())


@run
def accelerate_loop():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=None)
    accelerator.print("state", accelerator.state)
    _loop(6, log=accelerator.print)
    accelerator.save_state("state")
    accelerator.end_training()


@run
def accelerate_notebook_launch():
    from accelerate import debug_launcher

    debug_launcher(partial(_loop, 4), num_processes=2)


def _lightning(**more):
    import pytorch_lightning as lightning

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, at):
            loss = self.net(batch).pow(2).mean()
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch, at):
            self.log("val_loss", self.net(batch).pow(2).mean(), prog_bar=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    loader = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4)
    kwargs = {"accelerator": "cpu", "max_epochs": 2, "log_every_n_steps": 1, "default_root_dir": "o", **more}
    return lightning.Trainer(**kwargs), Net(), loader


@run
def lightning_plain():
    made, net, loader = _lightning()
    made.fit(net, loader, loader)


@run
def lightning_few_steps():
    made, net, loader = _lightning(max_steps=5, max_epochs=-1, enable_progress_bar=False, gradient_clip_val=1.0)
    made.fit(net, loader)


@run
def lightning_stops_early():
    from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

    made, net, loader = _lightning(
        max_epochs=30,
        callbacks=[
            EarlyStopping("val_loss", patience=1, min_delta=9, verbose=True),
            ModelCheckpoint(monitor="val_loss"),
        ],
    )
    made.fit(net, loader, loader)


@run
def lightning_resumes():
    made, net, loader = _lightning()
    made.fit(net, loader)
    made.save_checkpoint("last.ckpt")
    made, net, loader = _lightning(max_epochs=4)
    made.fit(net, loader, ckpt_path="last.ckpt")
    made.validate(net, loader)


@run
def lightning_fast_dev_run():
    made, net, loader = _lightning(fast_dev_run=True)
    made.fit(net, loader, loader)


@run
def sentence_transformers():
    from sentence_transformers import SentenceTransformer, models
    from sentence_transformers.losses import CosineSimilarityLoss
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    model.model.save_pretrained("base")
    tok.save_pretrained("base")
    embedder = SentenceTransformer(
        modules=[
            word := models.Transformer("base", max_seq_length=8),
            models.Pooling(word.get_word_embedding_dimension()),
        ],
        device="cpu",
    )
    rows = Dataset.from_dict({"a": ["a b"] * 32, "b": ["a c"] * 32, "score": [0.5] * 32})
    args = SentenceTransformerTrainingArguments("o", use_cpu=True, report_to="none", max_steps=4, logging_steps=1)
    SentenceTransformerTrainer(
        model=embedder, args=args, train_dataset=rows, loss=CosineSimilarityLoss(embedder)
    ).train()


LAUNCHED = {
    "torchrun_two_ranks": ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29671"),
    "torchrun_restarts": ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", "--master-port", "29672"),
    "accelerate_launch": ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--main_process_port", "29673"),
}
OPTIONS = {"torchrun_restarts": ("--fail-once",)}
