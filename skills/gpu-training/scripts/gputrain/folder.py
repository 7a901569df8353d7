"""Manage the output folder: the run that owns it, its complete checkpoints, and atomic writes."""

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gputrain.outcome import Exit, Stop, rank, say, why_not_loaded
from gputrain.settings import Settings

RUN = "run.json"
BASELINE = "baseline.json"
FINAL = "final"
RESULT = "result.json"
ROOM = 1 << 20
SAMPLE, SAMPLES = 1 << 14, 256  # bytes per sample, samples per file; reading a large file completely would take minutes
ARGUMENTS = "training_args.bin"  # the Trainer's pickled arguments, which are not needed: run.json has the settings
# These may change when a run resumes; every other setting identifies the run.
FREE = {
    "out", "micro_batch", "save_steps", "eval_steps", "eval_rows", "logging_steps", "keep", "fast", "cpu", "expect_gpu",
    "processes", "workers", "report", "callback", "hub_model_id", "hub_public", "objective", "greater_is_better",
    "sharding",
}  # fmt: skip


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: it is written under a temporary name, synced, then renamed."""
    passing = path.with_name(f".{path.name}.part")
    with passing.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True, default=str)
        file.flush()
        os.fsync(file.fileno())
    passing.replace(path)


def sync_tree(folder: Path) -> None:
    """Sync a folder to disk, with all files and folders inside it."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def put_in_place(made: Path, final: Path) -> None:
    """Move a finished folder to its final path with one rename, then delete any older folder of that name."""
    sync_tree(made)
    old = final.with_name(f".old-{final.name}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    made.rename(final)
    sync_tree_names(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_tree_names(folder: Path) -> None:
    """Sync a folder's directory entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(out: Path) -> list[Path]:
    """Return the folders named checkpoint-N, oldest first."""
    found = [p for p in out.glob("checkpoint-*") if p.is_dir() and p.name[11:].isdigit()]
    return sorted(found, key=lambda p: int(p.name[11:]))


def is_whole(checkpoint: Path) -> bool:
    """Return whether the saved step matches the folder's name and each safetensors file has the size in its header."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        if state["global_step"] != int(checkpoint.name[11:]):
            return False
        for file in checkpoint.glob("*.safetensors"):
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
            end = max((t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"), default=0)
            if file.stat().st_size != 8 + size + end:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def newest(out: Path) -> Path | None:
    """Return the newest complete checkpoint, or None; rename newer incomplete ones."""
    for checkpoint in reversed(checkpoints(out)):
        if is_whole(checkpoint):
            return checkpoint
        aside = checkpoint.with_name(f"incomplete-{checkpoint.name}-{os.getpid()}")
        say(f"{checkpoint.name} is incomplete; it is kept as {aside.name}")
        if rank() == 0:
            checkpoint.rename(aside)
    return None


def base_of(settings: Settings) -> str:
    """Return the identity of an adapter's base weights: the Hub's commit, or a digest of samples of each file.

    The identity is an empty string for full fine-tuning, which resumes from its own weights.
    """
    if not getattr(settings, "lora_rank", 0):
        return ""
    folder = Path(settings.model)
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(settings.model, "config.json", revision=settings.revision)).parent.name
        except Exception as error:
            raise why_not_loaded(settings.model, error) from error
    found = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in {".safetensors", ".bin"}):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for at in range(0, size, max(SAMPLE, size // SAMPLES)):
                file.seek(at)
                found.update(file.read(SAMPLE))
    return found.hexdigest()


def completed(out: Path) -> dict[str, Any] | None:
    """Return the result of a run that is complete and has its final model; otherwise None."""
    try:
        result = json.loads((out / RESULT).read_text())
    except (OSError, ValueError):
        return None
    complete = result.get("status") == "completed" and "final" in result and (out / FINAL).is_dir()
    return result if complete else None


def is_full(error: BaseException, out: Path) -> bool:
    """Return whether an error was caused by a full disk."""
    text = f"{error} {error.__cause__ or error.__context__ or ''}"
    words = ("No space left on device", "os error 28", "Disk quota exceeded")
    with contextlib.suppress(OSError):
        return any(word in text for word in words) or shutil.disk_usage(out).free < ROOM
    return False


def identity(settings: Settings, method: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the values that identify a training run, as they are stored in run.json."""
    mine = {n: v for n, v in asdict(settings).items() if n not in FREE}
    return mine | {"method": method, "data": data, "base": base_of(settings)}


def claim(file: Path, mine: dict[str, Any], made: list[str]) -> None:
    """Claim the file's folder for the run that `mine` identifies. `made` lists the results in the folder.

    Raises:
        Stop: the results belong to another run.

    """
    mine, out = json.loads(json.dumps(mine)), file.parent
    fix = "choose another --out, or move that folder away; the folder was not changed"
    try:
        theirs = json.loads(file.read_text())
    except FileNotFoundError:
        if made:
            raise Stop(Exit.CONFIG, f"{out} contains {', '.join(made)} from an unknown run", fix) from None
        theirs = {}
    except ValueError:
        raise Stop(Exit.CONFIG, f"{file} is not readable", fix) from None
    changed = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
    if changed and made:
        shown = ", ".join(f"{n}: {theirs.get(n)!r} in that run, {mine.get(n)!r} now" for n in changed[:4])
        raise Stop(Exit.CONFIG, f"{out} belongs to a run with other settings ({shown})", fix)
    if rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        if changed and file.name == RUN:
            (out / BASELINE).unlink(missing_ok=True)
        write_json(file, mine)


_LOCKS: list[int] = []


def lock(out: Path) -> None:
    """Lock this folder for one run; the kernel releases the lock when the process ends.

    Raises:
        Stop: another run has locked the folder, or the folder is not writable.

    """
    if rank() or os.name != "posix":
        return
    import fcntl

    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Stop(Exit.ENVIRONMENT, f"{out} can't be written: {error.strerror}", "choose another --out") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        message = f"another process is training in {out}"
        raise Stop(Exit.ENVIRONMENT, message, "stop it first, or choose another --out") from None
    _LOCKS.append(descriptor)


def need_room(out: Path, needed: int, what: str, fix: str) -> None:
    """Raise Stop if the disk has fewer free bytes than needed."""
    free = shutil.disk_usage(out).free
    if free < needed:
        message = f"{out} has {free / 1e9:.1f} GB free; {what} need {needed / 1e9:.1f} GB"
        raise Stop(Exit.ENVIRONMENT, message, f"choose a larger disk, {fix}")


def emptied(out: Path, name: str) -> Path:
    """Delete any files that a killed run left at the temporary path for `name`, and return the path."""
    making = out / ".saving" / name
    shutil.rmtree(making, ignore_errors=True)
    return making
