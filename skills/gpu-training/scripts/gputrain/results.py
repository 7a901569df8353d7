"""Finish a run: save the final model, its card and result.json, and push the model."""

import json
import os
import platform
import shutil
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from gputrain.folder import ARGUMENTS, FINAL, RESULT, emptied, put_in_place, write_json
from gputrain.outcome import Exit, Stop, rank, say
from gputrain.settings import Common, Settings

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "sentence-transformers")
PAUSES = (2, 8, 30)


def versions() -> dict[str, str]:
    """Return the versions of Python and the libraries."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_result(settings: Settings, **values: Any) -> None:
    """Write result.json: the objective, the settings and how the run ended. Sweeps read this file."""
    if rank() or not Path(settings.out).is_dir():
        return
    numbers = {**(values.get("metrics") or {})}
    objective = {"name": settings.objective, "value": numbers.get(settings.objective),
                 "greater_is_better": settings.greater_is_better}  # fmt: skip
    body = {"objective": objective, **values, "settings": asdict(settings), "versions": versions()}
    write_json(Path(settings.out) / RESULT, body)


def figures(trainer: Any, trained: dict[str, Any]) -> dict[str, Any]:
    """Return the model size and the speed of a run. `tokens` is None if the method does not count tokens."""
    counts = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    return {
        # One element contains two 4-bit weights.
        "parameters": sum(
            p.numel() * (2 * p.element_size() if type(p).__name__ == "Params4bit" else 1)
            for p in trainer.model.parameters()
        ),
        "tokens": counts[-1] if counts else None,
        "seconds": trained.get("train_runtime"),
        "rows_per_second": trained.get("train_samples_per_second"),
        "recomputes": bool(getattr(trainer.model, "is_gradient_checkpointing", False)),
    }


def need_push(settings: Common) -> None:
    """Create the Hub repo for the push before training starts.

    Raises:
        Stop: the token is missing or has no write permission.

    """
    if not settings.hub_model_id or rank():
        return
    token = os.environ.get("HF_TOKEN", "")
    if not token:
        raise Stop(Exit.ENVIRONMENT, "hub_model_id is set, but HF_TOKEN is not", "pass HF_TOKEN as a secret of the job")
    from huggingface_hub import HfApi

    try:
        HfApi(token=token).create_repo(settings.hub_model_id, private=not settings.hub_public, exist_ok=True)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        message = f"HF_TOKEN can't write to {settings.hub_model_id}: {text}"
        raise Stop(Exit.ENVIRONMENT, message, "use a token with write access to this repo") from error


def push(settings: Common, final: Path) -> None:
    """Upload the final folder, with retries.

    Raises:
        Stop: every attempt failed; the folder on disk is complete.

    """
    if not settings.hub_model_id or rank():
        return
    from huggingface_hub import HfApi

    api = HfApi(token=os.environ.get("HF_TOKEN", ""))
    for pause in (*PAUSES, None):
        try:
            api.upload_folder(folder_path=final, repo_id=settings.hub_model_id, commit_message=f"Add {final.name}")
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            if pause is None:
                message = f"the push to {settings.hub_model_id} failed: {text}"
                raise Stop(Exit.PUSH, message, f"{final} is complete; upload it from there") from error
            say(f"push failed, trying again in {pause} s: {text}")
            time.sleep(pause)
        else:
            say(f"pushed to {settings.hub_model_id}")
            return


def save_final(trainer: Any, settings: Settings, method: str, metrics: dict[str, Any]) -> Path:
    """Write the final model and its card as one folder, atomically."""
    out = Path(settings.out)
    final, making = out / FINAL, out / ".saving" / FINAL
    if rank() == 0:
        emptied(out, FINAL)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(making))
    trainer.accelerator.wait_for_everyone()
    if rank() == 0:
        making.joinpath(ARGUMENTS).unlink(missing_ok=True)
        making.joinpath("README.md").write_text(card(settings, method, metrics), encoding="utf-8")
        put_in_place(making, final)
        shutil.rmtree(out / ".saving", ignore_errors=True)
    return final


def card(settings: Settings, method: str, metrics: dict[str, Any]) -> str:
    """Return the model card: base model, data, metrics, versions and settings."""
    on_hub = {"base_model": settings.model, "datasets": settings.dataset}
    known = [f"{n}: {v}" for n, v in on_hub.items() if v.count("/") == 1 and not Path(v).exists()]
    front = "\n".join(["---", *known, "tags:", f"- {method}", "---"])
    rows = "\n".join(f"| {n} | {v:.6g} |" for n, v in sorted(metrics.items()) if isinstance(v, (int, float)))
    given = json.dumps(asdict(settings), indent=1, sort_keys=True)
    made = ", ".join(f"{n} {v}" for n, v in versions().items())
    first = f"Trained from `{settings.model}` on `{settings.dataset}` with `{Path(sys.argv[0]).name}`."
    parts = [
        f"{front}\n\n# {Path(settings.model).name}, {method}\n\n{first}",
        f"## Results\n\n| metric | value |\n|---|---|\n{rows}",
        f"## How it was made\n\n{made}\n\n```json\n{given}\n```\n",
    ]
    return "\n\n".join(parts)
