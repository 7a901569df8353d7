"""Run every measurement of this folder, each in a separate process, and print all figures as one table at the end.

    python -m bench [--small]

The exit code is 1 if a measurement failed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def main(words: list[str], folder: Path = Path(__file__).parent) -> int:
    """Run a folder's scripts in turn, except those whose names begin with `_`."""
    rows: list[str] = []
    failed: list[str] = []
    for path in sorted(folder.glob("[!_]*.py")):
        print(f"\n== {path.stem}", flush=True)
        begun = time.monotonic()
        with subprocess.Popen([sys.executable, str(path), *words], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                rows += [f"| {path.stem:<12} {line}"] if line.startswith("| ") else []
        failed += [path.stem] if process.returncode else []
        print(f"{time.monotonic() - begun:.0f} s", flush=True)
    print(f"\n| {'':<12} | {'figure':<62} | {'value':>16} | {'peer or aim':<30} | {'ratio':>9} |")
    print("|---|---|--:|---|--:|")
    print("".join(rows), end="")
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return len(failed) > 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
