"""Record how the small programs in this folder fail, and how noisy others are that succeed.

    python tests/corpus/failures/record.py        # with torch, transformers, trl, peft, datasets and safetensors

runs each of them (or those that are named), called `<entry>--<what>.py` after the entry that explains it, and writes its
output to `../logs/failing/`, shortened to its ends. A first line `# run: -m module ...` says how Python is to start it.
The programs named `healthy_<what>.py` succeed, with all their warnings; their logs are `../logs/healthy/real_<what>.log`.
The ordinary tests read the recorded logs and need none of these packages.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOGS = HERE.parent / "logs"
HEAD, TAIL = 4, 80


def command_of(program: Path) -> list[str]:
    """How to start a program."""
    first = program.read_text().partition("\n")[0]
    launcher = first.removeprefix("# run: ").split() if first.startswith("# run: ") else []
    return [sys.executable, *launcher, str(program)]


def record(program: Path) -> str:
    """Run one program and return its output, shortened, with the paths of this machine taken out."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command_of(program), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300
        )
        text = done.stdout.decode(errors="replace")
    places = {program: "/job/train.py", HERE: "/job", folder: "/job", sys.prefix: "/venv", sys.base_prefix: "/usr"}
    for real, shown in {**places, Path.home(): "/home/user"}.items():
        text = text.replace(str(real), shown)
    return shortened(text, done.returncode)


def shortened(text: str, code: int) -> str:
    """Keep both ends of an output, and add the exit code as a shell gives it."""
    lines = [line[:600] for line in text.strip().splitlines()]
    kept = lines if len(lines) <= HEAD + TAIL else [*lines[:HEAD], "[...]", *lines[-TAIL:]]
    return "\n".join([*kept, f"[runner] exited with code {code if code >= 0 else 128 - code}", ""])


def log_of(program: Path) -> Path:
    """Where the output of a program is kept."""
    if program.stem.startswith("healthy_"):
        return LOGS / "healthy" / f"real_{program.stem.removeprefix('healthy_')}.log"
    return LOGS / "failing" / f"{program.stem}.log"


if __name__ == "__main__":
    named = [HERE / name for name in sys.argv[1:]]
    for program in named or sorted([*HERE.glob("*--*.py"), *HERE.glob("healthy_*.py")]):
        log_of(program).write_text(record(program))
        print(program.stem, flush=True)
