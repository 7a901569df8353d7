"""Real SSH servers for emulated instances: one OpenSSH server per machine that is up, over its rehearsal disk.

A server runs on this machine, so a `Place` needs the folder that stands for the machine's root, the user that runs the
tests, and the mark by which the cloud finds the machine's processes; `Rooted` puts them into a provider's answers.
"""

from __future__ import annotations

import getpass
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from clouds.base import Emulator
from clouds.gpu import put_gpu
from gpuwarden.core.models import Answer, Instance, InstanceState, Known, Place, Unknown
from gpuwarden.providers._rented import Rented
from sshd import PATH, Sshd

T = TypeVar("T")


class Machines:
    """The SSH servers of one account. A machine that is off or gone has none; after a start it is another port."""

    def __init__(self, folder: Path, cloud: Emulator) -> None:
        self.folder = folder
        self.cloud = cloud
        self.client = Sshd(folder / "client")
        self.client.prepare()
        self.up: dict[str, Sshd] = {}
        cloud.address = self.address
        cloud.before = self.tend

    def address(self, inner: str) -> tuple[str, int]:
        """Where a machine's server listens; port 1 while there is none."""
        server = self.up.get(inner)
        return ("127.0.0.1", server.port) if server else ("127.0.0.1", 1)

    def tend(self) -> None:
        """Start the servers of machines that run now, stop those of machines that do not."""
        truths = self.cloud.cloud.truths()
        running = {i for i, truth in truths.items() if truth.state is InstanceState.RUNNING}
        for inner in set(self.up) - running:
            self.up.pop(inner).stop()
        for inner in running - set(self.up):
            self.up[inner] = self._boot(inner)

    def stop(self) -> None:
        for server in self.up.values():
            server.stop()
        self.up.clear()

    def _boot(self, inner: str) -> Sshd:
        folder = self.folder / inner
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("clientkey", "clientkey.pub"):
            shutil.copy(self.client.folder / name, folder / name)
        put_gpu(folder / "bin")
        return Sshd(folder, path=f"{folder}/bin:{PATH}").start()

    def place(self, place: Place) -> Place:
        """A provider's place as it is on this machine."""
        inner = self.cloud.inner(place.instance_id or "")
        made = self.cloud.cloud.get(inner)
        assert isinstance(made, Known) and made.value is not None
        real = made.value.place
        port = place.port or self.address(inner)[1]  # a test can't have port 22
        here = {"root": real.root if real else "", "env": real.env if real else {}}
        return place.model_copy(update={**here, "user": getpass.getuser(), "port": port})


class Rooted:
    """A provider whose instances' places are those of `Machines`; everything else is the provider's own."""

    def __init__(self, provider: Rented, machines: Machines) -> None:
        self._provider = provider
        self._machines = machines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    async def get(self, id: str) -> Answer[Instance | None]:
        answer: Answer[Instance | None] = await self._provider.get(id)  # type: ignore[attr-defined]
        if isinstance(answer, Unknown) or answer.value is None:
            return answer
        return Known(self._rooted(answer.value))

    async def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        return await self._many(lambda: self._provider.find(token))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        return await self._many(self._provider.list)

    async def _many(self, ask: Callable[[], Awaitable[Answer[tuple[Instance, ...]]]]) -> Answer[tuple[Instance, ...]]:
        answer = await ask()
        return answer if isinstance(answer, Unknown) else Known(tuple(self._rooted(i) for i in answer.value))

    def _rooted(self, i: Instance) -> Instance:
        return i.model_copy(update={"place": self._machines.place(i.place)}) if i.place else i
