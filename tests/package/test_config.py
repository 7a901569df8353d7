"""The policy: defaults spend nothing, the file and the environment are strict, and every value has an origin."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuwarden.config import Config, load_config
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.policy import Policy, hash_pin, pin_matches
from gpuwarden.interfaces.cli.doctor import in_short_unless_secret
from gpuwarden.interfaces.mcp.wording import in_calls
from wording import Wording


def load(tmp_path: Path, text: str | None = None, **env: str) -> Config:
    home = {"GPUWARDEN_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
    if text is not None:
        (tmp_path / "policy.toml").write_text(text)
        home["GPUWARDEN_POLICY"] = str(tmp_path / "policy.toml")
    return load_config(home | env)


def test_defaults_require_approval_for_spending(tmp_path: Path) -> None:
    policy = load(tmp_path, "").policy
    assert policy == Policy()
    assert policy.approval.channels == ("terminal", "page"), "a script can answer a client's form"
    assert policy.caps_for("runpod").per_job_usd == 0
    assert policy.caps_for("rehearsal/runpod").per_job_usd > 0


def test_a_weak_channel_is_reported_as_weak(wording: Wording) -> None:
    wording(in_short_unless_secret("approval.channels", ("terminal", "elicitation")))


def test_environment_overrides_the_file_and_values_name_their_origin(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        'platforms = ["local", "runpod"]\n[caps]\nper_job_usd = 5\nper_day_usd = 20\n',
        GPUWARDEN_CAPS_PER_DAY_USD="8.5",
        GPUWARDEN_APPROVAL_CHANNELS="terminal",
    )
    found = {s.path: (s.value, s.origin) for s in config.settings}
    assert found["caps.per_job_usd"] == (5, "file")
    assert found["caps.per_day_usd"] == (8.5, "GPUWARDEN_CAPS_PER_DAY_USD")
    assert found["approval.channels"] == (("terminal",), "GPUWARDEN_APPROVAL_CHANNELS")
    assert found["approval.ttl_s"] == (900, "default")
    assert config.policy.allows("runpod") and not config.policy.allows("vastai")


@pytest.mark.parametrize(
    ("text", "env", "named"),
    [
        ("caps = 3", {}, "caps"),
        ("[caps]\nper_job = 3", {}, r"caps\.per_job\b"),
        ("[caps]\nper_job_usd = -1", {}, "caps.per_job_usd"),
        ("[caps]\nper_job_usd = inf", {}, "caps.per_job_usd"),
        ("[caps", {}, r"policy\.toml"),
        ("", {"GPUWARDEN_CAPS_PER_JOB_USD": "lots"}, "GPUWARDEN_CAPS_PER_JOB_USD .*'lots'"),
        ("", {"GPUWARDEN_CAPS_PER_JOB_USD": "nan"}, "GPUWARDEN_CAPS_PER_JOB_USD"),
        ('[approval]\nchannels = ["telepathy"]', {}, "approval.channels"),
        ('[approval]\npin_hash = "1234"', {}, "pin_hash"),
        ("", {"GPUWARDEN_APPROVAL_TTL_S": "1"}, "GPUWARDEN_APPROVAL_TTL_S"),
    ],
)
def test_every_mistake_is_reported_with_its_location(
    tmp_path: Path, text: str, env: dict[str, str], named: str
) -> None:
    with pytest.raises(BadRequest, match=named) as error:
        load(tmp_path, text, **env)
    assert in_calls(error.value.next_steps)


def test_a_missing_named_policy_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"none\.toml"):
        load(tmp_path, GPUWARDEN_POLICY=str(tmp_path / "none.toml"))


@pytest.mark.attack("person", "puts a pipe, a device or a flood in the policy's place")
@pytest.mark.skipif(os.name != "posix", reason="pipes and devices are POSIX")
@pytest.mark.parametrize("what", ["pipe", "folder", "device", "flood"])
def test_only_a_small_regular_file_is_a_policy(tmp_path: Path, what: str) -> None:
    file = tmp_path / "policy.toml"
    match what:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "device":
            file.symlink_to("/dev/zero")
        case _:
            file.write_text("#" * (2 << 20))
    with pytest.raises(BadRequest, match=r"policy\.toml"):
        load_config({"GPUWARDEN_HOME": str(tmp_path / "home"), "GPUWARDEN_POLICY": str(file)})


@pytest.mark.attack("person", "writes to a policy file that everybody may write to")
@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_a_world_writable_policy_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("[caps]\nper_job_usd = 5\n")
    env = {"GPUWARDEN_HOME": str(tmp_path / "home"), "GPUWARDEN_POLICY": str(file)}
    for mode in (0o666, 0o602):
        file.chmod(mode)
        with pytest.raises(BadRequest, match=r"policy\.toml") as refused:
            load_config(env)
        assert f"chmod o-w {file}" in in_calls(refused.value.next_steps)
    file.chmod(0o664)
    assert load_config(env).policy.caps.per_job_usd == 5


def test_a_pin_is_kept_as_a_salted_hash() -> None:
    one, two = hash_pin("24x68"), hash_pin("24x68")
    assert one != two and "24x68" not in one
    assert pin_matches("24x68", one) and not pin_matches("24x69", one) and not pin_matches("24x68", "scrypt$00$00")
