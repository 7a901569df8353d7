"""Run one method from settings to result: checks, resume, training, evaluation, final model."""

import ast
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from gputrain.callbacks import Finite, Interrupted, Metrics, Reporter, Varying, own_callbacks
from gputrain.folder import (
    ARGUMENTS,
    BASELINE,
    FINAL,
    RUN,
    checkpoints,
    claim,
    completed,
    identity,
    is_full,
    lock,
    need_room,
    newest,
    put_in_place,
    write_json,
)
from gputrain.hardware import AMPERE, HOPPER, Plan, look
from gputrain.launch import free_memory_retry, leave_note, need_world, start_processes
from gputrain.outcome import Exit, Stop, complain, rank, say
from gputrain.results import figures, need_push, push, save_final, write_result
from gputrain.rows import Data
from gputrain.settings import Settings, pairs, read_settings
from gputrain.smoke import Smoke, with_inputs

NOT_EXTRA = ("push_to_hub", "hub_", "deepspeed", "fsdp", "auto_find_batch_size")

T = TypeVar("T", bound=Settings)


def arguments(settings: Settings, plan: Plan, data: Data) -> dict[str, Any]:
    """Return the arguments that every trainer accepts."""
    evaluates = data.held_out is not None
    reports = [n.strip() for n in settings.report.split(",") if n.strip() != "none"]
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(Path(settings.out) / "tensorboard"))
    given: dict[str, Any] = {
        "output_dir": settings.out,
        "max_steps": settings.steps or -1,
        "num_train_epochs": settings.epochs or 1.0,
        "per_device_train_batch_size": plan.micro,
        "per_device_eval_batch_size": plan.micro,
        "gradient_accumulation_steps": plan.accumulate,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": settings.scheduler,
        "warmup_steps": settings.warmup,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "optim": "adamw_torch",
        "logging_steps": settings.logging_steps,
        "save_strategy": "steps",
        "save_steps": settings.save_steps,
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": (settings.eval_steps or settings.save_steps) if evaluates else None,
        "metric_for_best_model": settings.objective if evaluates else None,
        "greater_is_better": settings.greater_is_better,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "use_cpu": not plan.cuda,
        "seed": settings.seed,
        "data_seed": settings.seed,
        "dataloader_num_workers": settings.workers,
        "report_to": reports or "none",
        "disable_tqdm": True,
    }
    if settings.fast and plan.capability >= AMPERE:
        given |= {"optim": "adamw_torch_fused", "tf32": True}
    if settings.fast and plan.capability >= HOPPER:
        given["torch_compile"] = True
    if settings.fast:
        say(f"fast on {plan.device}: {'nothing applies' if plan.capability < AMPERE else 'fused optimizer, tf32'}"
            f"{', compile' if 'torch_compile' in given else ''}")  # fmt: skip
    given |= extra_arguments(settings, given)
    return given


def extra_arguments(settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments in the setting `extra`, with numbers and truth values converted."""
    found: dict[str, Any] = {}
    for name, text in pairs("extra", settings.extra).items():
        if (name in given and name != "optim") or name.startswith(NOT_EXTRA):
            raise Stop(Exit.CONFIG, f"extra has {name}, which other settings control", "see --help for these settings")
        try:
            found[name] = ast.literal_eval({"true": "True", "false": "False"}.get(text.lower(), text))
        except (ValueError, SyntaxError, TypeError):
            found[name] = text
    return found


def save_whole(trainer: Any, settings: Settings) -> None:
    """Make the trainer's checkpoints atomic: write elsewhere, sync, rename, and only then delete old ones.

    The Trainer writes directly into checkpoint-N. If the process is killed during a save, an incomplete folder remains
    there, and the next start fails although older checkpoints are complete.
    """
    from transformers.trainer_utils import rotate_checkpoints

    write, args = trainer._save_checkpoint, trainer.args  # noqa: SLF001

    def save(model: Any, trial: Any) -> None:
        out = Path(args.output_dir)
        making = out / ".saving" / out.name
        name = f"checkpoint-{trainer.state.global_step}"
        best = trainer.state.best_global_step
        best_path = str(out / f"checkpoint-{best}") if best else None
        if best_path != str(out / name) and not Path(best_path or "").is_dir():
            best_path = None  # no checkpoint was saved at the best step
        if args.should_save:
            shutil.rmtree(making, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        args.output_dir = str(making)
        try:
            write(model, trial)
        finally:
            args.output_dir = str(out)
        trainer.accelerator.wait_for_everyone()
        if args.should_save:
            making.joinpath(name, ARGUMENTS).unlink(missing_ok=True)
            # The Trainer recorded the best checkpoint's path in the temporary folder; record its final path instead.
            trainer.state.best_model_checkpoint = best_path
            trainer.state.save_to_json(str(making / name / "trainer_state.json"))
            put_in_place(making / name, out / name)
            rotate_checkpoints(
                str(out), save_total_limit=settings.keep, best_model_checkpoint=best_path, use_mtime=False
            )
            say(f"saved {name}")
        trainer.accelerator.wait_for_everyone()

    trainer._save_checkpoint = save  # noqa: SLF001


def load_whole(trainer: Any, settings: Settings) -> None:
    """Make the trainer load every weight of a checkpoint.

    For many models (ViT, mixtures of experts), `save_pretrained` uses the weight names of the Hub, which
    `from_pretrained` translates. The Trainer doesn't: it prints a warning and resumes from untrained weights.
    """
    from safetensors import safe_open

    load = trainer._load_from_checkpoint  # noqa: SLF001

    def load_translated(checkpoint: str, *model: Any) -> None:
        target = trainer.accelerator.unwrap_model(trainer.model)
        names: set[str] = set()
        for file in Path(checkpoint).glob("model*.safetensors"):
            with safe_open(file, "pt") as opened:
                names |= set(opened.keys())
        own_loader = not hasattr(type(target), "from_pretrained")
        if own_loader or not names - target.state_dict().keys():
            load(checkpoint, *model)
            return
        if settings.sharding != "none":
            message = f"the weight names in {checkpoint} differ from the model's, so the weights can't be loaded"
            raise Stop(Exit.ENVIRONMENT, message, "resume with --sharding none")
        kind = next(target.parameters()).dtype
        target.load_state_dict(type(target).from_pretrained(checkpoint, dtype=kind).state_dict())
        say(f"{Path(checkpoint).name}: {len(names)} weights loaded under the model's own names")

    trainer._load_from_checkpoint = load_translated  # noqa: SLF001


def prepare(trainer: Any, settings: Settings, plan: Plan, watchers: list[Any]) -> None:
    """Check the processes and the disk, make saving and loading reliable, and attach the callbacks."""
    need_world(plan, trainer.args.world_size)
    parameters = list(trainer.model.parameters())
    weights = sum(p.numel() * p.element_size() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    say(f"model: {sum(p.numel() for p in parameters):,} parameters, {trained:,} of them trained")
    # The optimizer has two moments per trained weight; the checkpoint that is being written needs space too.
    needed, what = (settings.keep + 2) * (weights + 8 * trained), f"{settings.keep + 2} checkpoints"
    need_room(Path(settings.out), needed, what, "lower --keep, or train with LoRA")
    save_whole(trainer, settings)
    load_whole(trainer, settings)
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    for watcher in watchers:
        trainer.add_callback(watcher)


def baseline(trainer: Any, settings: Settings, data: Data) -> dict[str, float]:
    """Return the metrics of the model before training. They are computed once per run."""
    file = Path(settings.out) / BASELINE
    if data.held_out is None or settings.sharding != "none":
        return {}
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        found = {n: v for n, v in trainer.evaluate().items() if isinstance(v, (int, float))}
    if rank() == 0:
        write_json(file, found)
    return found


def need_objective(settings: Settings, before: dict[str, float]) -> None:
    """Raise Stop if the evaluation lacks the objective; the Trainer would fail only at the first checkpoint."""
    if before and settings.objective not in before:
        speed = ("_runtime", "_per_second", "_time")
        known = ", ".join(sorted(n for n in before if n.startswith("eval_") and not n.endswith(speed)))
        message = f"objective is {settings.objective!r}, but the evaluation has {known}"
        raise Stop(Exit.CONFIG, message, "pass --objective with one of these")


def train(
    trainer: Any, settings: Settings, plan: Plan, data: Data, method: str, reporter: Reporter, interrupted: Interrupted
) -> Exit:
    """Train the final model, starting from the newest complete checkpoint or from the first step."""
    from transformers import set_seed

    started, out = time.monotonic(), Path(settings.out)
    checkpoint = newest(out)
    before = baseline(trainer, settings, data)
    need_objective(settings, before)
    set_seed(settings.seed)
    say(f"resuming from {checkpoint.name}" if checkpoint else "starting from the first step")
    reporter.alert("job_started", "running", total_steps=settings.steps)
    interrupted.training = True
    trained = {} if checkpoint and at_its_end(trainer, settings, checkpoint) else steps(trainer, checkpoint)
    step = trainer.state.global_step
    if interrupted.signal:
        write_result(settings, status="interrupted", step=step, baseline=before)
        trainer.accelerator.wait_for_everyone()  # the first process that exits stops the others
        raise Stop(Exit.INTERRUPTED, f"signal {interrupted.signal}: saved at step {step}", "run the same command again")
    metrics = {n: v for n, v in trainer.evaluate().items() if isinstance(v, (int, float))} if data.held_out else {}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    metrics |= {"train_loss": losses[-1]} if losses else {}
    final = save_final(trainer, settings, method, metrics | {f"baseline_{n}": v for n, v in before.items()})
    push(settings, final)
    write_result(
        settings, status="completed", method=method, step=step, metrics=metrics, baseline=before,
        resumed_from=checkpoint.name if checkpoint else None, seconds=round(time.monotonic() - started, 1),
        plan=asdict(plan), peak_memory_gb=peak_memory(), figures=figures(trainer, trained), final=str(final),
    )  # fmt: skip
    reporter.alert("job_completed", "completed", current_step=step, total_steps=step, progress=100.0)
    say(f"completed {step} steps; final model in {final}")
    return Exit.OK


def steps(trainer: Any, checkpoint: Path | None) -> dict[str, Any]:
    """Train, and return the Trainer's metrics."""
    return dict(trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None).metrics)


def at_its_end(trainer: Any, settings: Settings, checkpoint: Path) -> bool:
    """Load a checkpoint that already has all steps, because resuming from it would train one more step.

    Return whether the checkpoint has been loaded.
    """
    from transformers import TrainerState

    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if settings.sharding != "none" or state.global_step < state.max_steps:
        return False
    trainer._load_from_checkpoint(str(checkpoint))  # noqa: SLF001
    trainer.state = state
    say(f"{checkpoint.name} already has all {state.max_steps} steps")
    return True


def peak_memory() -> float | None:
    """Return the peak allocated GPU memory in GB, or None on a CPU."""
    import torch

    return round(torch.cuda.max_memory_allocated() / 1e9, 3) if torch.cuda.is_available() else None


def run(
    kind: type[T], method: str, load: Callable[[T], Data], build: Callable[[T, Plan, Data], Any], smoke: Smoke
) -> int:
    """Run one method with the command line's settings; return the exit code and record it for the supervisor."""
    code = 1
    try:
        code = attempt(kind, method, load, build, smoke)
    except SystemExit as ended:
        code = int(ended.code or 0)
        raise
    finally:
        leave_note("code", code)
    return code


def attempt(
    kind: type[T], method: str, load: Callable[[T], Data], build: Callable[[T, Plan, Data], Any], smoke: Smoke
) -> int:
    """Run one method with the command line's settings; return the exit code."""
    try:
        settings = read_settings(kind, with_inputs(kind, sys.argv[1:], smoke))
    except Stop as stop:
        complain(stop)
        return int(stop.code)
    reporter, mine = None, False
    try:
        say("settings: " + json.dumps(asdict(settings), sort_keys=True))
        need_push(settings)
        data = load(settings)
        start_processes(settings)
        out = Path(settings.out)
        lock(out)
        made = [p.name for p in (*checkpoints(out), out / FINAL) if p.exists()]
        claim(out / RUN, identity(settings, method, data.identity), made)
        if done := completed(out):
            say(f"the run is complete: {done['step']} steps, the final model is in {done['final']}")
            if settings.hub_model_id != done["settings"]["hub_model_id"]:
                push(settings, Path(done["final"]))
            return int(Exit.OK)
        mine = True
        plan = look(settings)
        say(f"plan: {json.dumps(asdict(plan))}")
        reporter, interrupted = Reporter(settings), Interrupted()
        interrupted.listen()
        return int(guarded(settings, plan, lambda: whole(settings, plan, data, method, build, reporter, interrupted)))
    except Stop as stop:
        complain(stop)
        if stop.code is not Exit.INTERRUPTED and mine:
            write_result(settings, status="failed", error=stop.message, exit_code=int(stop.code))
            kind_of = "gpu_oom" if stop.code is Exit.MEMORY else "job_failed"
            if reporter:
                reporter.alert(kind_of, "failed", error_message=stop.message, error_type=stop.code.name)
        return int(stop.code)
    except Exception as error:
        if is_full(error, Path(settings.out)):
            return no_room(settings, reporter)
        if mine:
            write_result(settings, status="failed", error=f"{type(error).__name__}: {error}", exit_code=1)
        if reporter:
            reporter.alert("job_failed", "failed", error_message=str(error)[:500], error_type=type(error).__name__)
        raise
    finally:
        if reporter:
            reporter.close()


def no_room(settings: Settings, reporter: Reporter | None) -> int:
    """End a run whose disk is full. The files of the unfinished save are deleted to free space for the result."""
    out = Path(settings.out)
    stop = Stop(
        Exit.ENVIRONMENT,
        f"the disk with {out} is full",
        "free space or use a larger disk; resume with the same command",
    )
    complain(stop)
    shutil.rmtree(out / ".saving", ignore_errors=True)
    with contextlib.suppress(OSError):
        write_result(settings, status="failed", error=stop.message, exit_code=int(stop.code))
    if reporter:
        reporter.alert("job_failed", "failed", error_message=stop.message, error_type=stop.code.name)
    return int(stop.code)


def whole(
    settings: T,
    plan: Plan,
    data: Data,
    method: str,
    build: Callable[[T, Plan, Data], Any],
    reporter: Reporter,
    interrupted: Interrupted,
) -> Exit:
    """Build the trainer and train."""
    from transformers import set_seed

    # The user's own callbacks are loaded before the weights, so that their errors appear early.
    watchers = [Metrics(reporter), Varying(), interrupted, Finite(), *own_callbacks(settings.callback)]
    set_seed(settings.seed)
    try:
        trainer = build(settings, plan, data)
    except TypeError as error:
        if settings.extra and "keyword argument" in str(error):
            message = f"extra is {settings.extra!r}: {error}"
            raise Stop(Exit.CONFIG, message, "use arguments of the method's config class") from error
        raise
    prepare(trainer, settings, plan, watchers)
    return train(trainer, settings, plan, data, method, reporter, interrupted)


def guarded(settings: Settings, plan: Plan, work: Callable[[], Exit]) -> Exit:
    """Call `work`; if memory runs out, restart once with a smaller micro-batch."""
    import torch

    try:
        return work()
    except torch.OutOfMemoryError:
        pass
    free_memory_retry(settings, plan)
    return Exit.MEMORY
