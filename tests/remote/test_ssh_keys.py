"""Host keys: first contact, pins, the user's known hosts, and revocation."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.remote.ssh.host_keys import (
    HostKeyChanged,
    HostKeyRevoked,
    HostKeyUnproven,
    fingerprint,
)
from ssh_kit import machine
from sshd import Sshd, keygen

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("client")]


async def test_first_contact_returns_a_key_that_can_be_pinned(sshd: Sshd, tmp_path: Path) -> None:
    ssh = machine(sshd)
    key = await ssh.open()
    await ssh.aclose()
    assert key.first_contact
    assert key.line == sshd.host_key
    shown = subprocess.run(
        ["ssh-keygen", "-l", "-f", f"{sshd.folder}/hostkey.pub"],
        capture_output=True,
        check=True,
        text=True,
        timeout=300,
    )
    assert key.fingerprint in shown.stdout
    pinned = machine(sshd, pin=key.line)
    assert not (await pinned.open()).first_contact
    await pinned.aclose()


async def test_a_changed_key_is_refused(sshd: Sshd, tmp_path: Path) -> None:
    keygen(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    ssh = machine(sshd, pin=other)
    with pytest.raises(HostKeyChanged) as refused:
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
async def test_the_users_known_hosts_are_checked(sshd: Sshd, tmp_path: Path, hashed: bool) -> None:
    known = sshd.folder / "known_hosts"
    keygen(tmp_path / "wrong")
    wrong = " ".join((tmp_path / "wrong.pub").read_text().split()[:2])
    try:
        for line, good in ((sshd.host_key, True), (wrong, False)):
            known.write_text(f"# comment\n[127.0.0.1]:{sshd.port} {line}\n")
            if hashed:
                subprocess.run(
                    ["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, timeout=300, capture_output=True
                )
            known.write_text("broken line\n" + known.read_text())
            ssh = machine(sshd)
            if good:
                assert not (await ssh.open()).first_contact
            else:
                with pytest.raises(HostKeyChanged):
                    await ssh.open()
            await ssh.aclose()
    finally:
        known.unlink()


@pytest.mark.parametrize("who", ["|1|x|y", "|1|", "@revoked |1|****|****", "*1" * 20 + "!"])
async def test_malformed_known_hosts_lines_are_ignored(sshd: Sshd, who: str) -> None:
    known = sshd.folder / "known_hosts"
    known.write_text(f"{who} {sshd.host_key}\n[127.0.0.1]:{sshd.port} {sshd.host_key}\n")
    ssh = machine(sshd)
    try:
        assert not (await ssh.open()).first_contact
    finally:
        await ssh.aclose()
        known.unlink()


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("who", ["[127.0.0.1]:{port}", "*", "[127.0.0.?]:*,other"])
async def test_a_revoked_key_is_refused_despite_other_entries(sshd: Sshd, who: str, pinned: bool) -> None:
    known = sshd.folder / "known_hosts"
    lines = f"[127.0.0.1]:{sshd.port} {sshd.host_key}\n@revoked {who.format(port=sshd.port)} {sshd.host_key}\n"
    try:
        for text in (lines, lines.splitlines()[1]):
            known.write_text(text)
            with pytest.raises(HostKeyRevoked, match="@revoked"):
                await machine(sshd, pin=sshd.host_key if pinned else None).open()
    finally:
        known.unlink()


async def test_markers_and_patterns_in_known_hosts_are_respected(sshd: Sshd, tmp_path: Path) -> None:
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
async def test_a_host_known_only_by_certificate_is_not_trusted_unseen(
    sshd: Sshd, client: str, tmp_path: Path, who: str
) -> None:
    known = sshd.folder / "known_hosts"
    keygen(tmp_path / "authority")
    authority = " ".join((tmp_path / "authority.pub").read_text().split()[:2])
    line = f"@cert-authority {who.format(port=sshd.port)} {authority}\n"
    try:
        known.write_text(line)
        with pytest.raises(HostKeyUnproven, match="@cert-authority") as caught:
            await machine(sshd).open()
        assert caught.value.seen == fingerprint(sshd.host_key)
        wanted = f'"[127.0.0.1]:{sshd.port} $(ssh '
        hint = in_calls(caught.value.next_steps)
        assert wanted in hint and "cat /etc/ssh/ssh_host_ed25519_key.pub)" in hint
        assert ("paramiko" in str(caught.value)) == (client == "paramiko")
        known.write_text(f"{line}[127.0.0.1]:{sshd.port} {sshd.host_key}\n")  # the same line that the hint adds
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
async def test_a_wildcard_or_foreign_authority_does_not_vouch_for_this_host(sshd: Sshd, who: str) -> None:
    known = sshd.folder / "known_hosts"
    known.write_text(f"@cert-authority {who} {sshd.host_key}\n")
    ssh = machine(sshd)
    try:
        assert (await ssh.open()).first_contact
    finally:
        await ssh.aclose()
        known.unlink()
