"""Hostile values, shells, and host names over SSH: no part of them is ever run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden.core.errors import BadReply, BadRequest
from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.machine import Ssh
from gpuwarden.remote.ssh.shell_quote import command_line, quote
from ssh_kit import machine
from sshd import Sshd

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("client")]


PIECES = st.one_of(
    st.sampled_from("$`\"'\\;&|<>(){}[]*?!#~ \t\n\r-=%^"),
    st.characters(exclude_characters="\0", exclude_categories=("Cs",)),
    st.sampled_from(["$(touch canary)", "`touch canary`", "; touch canary;", "\udcff", "\n touch canary \n"]),
)
HOSTILE = st.lists(PIECES, max_size=12).map("".join)


@pytest.mark.slow
async def test_a_thousand_hostile_values_never_execute(box: Ssh, tmp_path: Path) -> None:
    """Each value is passed as an argument and comes back unchanged, and no shell on the way runs any part of it."""
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
def test_every_login_shell_preserves_the_arguments(shell: str, tmp_path: Path) -> None:
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
    ran = subprocess.run([shell, "-c", line], cwd=tmp_path, capture_output=True, timeout=300, check=True)
    noise, _, rest = ran.stdout.partition(b"\nMARK ")
    assert noise == b""
    assert rest.partition(b"\n")[2].split(b"\0")[:-1] == [v.encode() for v in values]
    assert not (tmp_path / "canary").exists()


def test_unrepresentable_arguments_are_refused() -> None:
    for argv in ([], [""], ["a\0b"], ["x" * 130_000]):
        with pytest.raises(BadRequest):
            command_line(argv, "m")
    assert quote("plain-Word_1.2/3") == "plain-Word_1.2/3"


@pytest.mark.parametrize("host", ["-oProxyCommand=touch", "a b", "x;y", "$(id)", "", "a\nb", "`id`"])
def test_a_hostile_host_name_is_refused(host: str) -> None:
    with pytest.raises(BadRequest):
        resolve(host)


async def test_shell_output_before_the_command_is_dropped(sshd: Sshd, tmp_path: Path) -> None:
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


async def test_forced_command_output_is_a_bad_reply(tmp_path: Path) -> None:
    forced = Sshd(tmp_path / "forced", more="ForceCommand echo this account is not available")
    forced.start()
    ssh = machine(forced)
    try:
        with pytest.raises(BadReply, match="this account is not available"):
            await ssh.run(["true"])
    finally:
        await ssh.aclose()
        forced.stop()
