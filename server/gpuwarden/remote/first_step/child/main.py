"""Run a script with its training limited to the first steps, and write the outcome.

    python -I -c "import sys; sys.path.insert(0, CODE); from ...child.main import main; main(ORDER)"

The order is a JSON file with the script, its arguments, the limits, and the files that the parent downloaded from the
Hub.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import json
import os
import re
import signal
import sys
import time
import traceback
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, NoReturn

from gpuwarden.remote.first_step.child import data, devices, handlers, hub, loops, small_models, trainers
from gpuwarden.remote.first_step.child.imports import AfterImport
from gpuwarden.remote.first_step.child.record import Enough, Record, Stopped, model_files, write
from gpuwarden.remote.first_step.child.verdict import is_code_error, judge, judge_caught, stopped

REPORTS = (".csv", ".json", ".jsonl", ".log", ".md", ".txt", ".png", ".html", ".yaml")
"""The suffixes of files that contain no model. If a script saves only such files, the model is lost."""


def main(order_file: str) -> NoReturn:
    """Rehearse the script, write the outcome, and exit without waiting for the script's other threads and processes."""
    gc.set_threshold(200_000, 20, 20)  # collect less often: imports create millions of objects that are never freed
    with open(order_file, encoding="utf-8") as file:
        order = json.load(file)
    bound(order)
    record = Record(order)
    began = time.monotonic()
    try:
        with deadline(order["seconds"]):
            outcome = rehearse(record)
    except BaseException as error:
        outcome = {
            "outcome": "stopped",
            "message": f"{type(error).__name__}: {error}"[:600],
            "why": "a substitute failed",
        }
    used = os.times()
    outcome.update(
        reached=record.reached, substitutes=record.substitutes, steps=record.steps, resumed=record.resumed,
        pushed=sorted(set(record.pushed))[:20], wants=record.wants[:8], files=model_files(order["work"])[:200],
        seconds=time.monotonic() - began, cpu_s=used.user + used.system, peak_mb=peak(),
    )  # fmt: skip
    write(order["outcome"], outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def bound(order: Dict[str, Any]) -> None:
    """Limit memory, processor time and file size for this process and its children."""
    try:
        import resource
    except ImportError:  # on Windows; the parent's time limit still applies
        return
    for what, most in ((resource.RLIMIT_DATA, order["memory"]), (resource.RLIMIT_CPU, order["cpu_s"]),
                       (resource.RLIMIT_FSIZE, order["file_bytes"]), (resource.RLIMIT_CORE, 0)):  # fmt: skip
        _, hard = resource.getrlimit(what)
        most = int(most if hard == resource.RLIM_INFINITY else min(most, hard))
        resource.setrlimit(what, (most, most))


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise Stopped in the script when its time limit is reached, so that the traceback contains the current line."""

    def late(*args: Any) -> NoReturn:
        raise Stopped(f"the script took longer than {seconds:.0f} s")

    if not hasattr(signal, "setitimer"):  # Windows
        yield
        return
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def peak() -> float:
    """Return this process's peak memory in megabytes."""
    try:
        import resource
    except ImportError:
        return 0.0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (1e6 if sys.platform == "darwin" else 1e3)


def rehearse(record: Record) -> Dict[str, Any]:
    """Run the script with the substitutes, and return the outcome."""
    order = record.order
    small_models.prepare(record, order["hub_cache"])
    substitute(record)
    script, work = order["script"], order["work"]
    with open(script, encoding="utf-8") as file:
        source = file.read()
    os.chdir(work)
    sys.path.insert(0, work)
    sys.argv = [script, *order["args"]]
    own = ModuleType("__main__")
    watchers = handlers.watchers(record, lambda e: is_code_error(record, e), lambda e: not stopped(record, e))
    vars(own).update(__file__=script, __builtins__=__builtins__, **loops.counters(record), **watchers)
    sys.modules["__main__"] = own
    try:
        tree = ast.parse(source, script)
        saving = handlers.saves(tree)
        record.numbers = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) is int}
        record.numbers.update(int(found) for word in order["args"] for found in re.findall(r"\d{1,9}", word))
        record.at("import")
        bounded = handlers.watch(loops.shorten(tree))
        exec(compile(bounded, script, "exec"), vars(own))  # noqa: S102 - it runs in the sandbox
    except Enough:
        return {"outcome": "passed", "why": "the training loop has an unknown length and was stopped after a few steps"}
    except SystemExit as error:
        if error.code not in (None, 0) and not record.caught:
            return judge(record, error, script)
    except BaseException as error:
        traceback.print_exc()
        return judge(record, error, script)
    return judge_caught(record, record.caught, script) if record.caught else ended(record, work, saving)


def ended(record: Record, work: str, saving: bool) -> Dict[str, Any]:
    """Return the outcome for a script that ran to completion."""
    if record.unfit:
        return {"outcome": "stopped", "why": record.unfit, "message": record.unfit}
    if not record.steps and "step" not in record.reached:
        why = "the script ended, but no optimizer step was detected"
        return {"outcome": "stopped", "why": why, "message": why}
    if record.frozen:
        message = "the script trained a model in which no parameter requires a gradient"
        return {"outcome": "fault", "certain": True, "message": message, "line": 0, "text": ""}
    files = model_files(work)
    kept = [name for name in files if not name.endswith(REPORTS)]
    if not kept and not record.pushed and (record.unsaved or not saving):
        what = f" ({record.unsaved})" if record.unsaved else ""
        message = f"the script trained, but did not save or push anything{what}"
        return {"outcome": "fault", "certain": True, "message": message, "line": 0, "text": ""}
    if files or record.pushed:
        record.at("save")
    record.at("end")
    return {"outcome": "passed"}


def substitute(record: Record) -> None:
    """Register the substitutes. Each one is installed right after its library has been imported."""
    patches: Dict[str, Callable[[Record, ModuleType], None]] = {
        "torch": devices.patch_torch,
        "torch.utils.data.dataloader": devices.patch_loader,
        "datasets": data.patch_datasets,
        "huggingface_hub": hub.patch_hub,
        "transformers.modeling_utils": hub.patch_models,
        "transformers.models.auto.auto_factory": hub.patch_auto,
        "transformers.training_args": trainers.patch_arguments,
        "transformers.trainer": trainers.patch_trainer,
        "lightning.pytorch.trainer.trainer": trainers.patch_lightning,
        "pytorch_lightning.trainer.trainer": trainers.patch_lightning,
    }

    def guarded(patch: Callable[[Record, ModuleType], None]) -> Callable[[ModuleType], None]:
        def apply(module: ModuleType) -> None:
            try:
                patch(record, module)
            except Exception as error:
                record.unfit = (
                    f"the substitutes don't support the installed version of {module.__name__}: "
                    f"{type(error).__name__}: {error}"
                )

        return apply

    AfterImport({name: guarded(patch) for name, patch in patches.items()}).install()
    original = argparse.ArgumentParser.error

    def error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        record.usage = message
        original(self, message)

    argparse.ArgumentParser.error = error  # type: ignore[method-assign]
