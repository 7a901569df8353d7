"""Define the callbacks for metrics, signals and gradients, and load the user's own callbacks."""

import importlib.util
import json
import math
import os
import queue
import signal
import threading
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gputrain.launch import signal_asked
from gputrain.outcome import Exit, Stop, rank, say
from gputrain.settings import Settings

FP16_PATIENCE = 20
FLAT = 3
NAMES = {"loss": "train_loss"}
TRIES = 6


class Reporter:
    """Write metrics to a file, and post them to the training system's API if its environment variables are set."""

    def __init__(self, settings: Settings) -> None:
        self.file = os.environ.get("GPUWARDEN_METRICS", "") or str(Path(settings.out) / "metrics.jsonl")
        self.model = settings.model
        self.api = {n: os.environ.get(n, "") for n in ("METRICS_API_URL", "ALERT_API_URL", "JOB_ID", "USER_ID")}
        self.posts: queue.Queue[tuple[str, dict[str, str], dict[str, Any]] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._send, daemon=True)
        self.started = time.monotonic()
        if any((self.api["METRICS_API_URL"], self.api["ALERT_API_URL"])) and rank() == 0:
            self.thread.start()

    def line(self, step: int, values: dict[str, Any]) -> None:
        """Write one line of numbers, and queue it for the API."""
        numbers = {n: v for n, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        if rank() or not numbers:
            return
        self._write(json.dumps({"step": step, **numbers}) + "\n")
        if self.api["METRICS_API_URL"] and self.api["JOB_ID"]:
            point = {NAMES.get(n, n): v for n, v in numbers.items() if math.isfinite(v)}
            point |= {"step": step, "timestamp": datetime.now(UTC).isoformat()}
            token = os.environ.get("JOB_TOKEN", "")
            body = {"job_id": self.api["JOB_ID"], "metrics": [point]}
            self._queue(self.api["METRICS_API_URL"], {"Authorization": f"Bearer {token}"} if token else {}, body)

    def alert(self, kind: str, status: str, **more: Any) -> None:
        """Queue an alert for the API."""
        if rank() or not (self.api["ALERT_API_URL"] and self.api["JOB_ID"] and self.api["USER_ID"]):
            return
        body = {"type": kind, "job_id": self.api["JOB_ID"], "user_id": self.api["USER_ID"], "model_name": self.model,
                "status": status, "duration": round(1000 * (time.monotonic() - self.started)), **more}  # fmt: skip
        key = os.environ.get("INTERNAL_API_KEY", "")
        self._queue(self.api["ALERT_API_URL"], {"X-API-Key": key} if key else {}, body)

    def close(self, seconds: float = 20) -> None:
        """Wait up to `seconds` until everything in the queue has been sent."""
        if self.thread.is_alive():
            self.posts.put(None)
            self.thread.join(seconds)

    def _write(self, line: str) -> None:
        """Append to the file. If that fails, stop writing metrics and continue the run without them."""
        try:
            if self.file:
                Path(self.file).parent.mkdir(parents=True, exist_ok=True)
                with Path(self.file).open("a", encoding="utf-8") as file:
                    file.write(line)
        except OSError as error:
            say(f"metrics are no longer written: {self.file}: {error.strerror}")
            self.file = ""

    def _queue(self, url: str, headers: dict[str, str], body: dict[str, Any]) -> None:
        if url.startswith(("https://", "http://")):
            self.posts.put((url, headers, body))

    def _send(self) -> None:
        while (post := self.posts.get()) is not None:
            url, headers, body = post
            headers = headers | {"Content-Type": "application/json"}
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
            for attempt in range(TRIES):
                try:
                    urllib.request.urlopen(request, timeout=10).close()  # noqa: S310
                    break
                except OSError:
                    time.sleep(min(8, 0.25 * 2**attempt))


class Watcher:
    """A callback that handles only the events that it defines.

    It does not inherit from TrainerCallback, because importing that class loads PyTorch, which would delay the report
    of invalid settings by seconds.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


class Metrics(Watcher):
    """Report the trainer's logs with unrounded numbers; print them with the step, total steps and remaining time."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.began, self.first = time.monotonic(), 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the time and the number of the first step."""
        self.began, self.first = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Report the metrics of one log event."""
        import torch

        values = dict(logs or {})
        shown = {n: f"{v:.4g}" if isinstance(v, float) else v for n, v in values.items() if n != "total_flos"}
        where: dict[str, Any] = {"step": state.global_step, "total": state.max_steps}
        if done := state.global_step - self.first:
            each = (time.monotonic() - self.began) / done
            where["left"] = str(timedelta(seconds=round(each * (state.max_steps - state.global_step))))
        say(str(where | shown))
        if torch.cuda.is_available():
            values["gpu_memory_allocated_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
        self.reporter.line(state.global_step, values)


class Varying(Watcher):
    """Warn if all answers to a prompt get the same reward, because the model then learns nothing."""

    def __init__(self) -> None:
        self.flat = self.logs = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Count the consecutive logs in which every group of answers has equal rewards."""
        if (share := (logs or {}).get("frac_reward_zero_std")) is None:
            return
        self.logs += 1
        self.flat = self.flat + 1 if share >= 1 else 0
        if self.flat == FLAT:
            self.warn()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn if the rewards were equal in all logs of a short run."""
        if 0 < self.flat == self.logs < FLAT:
            self.warn()

    def warn(self) -> None:
        """Print the warning."""
        say("WARNING: all answers to a prompt get equal rewards, so nothing is learned; change --reward or the prompts")


class Interrupted(Watcher):
    """Save a checkpoint at the step at which SIGTERM or SIGUSR1 arrives, and stop."""

    def __init__(self) -> None:
        self.signal = 0
        self.training = False

    def listen(self) -> None:
        """Install the signal handlers."""
        for name in ("SIGTERM", "SIGUSR1"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self._take)

    def _take(self, number: int, frame: Any) -> None:
        if not self.training:
            raise Stop(Exit.INTERRUPTED, f"{signal.Signals(number).name} before training started", "start it again")
        self.signal = number

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make all processes save a checkpoint and stop training at the same step, if a signal has arrived."""
        if args.world_size > 1:
            import torch

            signals = torch.tensor(self.signal or signal_asked(), device=args.device)
            torch.distributed.all_reduce(signals, torch.distributed.ReduceOp.MAX)
            self.signal = int(signals.item())
        if self.signal:
            control.should_save = control.should_training_stop = True


class Finite(Watcher):
    """Stop before an optimizer step that would write non-finite numbers into the weights."""

    def __init__(self) -> None:
        self.bad = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Check every gradient; fp16 may skip a few steps while its scale adapts."""
        import torch

        norms = []
        for parameter in model.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                norms.append(local.detach().float().norm().cpu())
        self.bad = self.bad + 1 if norms and not bool(torch.isfinite(torch.stack(norms)).all()) else 0
        if self.bad > (FP16_PATIENCE if args.fp16 else 0):
            message = f"the gradient of step {state.global_step + 1} is not finite; the last checkpoint is intact"
            raise Stop(Exit.DIVERGED, message, "lower --learning-rate, check the rows of that step, or use bf16")


def own_callbacks(text: str) -> list[Any]:
    """Load the callbacks named in `text`, each written as file.py:Class.

    Raises:
        Stop: a callback can't be loaded.

    """
    found = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        file, _, kind = name.rpartition(":")
        try:
            spec = importlib.util.spec_from_file_location(Path(file).stem, file)
            module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            spec.loader.exec_module(module)  # type: ignore[union-attr]
            found.append(getattr(module, kind)())
        except Exception as error:
            raise Stop(Exit.CONFIG, f"callback {name} can't be loaded: {error}", "write file.py:Class") from error
        say(f"callback {name}")
    return found
