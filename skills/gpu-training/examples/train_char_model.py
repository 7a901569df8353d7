# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=1.26", "safetensors>=0.5"]
# ///
"""Train a character model in numpy on real text; save complete checkpoints and resume from the newest.

    uv run train_char_model.py [STEPS] [SAVE_EVERY]

A checkpoint folder gets its final name only when all its files are on disk. Every `checkpoint-N` is therefore complete,
even if the process was killed, and the same command resumes from the newest one.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

TEXT = ""  # the text to train on; if empty, the script trains on its own source
CONTEXT, EMBED, HIDDEN, BATCH = 8, 12, 96, 64
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
SAVE_EVERY = int(sys.argv[2]) if len(sys.argv) > 2 else 100
KEEP = 3
OUT = Path("out")


def init(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """Return random float32 weights of an embedding, one hidden layer and an output layer."""
    shapes = {"embed": (size, EMBED), "hidden": (CONTEXT * EMBED, HIDDEN), "out": (HIDDEN, size)}
    weights = {n: rng.normal(0, s[0] ** -0.5, s).astype(np.float32) for n, s in shapes.items()}
    return weights | {"hidden_bias": np.zeros(HIDDEN, np.float32), "out_bias": np.zeros(size, np.float32)}


def loss_and_grads(w: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """Return the cross entropy in nats per character, and its gradients. x: (batch, context) ids, y: (batch,) ids."""
    e = w["embed"][x].reshape(len(x), -1)
    h = np.tanh(e @ w["hidden"] + w["hidden_bias"])
    z = h @ w["out"] + w["out_bias"]
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    rows = np.arange(len(y))
    loss = float(-np.log(p[rows, y] + 1e-9).mean())
    p[rows, y] -= 1
    p /= len(y)
    dh = (p @ w["out"].T) * (1 - h * h)
    de = (dh @ w["hidden"].T).reshape(*x.shape, EMBED)
    embed = np.zeros_like(w["embed"])
    np.add.at(embed, x, de)
    return loss, {"out": h.T @ p, "out_bias": p.sum(0), "hidden": e.T @ dh, "hidden_bias": dh.sum(0), "embed": embed}


def save(step: int, w: dict[str, np.ndarray], m: dict[str, np.ndarray], v: dict[str, np.ndarray], loss: float) -> None:
    """Write a checkpoint under a temporary name, sync its files, and rename it; keep the newest KEEP checkpoints."""
    tmp, final = OUT / f"tmp-checkpoint-{step}", OUT / f"checkpoint-{step}"
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    save_file(w, tmp / "model.safetensors")
    save_file({f"m.{n}": a for n, a in m.items()} | {f"v.{n}": a for n, a in v.items()}, tmp / "optimizer.safetensors")
    (tmp / "trainer_state.json").write_text(json.dumps({"global_step": step, "loss": loss}))
    for file in tmp.iterdir():
        with file.open("rb") as f:
            os.fsync(f.fileno())
    tmp.rename(final)
    for old in checkpoints()[:-KEEP]:
        shutil.rmtree(old)


def checkpoints() -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(OUT.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))


def load() -> tuple[int, dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]] | None:
    """Return the step, weights and moments of the newest checkpoint, or None if there is none."""
    found = checkpoints()
    if not found:
        return None
    state = json.loads((found[-1] / "trainer_state.json").read_text())
    moments = load_file(found[-1] / "optimizer.safetensors")
    m, v = ({n[2:]: a for n, a in moments.items() if n.startswith(k)} for k in ("m.", "v."))
    return state["global_step"], load_file(found[-1] / "model.safetensors"), m, v


def report(step: int, loss: float) -> None:
    """Append one line of metrics to the file that the runner reads."""
    with Path(os.environ.get("GPUWARDEN_METRICS", "metrics.jsonl")).open("a") as f:
        f.write(json.dumps({"step": step, "loss": round(loss, 4)}) + "\n")


def main() -> None:
    """Train with Adam up to STEPS, starting from the newest checkpoint."""
    OUT.mkdir(exist_ok=True)
    text = TEXT or Path(__file__).read_text("utf-8")
    letters = sorted(set(text))
    ids = np.array([letters.index(c) for c in text])
    resumed = load()
    start, w, m, v = resumed or (0, init(np.random.default_rng(0), len(letters)), {}, {})
    print(
        f"resumed at step {start}" if resumed else f"start: {len(ids)} characters, {len(letters)} letters", flush=True
    )
    for step in range(start + 1, STEPS + 1):
        at = np.random.default_rng(step).integers(0, len(ids) - CONTEXT - 1, BATCH)
        x, y = ids[at[:, None] + np.arange(CONTEXT)], ids[at + CONTEXT]
        loss, grads = loss_and_grads(w, x, y)
        for n, g in grads.items():
            m[n] = 0.9 * m.get(n, np.zeros_like(g)) + 0.1 * g
            v[n] = 0.99 * v.get(n, np.zeros_like(g)) + 0.01 * g * g
            scale = np.sqrt(v[n] / (1 - 0.99**step)) + 1e-8
            w[n] = (w[n] - 0.01 * m[n] / (1 - 0.9**step) / scale).astype(np.float32)
        report(step, loss)
        if step % SAVE_EVERY == 0 or step == STEPS:
            save(step, w, m, v, loss)
            print(f"step {step} loss {loss:.3f} saved", flush=True)
        time.sleep(float(os.environ.get("PACE_S", "0")))
    print("done", flush=True)


if __name__ == "__main__":
    main()
