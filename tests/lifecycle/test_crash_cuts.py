"""The connection to a machine is cut during transfers, while its provider lies and another account polls it.

Each life is one job from quote to teardown, as in `test_crash.py`, but its machine is behind a real OpenSSH server and
a proxy that cuts all connections at random points. Every use case runs in its own process; half of those after the
submit run with another account's key first, and one in ten is killed.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash_kit import SEED, Driver, Life, Tally
from cutting import CuttingProxy
from gpuwarden.core.models import JobSpec
from lifecycle_kit import PLATFORM
from real_parts import amount
from sshd import Sshd

SIZES = {"model": 400_000, **{f"part-{n}": 2_000 + n for n in range(30)}}
"""Number of values in each of a job's files: one large enough to be cut itself, and a bundle."""

TRAIN = """
import json, os, struct, sys, time
said, sizes = sys.argv[1], json.loads(sys.argv[2])
line = "%s %s %d\\n" % (os.environ["GPUWARDEN_JOB"], os.environ["GPUWARDEN_ATTEMPT"], os.getpid())
fd = os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, line.encode())
os.makedirs("out", exist_ok=True)
for name, count in sizes.items():
    head = json.dumps({"w": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    head += b" " * (-len(head) % 8)
    with open("out/tmp", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + struct.pack("<%df" % count, *range(count)))
    os.rename("out/tmp", "out/%s.safetensors" % name)
"""


def saved(count: int) -> str:
    """Return the digest of the file that the job saves with this many values."""
    head = json.dumps({"w": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    head += b" " * (-len(head) % 8)
    return hashlib.sha256(struct.pack("<Q", len(head)) + head + struct.pack(f"<{count}f", *range(count))).hexdigest()


class CutLife(Life):
    """One job whose machine is reached through a connection that is cut."""

    def __init__(
        self, driver: Driver, tally: Tally, home: Path, rng: random.Random, server: Sshd, proxy: CuttingProxy
    ) -> None:
        super().__init__(driver, tally, home, rng, "cuts")
        self.proxy = proxy
        self.hit: Counter[str] = Counter()
        self.through = [str(server.config), proxy.port]
        self.spec = JobSpec.model_validate(
            {
                "name": "train",
                "platform": PLATFORM,
                "command": (sys.executable, "-I", "-S", "-c", TRAIN, str(self.said), json.dumps(SIZES)),
                "outputs": ("out",),
                "timeout_s": 600,
                "max_cost_usd": 5.0,
            }
        )

    def step(self, phase: str, **more: Any) -> dict[str, Any]:
        before = self.proxy.cuts
        try:
            return super().step(phase, through=self.through, **more)
        finally:
            self.hit[phase] += self.proxy.cuts - before

    def plan(self, phase: str) -> dict[str, Any]:
        if phase in self.tally.lived_ms and self.rng.random() < 0.1:
            return {"after": self.rng.randrange(self.tally.lived_ms[phase] + 1)}
        return {}

    def saved(self) -> list[str]:
        return sorted(map(saved, SIZES.values()))


def cut_often(folder: Path, server: Sshd, proxy: CuttingProxy, cuts: int) -> Tally:
    """Run lives until the connection was cut this many times."""
    tally, driver, hit, n = Tally(), Driver(folder), Counter[str](), 0
    print(f"GPUWARDEN_CRASH_SEED={SEED}")
    try:
        while proxy.cuts < cuts:
            rng = random.Random(f"{SEED}-cuts-{n}")
            draw = random.Random(f"{SEED}-points-{n}")
            proxy.arm(lambda: int(10 ** draw.uniform(3.0, 5.8)))  # noqa: B023
            life = CutLife(driver, tally, folder / f"life{n}", rng, server, proxy)
            life.live()
            hit += life.hit
            n += 1
    finally:
        proxy.arm(lambda: None)
        driver.close()
    print(f"{proxy.cuts} cuts and {sum(tally.kills.values())} kills in {n} lives: {dict(hit)}")
    assert (hit["pull"] or cuts < 30) and (hit["submit"] or cuts < 200) and sum(hit.values()) >= cuts * 3 // 4
    return tally


@pytest.mark.long
@pytest.mark.prove
@pytest.mark.endurance
@pytest.mark.attack("ending", "cuts the line at any byte while the provider lies and the account changes")
def test_cuts_with_a_lying_provider_lose_and_duplicate_nothing(
    tmp_path: Path, sshd: Sshd, proxy: CuttingProxy, record_property: Callable[[str, object], None]
) -> None:
    tally = cut_often(tmp_path, sshd, proxy, amount(10, 30))
    record_property("figure", f"{proxy.cuts} cuts and {sum(tally.kills.values())} kills")
