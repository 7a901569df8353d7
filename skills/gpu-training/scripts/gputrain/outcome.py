"""Exit codes, and the exception that ends a run early."""

import os
import sys
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes. 75 is EX_TEMPFAIL: the same command resumes from the saved checkpoint."""

    OK = 0
    CONFIG = 2
    DATA = 3
    MEMORY = 4
    DIVERGED = 5
    ENVIRONMENT = 6
    PUSH = 7
    INTERRUPTED = 75


class Stop(Exception):
    """End the run with an exit code, one line about the error and one about the fix."""

    def __init__(self, code: Exit, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.fix = code, message, fix


def rank() -> int:
    """Return this process's rank among the processes that train together."""
    return int(os.environ.get("RANK", "0"))


def say(text: str) -> None:
    """Print one line from the first process only."""
    if rank() == 0:
        print(text, flush=True)


def complain(stop: Stop) -> None:
    """Print the error and the fix to stderr."""
    print(f"ERROR ({stop.code.name.lower()}): {stop.message}", file=sys.stderr, flush=True)
    if stop.fix:
        print(f"FIX: {stop.fix}", file=sys.stderr, flush=True)


def why_not_loaded(model: str, error: Exception) -> Stop:
    """Return the exception to raise if a model can't be loaded."""
    text, names = (
        " ".join(str(error).split())[:300],
        {type(e).__name__ for e in (error, error.__cause__, error.__context__)},
    )
    if "GatedRepoError" in names or "gated repo" in text:
        return Stop(Exit.ENVIRONMENT, f"{model} is gated", "accept its terms on the Hub and pass HF_TOKEN")
    if names & {"OutOfMemoryError"}:
        return Stop(Exit.MEMORY, f"{model} does not fit into the GPU", "use --quantize 4bit, or rent a larger GPU")
    return Stop(Exit.ENVIRONMENT, f"{model} can't be loaded: {text}", "check the name, the revision and the network")
