"""Stop a rehearsal instance from inside: `python -m gpuwarden.rehearsal.self_stop CLOUD ID`, as its runner calls it."""

from __future__ import annotations

import sys
from pathlib import Path

from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Unknown
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.store import Store


def main(root: Path, instance: str) -> str:
    """Ask the cloud; return why it did not take the request, nothing when it did."""
    config = Store(root).config()
    if config is None:
        return f"there is no cloud in {root}"
    try:
        answer = Cloud(root, config.profile, SystemClock(), supervise=False, make=False).self_stop(instance)
    except WardenError as refusal:
        return refusal.message
    return answer.why if isinstance(answer, Unknown) else ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]) or 0)
