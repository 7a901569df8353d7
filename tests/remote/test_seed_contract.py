"""A trainer that posts as the seeds' page describes runs unchanged, and loses nothing while the server is down.

The trainer below reads its addresses and keys from its environment, posts one point per step and an alert at the start
and the end, and never retries. It is written from the page's description of the calls. The page's own code also runs
unchanged if `GPUWARDEN_SEEDS` names the folder of the pages, which may not be copied into this repository.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpuwarden.job_tokens import job_token
from gpuwarden.lifecycle.context import Context
from load_kit import answers, ready, served
from real_parts import amount, need
from runner_kit import FINAL, call, log, observe, order
from waiting import eventually

TRAINER = """
import os, time
from datetime import datetime, timezone
import requests

job, user = os.getenv("JOB_ID"), os.getenv("USER_ID")
metrics_url, alert_url = os.getenv("METRICS_API_URL"), os.getenv("ALERT_API_URL")

def alert(kind, **more):
    if not alert_url or not job or not user:
        return
    headers = {"Content-Type": "application/json"}
    if os.getenv("INTERNAL_API_KEY", ""):
        headers["X-API-Key"] = os.environ["INTERNAL_API_KEY"]
    reply = requests.post(alert_url, json={"type": kind, "job_id": job, "user_id": user, **more}, headers=headers,
                          timeout=300)
    assert reply.ok, reply.text

def report(step, loss):
    now = datetime.now(timezone.utc).replace(tzinfo=None)
    point = {"step": step, "epoch": 1, "train_loss": loss, "eval_loss": None, "learning_rate": 5e-5, "grad_norm": 0.512,
             "samples_per_second": 12.5, "gpu_memory_allocated_gb": 22.1, "timestamp": now.isoformat() + "Z"}
    reply = requests.post(metrics_url, json={"job_id": job, "metrics": [point]}, timeout=300,
                          headers={"Authorization": "Bearer " + os.getenv("JOB_TOKEN", "")})
    assert reply.ok, reply.text

alert("job_started", total_steps=30)
for step in range(30):
    report(step, 1.0 / (step + 1))
    if step == 14 and os.getenv("PAUSE"):
        open("half", "w").close()
        while os.path.exists("half"):
            time.sleep(0.01)
    if step > 14:
        time.sleep(float(os.getenv("AWAY_S", "0")) / 15)
alert("job_completed", loss=0.25, duration=3600000)
"""

AROUND = """
import os, time
from datetime import datetime
import requests

e = RuntimeError("CUDA out of memory")
{alerts}
{metrics}
class Callback:
    metrics_api_url, job_id, job_token = METRICS_API_URL, JOB_ID, os.getenv("JOB_TOKEN")
    post = _post_metrics_to_api

for step in range(30):
    Callback().post({{"current_step": step, "current_epoch": 1, "train_loss": 1.0 / (step + 1)}})
    if step == 14 and os.getenv("PAUSE"):
        open("half", "w").close()
        while os.path.exists("half"):
            time.sleep(0.01)
    if step > 14:
        time.sleep(float(os.getenv("AWAY_S", "0")) / 15)
"""
"""The smallest trainer around the page's code: only the parts that the page leaves out."""


def shown_code() -> str:
    """Return a trainer with the code from the page: its variables, alerts, and metrics."""
    pages = os.environ.get("GPUWARDEN_SEEDS", "")
    if not pages:
        pytest.skip("GPUWARDEN_SEEDS names no folder with the seeds' pages")
    page = (Path(pages) / "training-system-coordination.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    variables, alerts, metrics = (
        next(block for block in blocks if words in block)
        for words in ("METRICS_API_URL = os.getenv", "def trigger_alert", "def _post_metrics_to_api")
    )
    return AROUND.format(alerts=f"{variables}\n{alerts}", metrics=metrics)


def arrived(ctx: Context, job: str) -> list[int | None]:
    return [point.step for point in ctx.metrics.points(job, "train_loss").points]


@pytest.mark.slow
@pytest.mark.real("requests")
def test_the_trainer_posts_directly_to_the_server(tmp_path: Path) -> None:
    need("requests", find_spec("requests") is not None)
    ctx, (job,) = ready(tmp_path / "home", 1)
    with served(tmp_path / "home") as (_, port):
        base = f"http://localhost:{port}"
        own = {
            "JOB_ID": job, "USER_ID": "u", "METRICS_API_URL": f"{base}/api/training/local/metrics",
            "ALERT_API_URL": f"{base}/api/alerts/trigger", "JOB_TOKEN": job_token(ctx.home, job, "metrics"),
            "INTERNAL_API_KEY": job_token(ctx.home, job, "alerts"),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", TRAINER], env={**os.environ, **own}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert arrived(ctx, job) == list(range(30))
    assert {s.name for s in ctx.metrics.series(job)} >= {"epoch", "learning_rate", "gpu_memory_allocated_gb"}
    assert [a.type for a in ctx.metrics.alerts(job)] == ["job_started", "job_completed"]


@pytest.mark.slow
@pytest.mark.real("requests")
def test_the_documented_code_posts_directly_to_the_server(tmp_path: Path) -> None:
    need("requests", find_spec("requests") is not None)
    code = shown_code()
    ctx, (job,) = ready(tmp_path / "home", 1)
    with served(tmp_path / "home") as (_, port):
        base = f"http://localhost:{port}"
        own = {
            "JOB_ID": job, "USER_ID": "u", "METRICS_API_URL": f"{base}/api/training/local/metrics",
            "ALERT_API_URL": f"{base}/api/alerts/trigger", "JOB_TOKEN": job_token(ctx.home, job, "metrics"),
            "INTERNAL_API_KEY": job_token(ctx.home, job, "alerts"),
        }  # fmt: skip
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **own}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert arrived(ctx, job) == list(range(30))
    assert {a.type for a in ctx.metrics.alerts(job)} == {"job_started", "job_completed", "job_failed"}


@pytest.mark.parametrize(
    ("shown", "away_s"),
    [
        pytest.param(False, 0, marks=pytest.mark.slow),
        pytest.param(True, 0, marks=pytest.mark.slow),
        pytest.param(False, amount(15, 120), marks=[pytest.mark.prove, pytest.mark.endurance]),
        pytest.param(True, amount(15, 120), marks=[pytest.mark.prove, pytest.mark.endurance]),
    ],
)
@pytest.mark.real("requests")
def test_posts_survive_a_server_outage(
    tmp_path: Path,
    folder: Path,
    shown: bool,
    away_s: float,
) -> None:
    need("requests", find_spec("requests") is not None)
    home, code = tmp_path / "home", shown_code() if shown else TRAINER
    ctx, (job,) = ready(home, 1)
    with served(home) as (process, port):
        secrets = {
            "GPUWARDEN_REPORT_TOKEN": job_token(ctx.home, job, "metrics"),
            "GPUWARDEN_REPORT_KEY": job_token(ctx.home, job, "alerts"),
            "GPUWARDEN_REPORT_URL": f"http://127.0.0.1:{port}",
        }
        started = order([sys.executable, "-c", code], secrets=secrets)
        started["spec"]["env"] = {"PAUSE": "1", "AWAY_S": str(away_s)}
        call("start", folder, {**started, "token": job})
        eventually((folder / "work" / "half").exists, 60)  # the trainer imports requests first
        process.kill()
    (folder / "work" / "half").unlink()  # the trainer continues and ends while the server is down
    eventually(lambda: (seen := observe(str(folder)))["state"] in FINAL and seen["alive"] is False, away_s + 30)
    assert observe(str(folder))["state"] == "succeeded", log(folder)
    assert len(arrived(ctx, job)) < 30
    own = {"job_started", "job_completed"} | ({"job_failed"} if shown else set())
    count = len(own) + 2
    with served(home, port):  # it restarts at the same address
        answers(port)
        eventually(lambda: len(ctx.metrics.alerts(job)) >= count, 300)  # the runner retries less and less often
    assert arrived(ctx, job) == list(range(30))
    kinds = [(a.type, a.fields.get("source", "")) for a in ctx.metrics.alerts(job)]
    assert sorted(kinds) == sorted([(k, "") for k in own] + [(k, "runner") for k in ("job_started", "job_completed")])
