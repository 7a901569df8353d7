"""Processor time of named peers: what a test's bound is a multiple of, so that it is the same claim on any machine."""

from __future__ import annotations

import math
import pickletools
import shlex
import time
from collections.abc import Callable


def cpu_s(work: Callable[[], object], times: int = 3) -> float:
    """Return the processor time of a piece of work in seconds, at best: other work beside it costs some."""
    best = math.inf
    for _ in range(times):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best


def shlex_s() -> float:
    """Return what Python's own shell lexer takes for 132 kB of plain commands."""
    text = "echo word; " * 12_000
    return cpu_s(lambda: list(shlex.shlex(text, punctuation_chars=True)))


def genops_s(opcodes: int) -> float:
    """Return what Python's own disassembler of pickles takes for so many opcodes."""
    data = b"\x80\x02" + b"N0" * (opcodes // 2) + b"N."
    return cpu_s(lambda: sum(1 for _ in pickletools.genops(data)))


def compile_s(lines: int) -> float:
    """Return what Python's own compiler takes for so many plain lines."""
    text = "".join(f"x{n} = f(x{n - 1}, {n}) + [1, 'a']\n" for n in range(lines))
    return cpu_s(lambda: compile(text, "plain.py", "exec"))
