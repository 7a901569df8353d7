"""Ways to reach a machine, and failures: keys, passwords, closed ports, jump hosts, and proxy commands."""

from __future__ import annotations

import getpass
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuwarden.core.errors import AuthFailed, BadReply, Unreachable
from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.machine import Ssh
from ssh_kit import machine
from sshd import Sshd, keygen
from wording import Wording

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("client")]


async def test_a_key_refused_by_the_machine_is_an_auth_failure(sshd: Sshd, tmp_path: Path, wording: Wording) -> None:
    keygen(tmp_path / "stranger")
    config = tmp_path / "config"
    config.write_text(sshd.config.read_text().replace(f"{sshd.folder}/clientkey", str(tmp_path / "stranger")))
    with pytest.raises(AuthFailed) as refused:
        await Ssh(resolve("box", config=config), config=config).open()
    wording(str(refused.value).partition(" (")[0], f"{getpass.getuser()}@127.0.0.1")


async def test_a_password_only_host_is_an_auth_failure(tmp_path: Path) -> None:
    server = Sshd(tmp_path / "pw", more="")
    server.prepare()
    import sshd as helpers

    original = helpers.CONFIG
    helpers.CONFIG = (
        original.replace("PubkeyAuthentication yes", "PubkeyAuthentication no")
        .replace("PasswordAuthentication no", "PasswordAuthentication yes")
        .replace("PermitRootLogin prohibit-password", "PermitRootLogin yes")
    )
    try:
        server.start()
        with pytest.raises(AuthFailed, match="password"):
            await machine(server).open()
    finally:
        helpers.CONFIG = original
        server.stop()


async def test_a_closed_port_is_unreachable(sshd: Sshd, closed_port: int) -> None:
    with pytest.raises(Unreachable):
        await Ssh(resolve("127.0.0.1", port=closed_port, config=sshd.config), config=sshd.config).open()


@pytest.fixture
def listener() -> Iterator[Callable[[bytes | None], int]]:
    """Return a function that starts a server, which sends the given banner instead of SSH's, or nothing."""
    socks: list[socket.socket] = []

    def start(banner: bytes | None) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        socks.append(server)

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                socks.append(client)
                if banner is not None:
                    client.sendall(banner)
                    client.close()

        threading.Thread(target=serve, daemon=True).start()
        return int(server.getsockname()[1])

    yield start
    for sock in socks:
        sock.close()


async def test_a_port_without_ssh_is_reported(sshd: Sshd, listener: Callable[[bytes | None], int]) -> None:
    port = listener(b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\n\r\n" + b"<html>\r\n" * 200)
    with pytest.raises((BadReply, Unreachable), match="SSH"):
        await Ssh(resolve("127.0.0.1", port=port, config=sshd.config), config=sshd.config).open()


@pytest.mark.slow
async def test_a_missing_banner_is_unreachable(
    sshd: Sshd,
    listener: Callable[[bytes | None], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpuwarden.remote.ssh.paramiko_client.CONNECT_S", 0.5)
    monkeypatch.setattr("gpuwarden.remote.ssh.openssh.CONNECT_S", 1)
    with pytest.raises(Unreachable):
        await Ssh(resolve("127.0.0.1", port=listener(None), config=sshd.config), config=sshd.config).open()


# -------------------------------------------------------------------------------------------- indirect connections


async def test_a_connection_through_a_jump_host_works(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host far\n  HostName 127.0.0.1\n  Port {sshd.port}\n  ProxyJump box\n" + sshd.config.read_text()
    )
    ssh = Ssh(resolve("far", config=config), config=config)
    assert (await ssh.run(["echo", "through"])).out == b"through\n"
    await ssh.aclose()


async def test_a_connection_through_a_proxy_command_works(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    command = f"ssh -F {sshd.config} -o StrictHostKeyChecking=no -W %h:%p box"
    config.write_text(
        f"Host far\n  HostName 127.0.0.1\n  Port {sshd.port}\n  ProxyCommand {command}\n" + sshd.config.read_text()
    )
    ssh = Ssh(resolve("far", config=config), config=config)
    assert (await ssh.run(["echo", "through"])).out == b"through\n"
    await ssh.aclose()
    (sshd.folder / "known_hosts").unlink(missing_ok=True)


def test_the_configuration_is_read_with_includes(tmp_path: Path) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("ssh is not installed here")
    (tmp_path / "more").write_text("Host gpu\n  HostName 10.1.2.3\n  Port 2200\n  User alice\n")
    (tmp_path / "config").write_text(f"Include {tmp_path}/more\n")
    found = resolve("gpu", config=tmp_path / "config")
    assert (found.host, found.port, found.user) == ("10.1.2.3", 2200, "alice")
    assert str(resolve("gpu", port=22, user="bob", config=tmp_path / "config")) == "bob@10.1.2.3:22"
    assert found.known_as == "[10.1.2.3]:2200"


def test_a_known_hosts_path_with_spaces_is_resolved(tmp_path: Path) -> None:
    """`ssh -G` prints the path without the quotes from the configuration."""
    folder = tmp_path / "my keys"
    folder.mkdir()
    for name in ("first file", "second"):
        (folder / name).write_text("")
    (tmp_path / "config").write_text(f'Host gpu\n  UserKnownHostsFile "{folder}/first file" "{folder}/second"\n')
    found = resolve("gpu", config=tmp_path / "config")
    assert found.known_hosts[:2] == (f"{folder}/first file", f"{folder}/second")
