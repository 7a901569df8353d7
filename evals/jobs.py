"""Training jobs of pretend worlds: real processes, a moment long, that leave real checkpoints. No torch, no network.

Each is one PEP 723 script. The checkpoints are written the way the libraries write them: safetensors by its layout,
`optimizer.pt` as the zip of pickles that torch.save makes, `trainer_state.json` with the step.
"""

from __future__ import annotations

import json
from typing import Any

HEAD = """# /// script
# requires-python = ">=3.11"
# dependencies = []
# ///
"""

SAVE = '''import json, os, pickle, struct, sys, time, zipfile

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
        json.dump({"model_type": "llama"}, file)
    with open(folder + "/trainer_state.json", "w") as file:
        json.dump({"global_step": step, "epoch": 1.0, "log_history": []}, file)
'''

MORE = '''
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
'''

TRAIN = (
    HEAD
    + SAVE
    + '''
for step in range(1, 4):
    print("step", step, "loss", round(2 / step, 3), *sys.argv[1:], flush=True)
save("out/final")
print("saved out/final", flush=True)
'''
)
"""What agents launch: it trains for no time at all and saves `out/final`."""


def past(job: dict[str, Any]) -> str:
    """The script of a job that a world starts with: it leaves what the world says and ends as the world says."""
    lines = [_saved(c) for c in job["checkpoints"] if c["path"].startswith("out/")]
    lines += [_litter(c["path"]) for c in job["checkpoints"] if not c["path"].startswith("out/")]
    lines += [f"print({text!r}, flush=True)" for text in job["log"]]
    return HEAD + SAVE + MORE + "\n".join([_METRICS, *lines, _ENDS[_ending(job)]]) + "\n"


_METRICS = '''
def note(**row):
    with open("metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\\n")

def steps(first, loss):
    for step in range(first, first + 100_000):
        note(step=step, loss=loss(step))
        print("step", step, flush=True)
        time.sleep(0.1)

note(step=1200, loss=1.9, eval_loss=1.842)
'''

_SAVERS = {"whole": "save_resumable", "truncated": "save_truncated", "bad_optimizer": "save_bad_optimizer"}


def _saved(checkpoint: dict[str, Any]) -> str:
    path, state = checkpoint["path"], checkpoint["state"]
    if path.endswith(".safetensors"):
        return f"os.makedirs('out', exist_ok=True); tensors({path!r}, ['weight'])"
    step = int(path.rpartition("-")[2]) if "step-" in path else 1200
    if state == "whole" and "step-" not in path:
        return f"save({path!r}, {step})"
    return f"{_SAVERS.get(state, 'save_needs_code')}({path!r}, {step})"


def _litter(path: str) -> str:
    """Files outside the outputs: put beside the run's folders, where the machine's own paths are known."""
    name = path.rpartition("/")[2]
    return (
        f"litter = os.path.join(os.getcwd().split('/gpuwarden/')[0], {name!r}); os.makedirs(litter, exist_ok=True)\n"
        "for n in range(41): open(os.path.join(litter, '%03d.png' % n), 'wb').write(b'x' * 64)"
    )


def _ending(job: dict[str, Any]) -> str:
    if job["fault"] not in ("none", "near_cap"):
        return str(job["fault"]) if job["state"] != "succeeded" else "none"
    return "runs" if job["state"] == "running" else "none"


_FAILS = "sys.exit(1)"
_ENDS = {
    "none": "print('done', flush=True)",
    "runs": "steps(410, lambda step: 1.9)",
    "hang": "note(step=800, loss=1.9); time.sleep(600)",
    "nan_loss": "note(step=411, loss=1.9); note(step=412, loss=float('nan')); time.sleep(600)",
    "loss_spike": "note(step=498, loss=7.9); steps(499, lambda step: 7.9 if step < 510 else 2.2)",
    "oom": f"print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB', flush=True); {_FAILS}",
    "disk_full": f"print('OSError: [Errno 28] No space left on device', flush=True); {_FAILS}",
    "hub_timeout": "print(\"requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='huggingface.co', port=443): "
    f"Read timed out. (read timeout=10)\", flush=True); {_FAILS}",
    "bad_row": f"print('pyarrow.lib.ArrowInvalid: JSON parse error: Missing a comma in row 40113', flush=True); {_FAILS}",
    "auth": f"print('huggingface_hub.errors.HfHubHTTPError: 401 Client Error: Unauthorized for url', flush=True); {_FAILS}",
    "crash": f"print('RuntimeError: the session ended', flush=True); {_FAILS}",
    "preempt": "steps(1300, lambda step: 1.5)",
}


def spec(platform: str, job: dict[str, Any], outputs: list[str]) -> dict[str, Any]:
    """The arguments of `submit_job` for a job of the past."""
    return {
        "platform": platform, "script": past(job), "name": job["name"], "outputs": outputs,
        "timeout_s": 28_800, "estimate_s": 7_200, "max_cost_usd": 20, **json.loads(json.dumps(job.get("args", {}))),
    }  # fmt: skip
