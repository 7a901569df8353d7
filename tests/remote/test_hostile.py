"""A thousand hostile names and values in everything that is transferred: launch, log, listing, pull, and push.

They must remain data everywhere. If a shell read one of them, it would create a canary file, which must never exist.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from contract_backend import until
from gpuwarden.backends.base import list_artifacts, source
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import JobSpec, Place
from gpuwarden.core.safe_names import local_name
from gpuwarden.core.states import TERMINAL_JOBS, Job
from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.machine import Ssh
from gpuwarden.remote.transfer.receive import receive
from gpuwarden.remote.transfer.upload import push
from sshd import Sshd

pytestmark = pytest.mark.anyio

CASES = 1000
PIECES = st.one_of(
    st.sampled_from("$`\"'\\;&|<>(){}[]*?!#~ \t\n\r-=%^:"),
    st.characters(exclude_characters="\0", exclude_categories=("Cs",)),
    st.sampled_from(["$(touch canary)", "`touch canary`", ";touch canary;", "\n touch canary\n", "|touch canary",
                     "'; touch canary; '", '"; touch canary; "', "../", "-rf", "--", "%s", "\\n", "${IFS}"]),
)  # fmt: skip
VALUES = st.lists(PIECES, min_size=1, max_size=10).map("".join)

# Prints all arguments, and creates a file for each one that is a valid file name. The content is the name's number.
SCRIPT = """
import base64, json, os, sys
print(json.dumps(sys.argv[1:]))
print(os.environ["HOSTILE"])
os.mkdir("o")
for number, value in enumerate(sys.argv[1:]):
    name = value.replace("/", "_")
    if name not in ("", ".", "..") and len(os.fsencode(name)) <= 255:
        with open(os.path.join("o", name), "w") as file:
            file.write(str(number))
"""


def gather(count: int) -> list[str]:
    """Return `count` different hostile values."""
    found: dict[str, None] = {}

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(VALUES, min_size=40, max_size=60))
    def collect(values: list[str]) -> None:
        found.update(dict.fromkeys(values))

    for number in range(50):
        if len(found) < count:
            seed(number)(collect)()  # otherwise rounds are equal if hypothesis is derandomized, as in CI
    assert len(found) >= count
    return list(found)[:count]


@pytest.fixture
def backend(sshd: Sshd) -> Iterator[SshBackend]:
    ssh = SshBackend(SystemClock(), config=sshd.config)
    yield ssh
    anyio.run(ssh.aclose)


def silent(*folders: Path) -> bool:
    """Return whether no canary exists: not in `folders`, the home, the working folder, or the root."""
    close = [Path.home() / "canary", Path.cwd() / "canary", Path("/canary")]
    return not any(p.exists() for p in close) and not any([*f.rglob("canary")] for f in folders)


async def travel(backend: SshBackend, sshd: Sshd, tmp_path: Path, values: list[str]) -> None:
    """Run a job with these arguments, variable, token, and file names. Check its log, and pull and push its files."""
    place = Place(platform="ssh", host="box", run_root=str(tmp_path / "runs $(touch canary)"))
    spec = JobSpec(
        platform="ssh", script=SCRIPT, args=tuple(values), env={"HOSTILE": base64.b64encode(b"x").decode() + values[0]},
        outputs=("o", "'; touch canary; '", "$(touch canary)"), timeout_s=120,
    )  # fmt: skip
    handle = await backend.submit(spec, place, "".join(values[:3]), secrets={})
    seen = await until(backend, handle, lambda o: o.state in TERMINAL_JOBS)
    log = await backend.logs(handle, 0, 4 << 20)
    assert seen.state is Job.SUCCEEDED, log.text
    assert json.loads(log.text.splitlines()[0]) == values
    assert values[0].splitlines()[0] in log.text if values[0].strip() else True
    listed = await list_artifacts(backend, handle, spec.outputs)
    made = sorted(os.listdir(Path(handle.run_dir) / "work/o"))
    assert len(listed.files) + len([s for s in listed.skipped if s.startswith("o/")]) == len(made)
    got = await receive(source(backend, handle), listed, tmp_path / "here")
    assert len(got.files) + len(got.problems) == len(listed.files)
    for file in got.files:
        assert Path(file.local).is_relative_to(tmp_path / "here/o")
        assert Path(file.local).read_bytes() == (Path(handle.run_dir) / "work" / file.path).read_bytes()
    for problem in got.problems:
        assert not sendable(problem.path)
    await back(sshd, tmp_path, [f.path for f in got.files])


async def back(sshd: Sshd, tmp_path: Path, names: list[str]) -> None:
    """Push files with these names."""
    machine = Ssh(resolve("box", config=sshd.config), config=sshd.config)
    try:
        files = {name: tmp_path / "here" / name for name in names}
        far = tmp_path / "far `touch canary`"
        await push(machine, files, str(far), python=sys.executable)
        for name, path in files.items():
            assert (far / name).read_bytes() == path.read_bytes()
    finally:
        await machine.aclose()


def sendable(name: str) -> bool:
    try:
        local_name(name, windows=False)
    except WardenError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.attack("files", "gives files, variables and folders names that a shell would run")
async def test_hostile_names_and_values_are_data(backend: SshBackend, sshd: Sshd, tmp_path: Path) -> None:
    await travel(backend, sshd, tmp_path, gather(60))
    assert silent(tmp_path)


@pytest.mark.prove
async def test_a_thousand_hostile_names_and_values_are_data(backend: SshBackend, sshd: Sshd, tmp_path: Path) -> None:
    values = gather(CASES)
    for at in range(0, CASES, 200):
        await travel(backend, sshd, tmp_path / str(at), values[at : at + 200])
    assert len(values) == CASES and silent(tmp_path)
