"""Write the training jobs for the scenarios: short, real processes that save real checkpoints without torch or a
network.

Each job is one PEP 723 script. The checkpoints have the libraries' formats: safetensors files with a valid header,
`optimizer.pt` as the zip of pickles that torch.save writes, and `trainer_state.json` with the step.
"""

from __future__ import annotations

from typing import Any

HEAD = """# /// script
# requires-python = ">=3.11"
# dependencies = []
# ///
"""

SAVE = """import json, os, pickle, struct, sys, time, zipfile

def tensors(path, names):
    head = {n: {"dtype": "F32", "shape": [4], "data_offsets": [16 * i, 16 * i + 16]} for i, n in enumerate(names)}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + struct.pack("<4f", 1, 2, 3, 4) * len(names))

def torch_zip(path, value):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3\\n")

def save(folder, step=1200):
    os.makedirs(folder, exist_ok=True)
    tensors(folder + "/model.safetensors", ["weight"])
    with open(folder + "/config.json", "w") as file:
        json.dump({"model_type": "one-weight"}, file)
    with open(folder + "/trainer_state.json", "w") as file:
        json.dump({"global_step": step, "epoch": 1.0, "log_history": []}, file)
"""

MORE = """
def save_resumable(folder, step):
    save(folder, step)
    torch_zip(folder + "/optimizer.pt", {"param_groups": [{"params": [0]}], "state": {0: {"step": step}}})
    torch_zip(folder + "/scheduler.pt", {"last_epoch": step})
    torch_zip(folder + "/rng_state.pth", {"python": 1})

def save_truncated(folder, step=1200):
    os.makedirs(folder, exist_ok=True)
    names = ["model-0000%d-of-00003.safetensors" % n for n in (1, 2, 3)]
    for n, name in enumerate(names):
        tensors(folder + "/" + name, ["weight%d" % n])
    with open(folder + "/model.safetensors.index.json", "w") as file:
        json.dump({"weight_map": {"weight%d" % n: name for n, name in enumerate(names)}}, file)
    os.truncate(folder + "/" + names[1], 60)

def save_bad_optimizer(folder, step=1200):
    save_resumable(folder, step)
    os.truncate(folder + "/optimizer.pt", 200)

def save_needs_code(folder, step=1200):
    os.makedirs(folder, exist_ok=True)
    body = b"cmy_model\\nModel\\n)R."
    with zipfile.ZipFile(folder + "/model.pt", "w") as file:
        file.writestr("archive/data.pkl", b"\\x80\\x02" + body)
        file.writestr("archive/version", "3\\n")
"""

STAND_IN = """class Rows(list):
    def map(self, function):
        return Rows(function(dict.fromkeys(COLUMNS, "hello")) for _ in range(3))

def load_dataset(*_, **__):
    return Rows()
"""
"""A replacement for the `datasets` library that works without a network. The simulated machines use it."""


def past(job: dict[str, Any], gate: str) -> str:
    """Return the script of a past job, with the output and the outcome that the scenario defines.

    The script waits for the file `gate`, so that simulated hours can pass before the job ends.
    """
    lines = [_saved(c) for c in job["checkpoints"]]
    lines += [f"print({text!r}, flush=True)" for text in job["log"]]
    waits = f"while not os.path.exists({gate!r}): time.sleep(0.02)"
    newest = max((_step(c["path"]) for c in job["checkpoints"]), default=1200)
    if job.get("bulk"):  # large enough that its transfer can be interrupted
        lines.append(f"os.truncate('out/final/config.json', {job['bulk']})")
    metrics = _METRICS.replace("1200", str(newest))
    if job["state"] == "succeeded" or job.get("ends"):
        end = "print('done', flush=True)"
    elif job["fault"] in _SAID:
        end = f"print({_SAID[job['fault']]!r}, flush=True); sys.exit(1)"
    else:
        end = "steps(1300 if os.path.exists('out') else 410, lambda step: 1.9)"
    # Write the metrics after the checkpoints, because the first metric signals that every checkpoint is saved.
    return HEAD + SAVE + MORE + "\n".join([*lines, metrics, *_BEFORE.get(job["fault"], []), waits, end]) + "\n"


_METRICS = """
def note(**row):
    with open(os.environ.get("GPUWARDEN_METRICS", "metrics.jsonl"), "a") as file:
        file.write(json.dumps(row) + "\\n")

def steps(first, loss):
    for step in range(first, first + 100_000):
        note(step=step, loss=loss(step))
        print("step", step, flush=True)
        time.sleep(0.1)

note(step=1200, loss=1.9, eval_loss=1.842)
"""

_SAVERS = {"whole": "save_resumable", "truncated": "save_truncated", "bad_optimizer": "save_bad_optimizer"}


def _step(path: str) -> int:
    return int(path.rpartition("-")[2]) if "step-" in path else 1200


def _saved(checkpoint: dict[str, Any]) -> str:
    path, state = checkpoint["path"], checkpoint["state"]
    if not path.startswith("out/"):  # files next to the run folders, under the machine's own paths
        return (
            f"litter = os.path.join(os.getcwd().rpartition('/gpuwarden/')[0], {path.rpartition('/')[2]!r})\n"
            "os.makedirs(litter, exist_ok=True)\n"
            "for n in range(41): open(os.path.join(litter, '%03d.png' % n), 'wb').write(b'x' * 64)"
        )
    if path.endswith(".safetensors"):
        return f"os.makedirs('out', exist_ok=True); tensors({path!r}, ['weight'])"
    if state == "whole" and "step-" not in path:
        return f"save({path!r}, {_step(path)})"
    return f"{_SAVERS.get(state, 'save_needs_code')}({path!r}, {_step(path)})"


_BEFORE = {
    "hang": ["note(step=800, loss=1.9)"],
    "nan_loss": ["note(step=411, loss=1.9); note(step=412, loss=float('nan'))"],
    "loss_spike": ["note(step=498, loss=7.9)", "for step in range(499, 560): note(step=step, loss=2.2)"],
}
_SAID = {
    "oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "disk_full": "OSError: [Errno 28] No space left on device",
    "hub_timeout": "urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='huggingface.co', port=443): "
    "Read timed out. (read timeout=10)",
    "bad_row": "pyarrow.lib.ArrowInvalid: JSON parse error: Missing a comma in row 40113",
    "auth": "huggingface_hub.errors.HfHubHTTPError: 401 Client Error: Unauthorized for url",
    "crash": "RuntimeError: the session ended",
}


def lives_on(job: dict[str, Any]) -> bool:
    """Return true if an earlier job is running when the agent starts, or was interrupted before that."""
    return job["state"] in ("queued", "running") or job["fault"] == "preempt"


def was_pulled(job: dict[str, Any]) -> bool:
    """Return true if any output of a past job has been copied here."""
    return any(c["where"] == "pulled" for c in job["checkpoints"])


def saves_durably(job: dict[str, Any]) -> bool:
    """Return true if a past job saved a checkpoint to storage that survives its machine."""
    return any(c["where"] == "volume" for c in job["checkpoints"])


def spec(platform: str, job: dict[str, Any], outputs: list[str], gate: str) -> dict[str, Any]:
    """Return the `submit_job` arguments for a past job."""
    return {
        "platform": platform, "script": past(job, gate), "name": job["name"], "outputs": outputs,
        "timeout_s": 28_800, "estimate_s": 7_200, "max_cost_usd": 20,
    }  # fmt: skip
