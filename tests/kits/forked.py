"""Run jobs as forks of a process that has imported the libraries. A killed fork holds no lock that others need."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


def preload(modules: str, **names: str) -> None:
    """Import modules, and names that their packages import lazily: `trl="SFTTrainer DPOTrainer"`."""
    for module in (*modules.split(), *names):
        package = importlib.import_module(module)
        for name in names.get(module, "").split():
            getattr(package, name)


def serve(run: Callable[[dict[str, Any]], int]) -> None:
    """Run each job from stdin, one JSON object per line, in a forked child with its own log. Print its exit code."""
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            own_progress_locks()
            log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = 1
            try:
                code = run(job)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def own_progress_locks() -> None:
    """Give this process its own locks for progress bars.

    tqdm shares a semaphore with forked processes; a process that is killed while drawing a bar would hold it forever.
    """
    if "tqdm.std" in sys.modules:
        for bar in _with_subclasses(sys.modules["tqdm.std"].tqdm):
            bar.set_lock(threading.RLock())


def _with_subclasses(kind: type[Any]) -> Iterator[Any]:
    yield kind
    for below in kind.__subclasses__():
        yield from _with_subclasses(below)
