"""Stop a rehearsal instance from inside, as its runner does: `python -m gpuwarden.rehearsal.self_stop CLOUD ID`.

If the cloud's clock can be advanced, the path of the clock file is an additional argument.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpuwarden.core.clock import ShiftedClock, SystemClock
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Unknown
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.store import Store


def main(root: Path, instance: str, shifted: str = "") -> str:
    """Request a stop. Return the reason if the cloud refuses it, otherwise an empty string."""
    config = Store(root).config()
    if config is None:
        return f"no rehearsal cloud exists in {root}"
    try:
        clock = ShiftedClock(Path(shifted)) if shifted else SystemClock()
        answer = Cloud(root, config.profile, clock, supervise=False, make=False).self_stop(instance)
    except WardenError as refusal:
        return refusal.message
    return answer.why if isinstance(answer, Unknown) else ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:4]) or 0)
