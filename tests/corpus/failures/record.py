"""Record how the small programs in this folder fail, and how noisy others are that succeed.

    python tests/corpus/failures/record.py        # with torch, transformers, trl, peft, datasets and safetensors

runs each of them (or those that are named), called `<entry>--<what>.py` after the entry that explains it, and writes its
output to `../logs/failing/`, shortened to its ends. A first line `# run: -m module ...` says how Python is to start it.
The programs named `healthy_<what>.py` succeed, with all their warnings; their logs are `../logs/healthy/real_<what>.log`.
Each run of `successes.py` succeeds too (`record.py successes` or `record.py successes:NAME`), as `run_<name>.log` there.
The ordinary tests read the recorded logs and need none of these packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOGS = HERE.parent / "logs"
HEAD, TAIL = 4, 80


def command_of(program: Path) -> list[str]:
    """How to start a program."""
    first = program.read_text().partition("\n")[0]
    launcher = first.removeprefix("# run: ").split() if first.startswith("# run: ") else []
    return [sys.executable, *launcher, str(program)]


def record(program: Path, command: list[str] | None = None) -> str:
    """Run one program and return its output, shortened, with the paths of this machine taken out."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command or command_of(program), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300
        )
        return without_places(done.stdout.decode(errors="replace"), program, folder, done.returncode)


def without_places(text: str, program: Path, folder: str, code: int) -> str:
    """Take the paths of this machine out of an output, and shorten it."""
    places = {program: "/job/train.py", HERE: "/job", folder: "/job", sys.prefix: "/venv", sys.base_prefix: "/usr"}
    for real, shown in {**places, Path.home(): "/home/user"}.items():
        text = text.replace(str(real), shown)
    return shortened(text, code)


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


def record_successes(name: str) -> None:
    """Record the named run of `successes.py`, or all of them; a run that fails is reported and not kept.

    Each run is a fork of one process that has imported the trainers, which takes most of the time.
    """
    import successes

    program = HERE / "ranks.py"
    for run in name.split(",") if name else [*successes.RUNS, *successes.LAUNCHED]:
        if run in successes.LAUNCHED:
            options = [*successes.LAUNCHED[run], str(program), *successes.OPTIONS.get(run, ())]
            text = record(program, [sys.executable, *options])
        else:
            text = forked(successes.RUNS[run])
        print(run, text.splitlines()[-1], flush=True)
        if text.endswith(" code 0\n"):
            (LOGS / "healthy" / f"run_{run}.log").write_text(text)
        else:
            print(text[-1500:], flush=True)


def forked(function: Callable[[], None]) -> str:
    """Run a function in a fork of this process, in a new folder, and return its output."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            code = 1
            try:
                function()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return without_places(output.read().decode(errors="replace"), HERE / "successes.py", folder, status)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("successes"):
        record_successes(sys.argv[1].partition(":")[2])
        sys.exit()
    named = [HERE / name for name in sys.argv[1:]]
    for program in named or sorted([*HERE.glob("*--*.py"), *HERE.glob("healthy_*.py")]):
        log_of(program).write_text(record(program))
        print(program.stem, flush=True)
