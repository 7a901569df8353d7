"""SSH against a real OpenSSH server: whose machine it is, what runs there, and that it ends."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden.core.errors import AuthFailed, BadReply, BadRequest, Unreachable
from gpuwarden.remote.connect import HostKeyChanged, HostKeyRevoked, HostKeyUnproven, fingerprint
from gpuwarden.remote.quote import command_line, quote
from gpuwarden.remote.ssh import CommandFailed, Ssh
from gpuwarden.remote.ssh_config import resolve
from sshd import Sshd, free_port, keygen, sshd_fixture  # noqa: F401

pytestmark = pytest.mark.anyio


def machine(server: Sshd, *, pin: str | None = None, host: str = "box") -> Ssh:
    return Ssh(resolve(host, config=server.config), pin=pin, config=server.config)


@pytest.fixture
async def box(sshd: Sshd) -> AsyncIterator[Ssh]:
    ssh = machine(sshd)
    yield ssh
    await ssh.aclose()


def gone(pid: int, seconds: float = 8) -> bool:
    """Whether a process ends within that time; a zombie has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


# ------------------------------------------------------------------------------------------------------ commands


async def test_runs_a_command_with_stdin_and_separate_outputs(box: Ssh) -> None:
    ran = await box.run(["sh", "-c", "cat; echo oops >&2; exit 7"], stdin=b"hello\n")
    assert (ran.code, ran.out, ran.err) == (7, b"hello\n", b"oops\n")


async def test_reuses_one_transport(box: Ssh) -> None:
    first = box._transport()
    for _ in range(3):
        await box.run(["true"])
    assert box._transport() is first


async def test_a_dead_transport_is_opened_again(box: Ssh) -> None:
    await box.run(["true"])
    box._transport().transport.sock.shutdown(socket.SHUT_RDWR)
    assert (await box.run(["echo", "back"])).out == b"back\n"


async def test_many_at_once_wait_for_a_place(box: Ssh) -> None:
    results: list[bytes] = []

    async def one(n: int) -> None:
        results.append((await box.run(["sh", "-c", f"sleep 0.1; echo {n}"])).out)

    async with anyio.create_task_group() as group:
        for n in range(25):
            group.start_soon(one, n)
    assert sorted(int(r) for r in results) == list(range(25))


async def test_a_signal_is_no_exit_code(box: Ssh) -> None:
    assert (await box.run(["sh", "-c", "kill -9 $$"])).code is None


async def test_output_that_is_no_text_comes_through(box: Ssh) -> None:
    ran = await box.run(["sh", "-c", r"printf '\377\000\n\200'"])
    assert ran.out == b"\xff\x00\n\x80"


async def test_a_flood_is_cut_and_ended(box: Ssh, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(BadReply, match="more than 1,000,000 bytes"):
        await box.run(["sh", "-c", f"echo $$ > {pid_file}; exec yes"], limit=1_000_000)
    assert gone(int(pid_file.read_text()))


async def test_a_flood_on_stderr_neither_blocks_nor_grows(box: Ssh) -> None:
    ran = await box.run(["sh", "-c", "yes | head -c 9000000 >&2; echo done"], timeout_s=30)
    assert ran.out == b"done\n"
    assert len(ran.err) <= 1 << 16


async def test_stdin_that_nobody_reads(box: Ssh) -> None:
    ran = await box.run(["true"], stdin=b"x" * (6 << 20), timeout_s=20)
    assert ran.code == 0


async def test_a_timeout_ends_the_far_group(box: Ssh, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"trap '' HUP; sleep 1000 & echo $$ $! > {pids}; wait"
    with pytest.raises(Unreachable, match="no answer in 1 s"):
        await box.run(["sh", "-c", script], timeout_s=1)
    assert all(gone(int(p)) for p in pids.read_text().split())


async def test_a_timeout_ends_what_ignores_TERM(box: Ssh, tmp_path: Path) -> None:  # noqa: N802
    pids = tmp_path / "pids"
    script = f"trap '' TERM HUP; echo $$ > {pids}; while :; do sleep 0.2; done"
    with pytest.raises(Unreachable):
        await box.run(["sh", "-c", script], timeout_s=1)
    assert gone(int(pids.read_text()))


async def test_a_cancel_ends_the_far_process(box: Ssh, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    async with anyio.create_task_group() as group:
        group.start_soon(box.run, ["sh", "-c", f"echo $$ > {pid_file}; exec sleep 1000"])
        with anyio.fail_after(20):
            while not (pid_file.exists() and pid_file.read_text().strip()):
                await anyio.sleep(0.02)
        group.cancel_scope.cancel()
    assert gone(int(pid_file.read_text()))
    assert (await box.run(["echo", "fine"])).out == b"fine\n"


async def test_leaving_a_stream_ends_the_far_process(box: Ssh, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    stream = box.stream(["sh", "-c", f"echo $$ > {pid_file}; exec yes"])
    assert (await anext(stream)).startswith(b"y\n")
    await stream.aclose()  # type: ignore[attr-defined]
    assert gone(int(pid_file.read_text()))


async def test_a_stream_says_how_it_ended(box: Ssh) -> None:
    got = b""
    with pytest.raises(CommandFailed, match="exit code 3: broken") as failed:
        async for chunk in box.stream(["sh", "-c", "echo part; echo broken >&2; exit 3"]):
            got += chunk
    assert got == b"part\n"
    assert failed.value.exit_code == 3


async def test_a_stream_brings_every_byte(box: Ssh, tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000
    (tmp_path / "data").write_bytes(data)
    assert b"".join([chunk async for chunk in box.stream(["cat", str(tmp_path / "data")])]) == data


async def test_feed_sends_pieces(box: Ssh) -> None:
    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(40):
            yield b"z" * 100_000

    ran = await box.feed(["wc", "-c"], pieces())
    assert int(ran.out) == 4_000_000


# ------------------------------------------------------------------------------------------------------- hostile


PIECES = st.one_of(
    st.sampled_from("$`\"'\\;&|<>(){}[]*?!#~ \t\n\r-=%^"),
    st.characters(exclude_characters="\0", exclude_categories=("Cs",)),
    st.sampled_from(["$(touch canary)", "`touch canary`", "; touch canary;", "\udcff", "\n touch canary \n"]),
)
HOSTILE = st.lists(PIECES, max_size=12).map("".join)


async def test_a_thousand_hostile_values_never_execute(box: Ssh, tmp_path: Path) -> None:
    """Each value comes back as it went, as an argument, and no shell on the way ran any of it."""
    canary = tmp_path / "canary"
    fixed = [
        f"$(touch {canary})",
        f"`touch {canary}`",
        f"'; touch {canary}; '",
        f"\\'; touch {canary} #",
        "-n",
        "--",
        "*",
    ]
    batches = [fixed]

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(HOSTILE, min_size=30, max_size=40))
    def collect(values: list[str]) -> None:
        batches.append(values)

    collect()
    for values in batches:
        ran = await box.run(["sh", "-c", f'cd {tmp_path} && printf "%s\\0" "$@"', "sh", *values])
        assert ran.out.split(b"\0")[:-1] == [v.encode("utf-8", "surrogateescape") for v in values]
    assert sum(map(len, batches)) >= 1000
    assert not list(tmp_path.glob("canary*"))


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "ksh", "fish"])
def test_every_login_shell_reads_the_line_back(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    values = [
        "",
        " ",
        "a b",
        "'",
        '"',
        "\\",
        "\\\\",
        "\\'",
        "$(touch canary)",
        "`touch canary`",
        "!x",
        "~",
        "*",
        "a\nb",
        "é\t",
        "-rf",
    ]
    line = command_line(["printf", "%s\\0", *values], "MARK")
    ran = subprocess.run([shell, "-c", line], cwd=tmp_path, capture_output=True, timeout=20, check=True)
    noise, _, rest = ran.stdout.partition(b"\nMARK ")
    assert noise == b""
    assert rest.partition(b"\n")[2].split(b"\0")[:-1] == [v.encode() for v in values]
    assert not (tmp_path / "canary").exists()


def test_what_no_command_line_can_hold_is_refused() -> None:
    for argv in ([], [""], ["a\0b"], ["x" * 130_000]):
        with pytest.raises(BadRequest):
            command_line(argv, "m")
    assert quote("plain-Word_1.2/3") == "plain-Word_1.2/3"


@pytest.mark.parametrize("host", ["-oProxyCommand=touch", "a b", "x;y", "$(id)", "", "a\nb", "`id`"])
def test_a_hostile_host_name_is_refused(host: str) -> None:
    with pytest.raises(BadRequest):
        resolve(host)


async def test_a_shell_that_prints_before_the_command(sshd: Sshd, tmp_path: Path) -> None:
    noisy = Sshd(
        tmp_path / "noisy", more='ForceCommand printf "Welcome!\\n{\\"ok\\":true}\\n"; sh -c "$SSH_ORIGINAL_COMMAND"'
    )
    noisy.start()
    ssh = machine(noisy)
    try:
        assert (await ssh.run(["echo", "answer"])).out == b"answer\n"
    finally:
        await ssh.aclose()
        noisy.stop()


async def test_a_forced_command_is_no_answer(tmp_path: Path) -> None:
    forced = Sshd(tmp_path / "forced", more="ForceCommand echo this account is not available")
    forced.start()
    ssh = machine(forced)
    try:
        with pytest.raises(BadReply, match="this account is not available"):
            await ssh.run(["true"])
    finally:
        await ssh.aclose()
        forced.stop()


# ------------------------------------------------------------------------------------------------------ host keys


async def test_first_contact_hands_the_key_back_and_holds_to_it(sshd: Sshd, tmp_path: Path) -> None:
    ssh = machine(sshd)
    key = await ssh.open()
    await ssh.aclose()
    assert key.first_contact
    assert key.line == sshd.host_key
    shown = subprocess.run(
        ["ssh-keygen", "-l", "-f", f"{sshd.folder}/hostkey.pub"], capture_output=True, check=True, text=True, timeout=9
    )
    assert key.fingerprint in shown.stdout
    pinned = machine(sshd, pin=key.line)
    assert not (await pinned.open()).first_contact
    await pinned.aclose()


async def test_a_changed_key_is_refused(sshd: Sshd, tmp_path: Path) -> None:
    keygen(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    ssh = machine(sshd, pin=other)
    with pytest.raises(HostKeyChanged, match="changed") as refused:
        await ssh.run(["touch", str(tmp_path / "canary")])
    assert refused.value.pinned == fingerprint(other)
    assert refused.value.seen == fingerprint(sshd.host_key)
    assert not (tmp_path / "canary").exists()


async def test_a_key_that_changes_between_two_calls_is_refused(tmp_path: Path) -> None:
    server = Sshd(tmp_path / "s").start()
    ssh = machine(server)
    try:
        await ssh.run(["true"])
        server.stop()
        for name in ("hostkey", "hostkey.pub"):
            (server.folder / name).unlink()
        server.start()
        await ssh.aclose()
        with pytest.raises(HostKeyChanged):
            await ssh.run(["true"])
    finally:
        await ssh.aclose()
        server.stop()


@pytest.mark.parametrize("hashed", [False, True])
async def test_the_users_known_hosts_count(sshd: Sshd, hashed: bool) -> None:
    known = sshd.folder / "known_hosts"
    keygen(sshd.folder / f"wrong{hashed}")
    wrong = " ".join((sshd.folder / f"wrong{hashed}.pub").read_text().split()[:2])
    try:
        for line, good in ((sshd.host_key, True), (wrong, False)):
            known.write_text(f"# comment\n[127.0.0.1]:{sshd.port} {line}\n")
            if hashed:
                subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, timeout=9, capture_output=True)
            known.write_text("broken line\n" + known.read_text())
            ssh = machine(sshd)
            if good:
                assert not (await ssh.open()).first_contact
            else:
                with pytest.raises(HostKeyChanged, match="changed"):
                    await ssh.open()
            await ssh.aclose()
    finally:
        known.unlink()


@pytest.mark.parametrize("who", ["|1|x|y", "|1|", "@revoked |1|****|****", "*1" * 20 + "!"])
async def test_no_line_of_known_hosts_stands_in_the_way(sshd: Sshd, who: str) -> None:
    known = sshd.folder / "known_hosts"
    known.write_text(f"{who} {sshd.host_key}\n[127.0.0.1]:{sshd.port} {sshd.host_key}\n")
    ssh = machine(sshd)
    try:
        with anyio.fail_after(20):
            assert not (await ssh.open()).first_contact
    finally:
        await ssh.aclose()
        known.unlink()


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("who", ["[127.0.0.1]:{port}", "*", "[127.0.0.?]:*,other"])
async def test_a_revoked_key_is_refused_whoever_else_vouches_for_it(sshd: Sshd, who: str, pinned: bool) -> None:
    known = sshd.folder / "known_hosts"
    lines = f"[127.0.0.1]:{sshd.port} {sshd.host_key}\n@revoked {who.format(port=sshd.port)} {sshd.host_key}\n"
    try:
        for text in (lines, lines.splitlines()[1]):
            known.write_text(text)
            with pytest.raises(HostKeyRevoked, match="@revoked"):
                await machine(sshd, pin=sshd.host_key if pinned else None).open()
    finally:
        known.unlink()


async def test_other_markers_and_patterns(sshd: Sshd, tmp_path: Path) -> None:
    known = sshd.folder / "known_hosts"
    keygen(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    try:
        for text, first in (
            (f"@revoked * {other}\n@cert-authority * {sshd.host_key}\n@revoked 10.0.0.1 {sshd.host_key}", True),
            (f"@revoked *,![127.0.0.1]:* {sshd.host_key}", True),
            (f"* {sshd.host_key}\n* {other}", False),
        ):
            known.write_text(text)
            ssh = machine(sshd)
            assert (await ssh.open()).first_contact is first
            await ssh.aclose()
        known.write_text(f"* {other}")
        with pytest.raises(HostKeyChanged):
            await machine(sshd).open()
    finally:
        known.unlink()


@pytest.mark.parametrize("who", ["[127.0.0.1]:{port}", "[127.0.*]:*", "other,[127.0.0.?]:{port}", "!x,[127.*]:*"])
async def test_a_host_that_only_a_certificate_vouches_for_is_not_trusted_unseen(
    sshd: Sshd, tmp_path: Path, who: str
) -> None:
    known = sshd.folder / "known_hosts"
    keygen(tmp_path / "authority")
    authority = " ".join((tmp_path / "authority.pub").read_text().split()[:2])
    line = f"@cert-authority {who.format(port=sshd.port)} {authority}\n"
    try:
        known.write_text(line)
        with pytest.raises(HostKeyUnproven, match="reads no host certificates") as caught:
            await machine(sshd).open()
        assert caught.value.seen == fingerprint(sshd.host_key)
        wanted = f'"[127.0.0.1]:{sshd.port} $(ssh '
        assert wanted in caught.value.hint and "cat /etc/ssh/ssh_host_ed25519_key.pub)" in caught.value.hint
        known.write_text(f"{line}[127.0.0.1]:{sshd.port} {sshd.host_key}\n")  # what the hint does
        ssh = machine(sshd)
        assert not (await ssh.open()).first_contact
        await ssh.aclose()
        known.write_text(line)
        ssh = machine(sshd, pin=sshd.host_key)
        assert not (await ssh.open()).first_contact, "a pin is a proof of our own"
        await ssh.aclose()
    finally:
        known.unlink()


@pytest.mark.parametrize("who", ["*", "[*]:*", "*,![127.0.0.1]:*", "*.example.com", "10.0.0.*"])
async def test_an_authority_for_all_or_other_hosts_says_nothing_of_this_one(sshd: Sshd, who: str) -> None:
    known = sshd.folder / "known_hosts"
    known.write_text(f"@cert-authority {who} {sshd.host_key}\n")
    ssh = machine(sshd)
    try:
        assert (await ssh.open()).first_contact
    finally:
        await ssh.aclose()
        known.unlink()


# ---------------------------------------------------------------------------------------------------- no way in


async def test_a_key_the_machine_does_not_take(sshd: Sshd, tmp_path: Path) -> None:
    keygen(tmp_path / "stranger")
    config = tmp_path / "config"
    config.write_text(sshd.config.read_text().replace(f"{sshd.folder}/clientkey", str(tmp_path / "stranger")))
    with pytest.raises(AuthFailed, match="none of our keys"):
        await Ssh(resolve("box", config=config)).open()


async def test_a_host_that_only_takes_passwords(tmp_path: Path) -> None:
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
        with pytest.raises(AuthFailed, match="takes no public key, only password"):
            await machine(server).open()
    finally:
        helpers.CONFIG = original
        server.stop()


async def test_a_closed_port(sshd: Sshd) -> None:
    with pytest.raises(Unreachable, match="can't be reached"):
        await Ssh(resolve("127.0.0.1", port=free_port(), config=sshd.config)).open()


@pytest.fixture
def listener() -> Iterator[Callable[[bytes | None], int]]:
    """Start a server that says something else than SSH, or nothing."""
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


async def test_a_port_that_answers_something_else(sshd: Sshd, listener: Callable[[bytes | None], int]) -> None:
    port = listener(b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\n\r\n" + b"<html>\r\n" * 200)
    with pytest.raises((BadReply, Unreachable), match="SSH"):
        await Ssh(resolve("127.0.0.1", port=port, config=sshd.config)).open()


async def test_a_banner_that_never_comes(
    sshd: Sshd,
    listener: Callable[[bytes | None], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpuwarden.remote.connect.CONNECT_S", 0.5)
    with pytest.raises(Unreachable, match="handshake"):
        await Ssh(resolve("127.0.0.1", port=listener(None), config=sshd.config)).open()


# ----------------------------------------------------------------------------------------------------- ways around


async def test_through_a_jump_host(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host far\n  HostName 127.0.0.1\n  Port {sshd.port}\n  ProxyJump box\n" + sshd.config.read_text()
    )
    ssh = Ssh(resolve("far", config=config), config=config)
    assert (await ssh.run(["echo", "through"])).out == b"through\n"
    assert ssh._transport().jumps
    await ssh.aclose()


async def test_through_a_proxy_command(sshd: Sshd, tmp_path: Path) -> None:
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
