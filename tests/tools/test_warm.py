"""A command forked from a warm process behaves like one that Python starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from doors import environment
from warm import warm

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="forks")]
SHOWN = """
import os, sys
print(sys.argv, sys.stdin.read(), os.getcwd(), os.umask(0), sorted(os.environ.items()), os.listdir("/proc/self/fd"))
print([(s.encoding, s.errors, s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)], __name__)
print("error", file=sys.stderr)
"""
PROGRAMS = {
    "a command": ("-m", "gpuwarden", "rules", "--json"), "a wrong command": ("-m", "gpuwarden", "no-such-command"),
    "arguments": ("-c", SHOWN, "one", "two"), "-P": ("-P", "-c", "import sys; print('' in sys.path, sys.argv)", "one"),
    "a code": ("-c", "raise SystemExit(3)"),
    "a word at the end": ("-c", "raise SystemExit('word')"), "a signal": ("-c", "import os; os.kill(os.getpid(), 9)"),
    "a thread": ("-c", "import threading; threading.Timer(0.1, print, ['late']).start()"),
    "an interrupt": ("-c", "raise KeyboardInterrupt"),
    "no terminal": ("-c", "import os\ntry: os.open('/dev/tty', os.O_RDWR)\nexcept OSError as e: print(e.errno)"),
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_warm_python_behaves_like_a_new_python(program: str, tmp_path: Path) -> None:
    seen = []
    for python in ([sys.executable], warm()):
        done = subprocess.run(
            [*python, *PROGRAMS[program]], env=environment(tmp_path / "home"), input="typed", capture_output=True,
            text=True, cwd=tmp_path, umask=0o027, start_new_session=True, check=False,
        )  # fmt: skip
        seen.append((done.returncode, done.stdout, done.stderr if "Traceback" not in done.stderr else ""))
    assert seen[0] == seen[1]


def test_a_signal_or_a_kill_reaches_the_warm_process() -> None:
    waits = "import os, signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(os.getpid(), flush=True)\n"
    for kill, code in ((signal.SIGTERM, 7), (signal.SIGKILL, -9)):
        argv = [*warm(), "-c", waits + "time.sleep(600)"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            child = os.pidfd_open(int(process.stdout.readline()))
            process.send_signal(kill)
            assert process.wait() == code and process.stdout.read() == "", "no process holds the pipe"
        os.close(child)
