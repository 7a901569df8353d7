"""Measure the reading of training scripts against Python's compiler, on this machine, in one run.

    python bench/script_check.py [--rounds 3]

Prints the CPU seconds of reading a shipped trainer, which is far longer than a usual script, with the tables of
released libraries (aim 0.5 s at the median), and their ratio to `compile`. Then prints CPU seconds of whole commands
over one small script that names no repo, and their ratio to `python -m py_compile` (aim 3 for the check). Each round
runs all commands, one after the other.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._figures import arguments, figure

from gpuwarden.data import data_dir
from gpuwarden.static_analysis.package_checks import Libraries
from gpuwarden.static_analysis.script import read_script


def check(text: str) -> None:
    """Read a script and compare its imports and arguments with the released libraries."""
    read = read_script(text)
    listed = read.header.dependencies if read.header else ()
    libraries = Libraries(listed, read.uses.package_use, read.uses.imports)
    list(libraries.imports(read.uses.imports, read.uses.calls))
    list(libraries.arguments(read.uses.calls))


def seconds(action: Callable[[], object]) -> float:
    """Return the CPU seconds of an action in this process."""
    began = time.process_time()
    action()
    return time.process_time() - began


SCRIPT = """
with open("outputs/result.txt", "w") as file:
    file.write("done")
"""
CHECK = "submit --dry-run --platform local --output outputs --timeout 60 small.py"
COMMANDS = {"a check": CHECK, "status": "status", "search": "search NCCL", "--version": "--version"}


def seconds_of(argv: list[str], folder: Path) -> float:
    """Return the CPU seconds of a command and its child processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "GPUWARDEN_HOME": str(folder / "home")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # else each run compiles every module
    subprocess.run(argv, cwd=folder, env=env, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def show_commands(rounds: int) -> None:
    """Measure whole commands, and print their ratios to compiling the same script."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as name:
        folder = Path(name)
        (folder / "small.py").write_text(SCRIPT, "utf-8")
        compiling = [sys.executable, "-m", "py_compile", "small.py"]
        argvs = {what: [sys.executable, "-m", "gpuwarden", *words.split()] for what, words in COMMANDS.items()}
        for argv in (compiling, *argvs.values()):  # bytecode is written, and the ledger created
            seconds_of(argv, folder)
        took: dict[str, list[float]] = {what: [] for what in argvs}
        least = []
        for _ in range(rounds):
            least.append(seconds_of(compiling, folder))
            for what, argv in argvs.items():
                took[what].append(seconds_of(argv, folder))
        for what, found in took.items():
            ratio = statistics.median(mine / other for mine, other in zip(found, least, strict=True))
            peer = f"py_compile {statistics.median(least):.2f} s"
            figure(f"gpuwarden {what}, CPU", f"{statistics.median(found):.2f} s", peer, ratio)


def main() -> None:
    """Measure and print."""
    asked = arguments(__doc__, {"rounds": (3, 1), "scripts": (100, 2)})
    rounds = asked.rounds
    paths = sorted((data_dir("skills") / "gpu-training" / "scripts").glob("*.py"))[: asked.scripts]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    first = seconds(lambda: check(texts[0]))
    read = statistics.median(seconds(lambda t=t: check(t)) for _ in range(rounds) for t in texts)  # type: ignore[misc]
    built = statistics.median(
        seconds(lambda t=t: compile(t, "script", "exec"))  # type: ignore[misc]
        for _ in range(rounds)
        for t in texts
    )
    figure(
        f"read one of {len(texts)} scripts, CPU (aim 0.5 s)", f"{read:.3f} s", f"compile {built:.4f} s", read / built
    )
    figure("  the first one of a process", f"{first:.3f} s", f"compile {built:.4f} s", first / built)
    show_commands(rounds)


if __name__ == "__main__":
    main()
