"""A cluster's whole life on real Slurm through SkyPilot's real API server. `make sky` runs it, which takes minutes.

SkyPilot installs its runtime on the node with uv. The address of uv's installer isn't reachable everywhere, so uv from
PyPI is put where SkyPilot looks for it, with this machine's certificates and one of its interpreters.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from contract_backend import until
from gpuwarden.backends.sky import SkyBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import NotSupported, Unreachable
from gpuwarden.core.models import Instance, InstanceState, JobSpec, Known, Resources, StopResult
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.profiles import load_profile
from gpuwarden.providers.sky import SkyProvider
from gpuwarden.remote.sky.client import SkyClient
from gpuwarden.remote.sky.rows import Info
from real_parts import need
from sky_kit import RealServer
from slurm_kit import Cluster
from sshd import PATH, Sshd
from waiting import soon

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.prove,
    pytest.mark.skipif(not os.environ.get("GPUWARDEN_SKY_SLURM"), reason="`make sky` launches on a real cluster"),
]
UV = """#!/bin/bash
export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_SYSTEM_CERTS=1 UV_NATIVE_TLS=1
words=()
for word in "$@"; do case "$word" in 3.10|3.10.*) word={python};; esac; words+=("$word"); done
exec {uv} "${{words[@]}}"
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """An API server that can use a one-node Slurm cluster over SSH."""
    base = tmp_path_factory.mktemp("skyslurm")
    host = socket.gethostname().split(".")[0]
    cluster = Cluster(base / "slurm", names=(host,))  # SkyPilot looks up a node's address by name
    far, home = base / "far", base / "home"
    for folder in (far, home / ".slurm"):
        folder.mkdir(parents=True)
    sshd = Sshd(base / "sshd", path=f"{PATH}:/usr/sbin SLURM_CONF={base}/slurm/slurm.conf HOME={far}")
    try:
        cluster.start()
        sshd.start()
        (home / ".slurm/config").write_text(
            f"Host localslurm\n  HostName 127.0.0.1\n  Port {sshd.port}\n  User root\n"
            f"  IdentityFile {sshd.folder}/clientkey\n  IdentitiesOnly yes\n"
        )
        server = RealServer.start(home)
        yield server
        server.stop()
    finally:
        sshd.stop()
        cluster.stop()


def place_uv(real: RealServer, name: str, user: str) -> None:
    """Put uv on the node where SkyPilot looks for it, before it does."""
    python = Path(real.env["GPUWARDEN_SKY_PYTHON"])
    uv = shutil.which("uv", path=f"{python.parent}:{os.environ['PATH']}")
    need("uv", uv is not None)
    folder = Path(real.env["HOME"]).parent / f"far/.sky_clusters/{name}-{user}/.local/bin"
    folder.mkdir(parents=True)
    (folder / "uv").write_text(UV.format(python=python.resolve(), uv=uv))
    (folder / "uv").chmod(0o755)


def alias(real: RealServer, name: str) -> Path:
    """Return a copy of SkyPilot's SSH alias with absolute paths: OpenSSH takes `~` from the system, not the test."""
    text = (Path(real.env["HOME"]) / f".sky/generated/ssh/{name}").read_text()
    file = Path(real.env["HOME"]) / "ssh_config"
    file.write_text(text.replace(" ~/", f" {real.env['HOME']}/"))
    return file


@pytest.fixture
def provider(real: RealServer, tmp_path: Path) -> SkyProvider:
    profile = load_profile("sky").model_copy(update={"id": "sky/slurm"})
    return SkyProvider(profile, tmp_path / "state", SystemClock(), real.env)


async def looked(provider: SkyProvider, name: str, state: InstanceState) -> Instance:
    """Poll until the cluster is in a state, for at most 900 seconds."""
    with anyio.fail_after(900):
        while True:
            answer = await provider.get(name)
            if isinstance(answer, Known) and answer.value is not None and answer.value.state is state:
                return answer.value
            assert not isinstance(answer, Known) or answer.value is not None, "it is there, and then its costs are"
            await anyio.sleep(1)


async def test_full_lifecycle_of_a_cluster_and_its_jobs(
    real: RealServer, provider: SkyProvider, tmp_path: Path
) -> None:
    name = "gw-life"

    async def enabled() -> bool:
        return await provider.check() == []

    await soon(enabled, 60, every=1)  # the server checks its clouds after it has started
    place_uv(real, name, (await SkyClient(real.env).ask(Info, "info")).user)
    wanted = Resources(options={"cpus": "1", "memory": "1", "region": "localslurm"}, deadline_s=3_600)
    quote = await provider.quote(wanted)
    assert isinstance(quote, Known) and quote.value.price_usd_per_hour is None, "Slurm has no price"
    assert quote.value.note
    first, again = await provider.create(wanted, "life"), await provider.create(wanted, "life")
    assert isinstance(first, Known) and isinstance(again, Known) and first.value.id == again.value.id == name
    seen = await looked(provider, name, InstanceState.RUNNING)
    assert seen.place and seen.meter is True
    backend = SkyBackend(SystemClock(), alias(real, name), SkyClient(real.env))
    place = seen.place.model_copy(update={"run_root": str(tmp_path / "runs")})
    while True:
        with suppress(Unreachable):
            await backend.host_key(place)
            break
    try:
        work = 'echo "$TOKEN" | wc -c; mkdir out; echo hi > out/a; exit 3'
        spec = JobSpec(platform="sky/slurm", command=("sh", "-c", work), timeout_s=600, secrets=("TOKEN",))
        handle = await backend.submit(spec, place, "one", secrets={"TOKEN": "hunter22-hunter22"})
        assert await backend.submit(spec, place, "one", secrets={"TOKEN": "hunter22-hunter22"}) == handle
        over = await until(backend, handle, lambda o: o.state not in {Job.RUNNING, Job.QUEUED})
        assert (over.state, over.exit_code, over.meter) == (Job.FAILED, 3, True)
        assert (await backend.logs(handle)).text == "18\n"
        listing = await backend.manifest(handle, ["out"])
        assert b"".join([part async for part in backend.read(handle, listing.files[0])]) == b"hi\n"
        long = JobSpec(platform="sky/slurm", command=("sleep", "900"), timeout_s=900)
        second = await backend.submit(long, place, "two", secrets={})
        await until(backend, second, lambda o: o.state is Job.RUNNING and o.reason is not Code.ENGINE_STARTS)
        assert await backend.stop(second, grace_s=2) in {StopResult.STOPPED, StopResult.PENDING}
        assert (await until(backend, second, lambda o: o.state is Job.CANCELED)).meter is True
        assert await backend.stop(second) is StopResult.GONE
        assert await backend.find(place, "three") == Known(None)
    finally:
        await backend.aclose()
    with pytest.raises(NotSupported):
        await provider.stop(name)
    assert await provider.terminate(name) == Known(None)
    assert (await looked(provider, name, InstanceState.GONE)).meter is False
    assert await provider.list() == Known(())
