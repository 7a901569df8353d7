"""Variables can make the policy stricter but never looser, for any file and any environment."""

from __future__ import annotations

import os
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

import pytest
import tomlkit
from hypothesis import example, given
from hypothesis import strategies as st

from gpuwarden.config import Config, load_config, value_at
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.policy import Channel, Policy, covered, hash_pin, policy_fields
from wording import Wording

NAMES = (
    "",
    "a",
    "b",
    "ab",
    "abc",
    "local",
    "runpod",
    "rehearsal/runpod",
    "ssh/box",
    "HF_TOKEN",
    "a*",
    "a[",
    "a]b",
    "A",
)
PATTERNS = st.text(alphabet="ab*?[]!-/", max_size=5) | st.sampled_from(
    ("*", "runpod", "rehearsal/*", "HF_TOKEN", "local")
)
LISTS = st.lists(PATTERNS, max_size=3)
MONEY = st.sampled_from((0.0, 0.01, 1.0, 5.0, 20.0, 999_999.0))
PINS = tuple(hash_pin(pin) for pin in ("1111", "2468"))
CHANNELS = st.lists(st.sampled_from(get_args(Channel)), max_size=3)
CAPS = dict.fromkeys(("per_job_usd", "per_day_usd", "per_instance_usd"), MONEY)
NUMBERS = {
    "idle_minutes": st.integers(1, 10_080), "stall_minutes": st.integers(1, 10_080),
    "finished_minutes": st.integers(1, 10_080), "unknown_minutes": st.integers(1, 10_080),
    "disk_free_percent": st.integers(1, 90), "danger_hours": st.integers(1, 720),
}  # fmt: skip
TABLES = {
    "caps": st.fixed_dictionaries({}, optional=CAPS),
    "rehearsal_caps": st.fixed_dictionaries({}, optional=CAPS),
    "platforms": LISTS,
    "approval": st.fixed_dictionaries(
        {}, optional={"channels": CHANNELS, "pin_hash": st.sampled_from(PINS), "ttl_s": st.integers(30, 86_400)}
    ),
    "secrets": st.fixed_dictionaries({}, optional={"allowed": LISTS}),
    "watch": st.fixed_dictionaries({}, optional={**NUMBERS, "desktop": st.just(["notify-send", "{text}"])}),
    "receipt_ttl_s": st.integers(30, 86_400),
}
POLICIES = st.fixed_dictionaries({}, optional=TABLES)
VALUES = st.one_of(
    MONEY.map(str), st.integers(-1, 90_000).map(str), LISTS.map(",".join), CHANNELS.map(",".join),
    st.sampled_from(("", "nan", "inf", "-inf", "1e400", "0x10", "true", "*", "terminal,elicitation", PINS[1],
                     "https://example.org/hook", "curl,{text}")), st.text(max_size=8),
)  # fmt: skip
VARIABLES = [f"GPUWARDEN_{field.path.upper().replace('.', '_')}" for field in policy_fields()]
ENVIRONMENTS = st.dictionaries(st.sampled_from(VARIABLES), VALUES, max_size=6)
EARLIER = {"watch.disk_free_percent", "watch.danger_hours"}
LISTED = {"platforms", "secrets.allowed"}


def read(folder: Path, table: dict[str, Any], env: dict[str, str]) -> tuple[Policy, Config]:
    file = folder / "policy.toml"
    file.write_text(tomlkit.dumps(table), "utf-8")
    home = {"GPUWARDEN_HOME": str(folder / "home"), "GPUWARDEN_POLICY": str(file)}
    return Policy.model_validate(table), load_config(home | env)


def looser(path: str, filed: Any, asked: Any) -> bool:
    """Return whether a value allows anything that the file's doesn't, derived again from each setting's purpose."""
    if path in LISTED:
        return any(allows(asked, name) and not allows(filed, name) for name in NAMES)
    if path == "artifact_stores.allowed":  # an empty list allows any store
        return bool(filed) and not (asked and all(any(place_in(own, place) for own in filed) for place in asked))
    if path == "approval.channels":
        return not set(asked) <= set(filed)
    if (
        path.startswith(("rehearsal_caps.", "ledger.", "team.", "http."))
        or path == "approval.pin_hash"
        or "_url" in path
        or path == "watch.desktop"
    ):
        return bool(asked != filed)
    return bool(asked < filed) if path in EARLIER else bool(asked > filed)


def place_in(wider: str, place: str) -> bool:
    own, other = wider.rstrip("/").split("/"), place.rstrip("/").split("/")
    return len(other) >= len(own) and all(mine in {"*", part} for mine, part in zip(own, other, strict=False))


def allows(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@given(POLICIES, ENVIRONMENTS)
@example({}, {"GPUWARDEN_CAPS_PER_JOB_USD": "999"})
@example({"artifact_stores": {"allowed": ["s3://runs/team"]}}, {"GPUWARDEN_ARTIFACT_STORES_ALLOWED": "s3://runs"})
@example(
    {"artifact_stores": {"allowed": ["s3://runs/team"]}}, {"GPUWARDEN_ARTIFACT_STORES_ALLOWED": "s3://runs/team-b"}
)
@example({"artifact_stores": {"allowed": ["hf://me/runs"]}}, {"GPUWARDEN_ARTIFACT_STORES_ALLOWED": "hf://me/*"})
@example({"artifact_stores": {"allowed": ["s3://runs"]}}, {"GPUWARDEN_ARTIFACT_STORES_ALLOWED": ""})
@example({"caps": {"per_job_usd": 5.0}}, {"GPUWARDEN_CAPS_PER_JOB_USD": "nan"})
@example({"approval": {"pin_hash": PINS[0]}}, {"GPUWARDEN_APPROVAL_PIN_HASH": PINS[1]})
@example({"approval": {"channels": ["terminal"]}}, {"GPUWARDEN_APPROVAL_CHANNELS": "terminal,rehearsal"})
@example({"platforms": ["a?"]}, {"GPUWARDEN_PLATFORMS": "a*"})
@example({"platforms": ["*b"]}, {"GPUWARDEN_PLATFORMS": "a*"})
@example({"platforms": ["a[bc]*"]}, {"GPUWARDEN_PLATFORMS": "a[bc]*,a[b]*"})
def test_environment_variables_never_loosen_a_policy(table: dict[str, Any], env: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            filed, config = read(Path(folder), table, env)
        except BadRequest:
            return  # an unreadable variable stops everything, so it loosens nothing
    for field in policy_fields():
        before, after = value_at(filed, field.path), value_at(config.policy, field.path)
        assert not looser(field.path, before, after), (field.path, before, after, env)
        origin = next(s.origin for s in config.settings if s.path == field.path)
        assert before == after or origin in env, "a changed value names its variable"


@given(POLICIES, ENVIRONMENTS)
def test_an_ignored_variable_is_reported(table: dict[str, Any], env: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            _, config = read(Path(folder), table, env)
        except BadRequest as error:
            said = str(error)
        else:
            said = ""
    if said:
        assert any(name in said for name in env), said
        return
    obeyed = {s.origin for s in config.settings}
    assert {n.name for n in config.notices} == {name for name, text in env.items() if text} - obeyed
    assert all(n.name in n.text and n.about in n.text for n in config.notices)


@given(LISTS, LISTS, st.text(alphabet="ab/*[]!-x", max_size=6))
def test_covered_patterns_match_nothing_new(asked: list[str], filed: list[str], name: str) -> None:
    if covered(asked, filed) and allows(tuple(asked), name):
        assert allows(tuple(filed), name)


@pytest.mark.parametrize(
    ("file", "variable", "value", "path", "comes_to"),
    [
        ({"caps": {"per_job_usd": 5}}, "CAPS_PER_JOB_USD", "2", "caps.per_job_usd", 2.0),
        ({"platforms": ["local", "rehearsal/*"]}, "PLATFORMS", "rehearsal/runpod", "platforms", ("rehearsal/runpod",)),
        ({}, "PLATFORMS", "local", "platforms", ("local",)),
        ({}, "APPROVAL_CHANNELS", "terminal", "approval.channels", ("terminal",)),
        ({}, "APPROVAL_TTL_S", "60", "approval.ttl_s", 60),
        ({"secrets": {"allowed": ["WANDB_*"]}}, "SECRETS_ALLOWED", "WANDB_API*", "secrets.allowed", ("WANDB_API*",)),
        ({}, "ARTIFACT_STORES_ALLOWED", "s3://runs", "artifact_stores.allowed", ("s3://runs",)),
        (
            {"artifact_stores": {"allowed": ["hf://me/*"]}},
            "ARTIFACT_STORES_ALLOWED",
            "hf://me/runs/a",
            "artifact_stores.allowed",
            ("hf://me/runs/a",),
        ),
        ({}, "WATCH_DISK_FREE_PERCENT", "20", "watch.disk_free_percent", 20),
        ({}, "WATCH_IDLE_MINUTES", "5", "watch.idle_minutes", 5),
    ],
)
def test_a_stricter_variable_is_obeyed(
    tmp_path: Path, file: dict[str, Any], variable: str, value: str, path: str, comes_to: object
) -> None:
    _, config = read(tmp_path, file, {f"GPUWARDEN_{variable}": value})
    assert value_at(config.policy, path) == comes_to and not config.notices


@pytest.mark.attack("person", "sets each variable that would loosen the policy")
@pytest.mark.parametrize(
    ("variable", "value", "kind", "about"),
    [
        pytest.param(variable, *rest, id=variable)
        for variable, *rest in (
            ("CAPS_PER_JOB_USD", "50", "looser", "caps.per_job_usd"),
            ("PLATFORMS", "local,vastai", "looser", "platforms"),
            ("APPROVAL_CHANNELS", "rehearsal", "looser", "approval.channels"),
            ("APPROVAL_PIN_HASH", PINS[1], "file_only", "approval.pin_hash"),
            ("REHEARSAL_CAPS_PER_JOB_USD", "1", "file_only", "rehearsal_caps.per_job_usd"),
            ("WATCH_DANGER_HOURS", "1", "looser", "watch.danger_hours"),
            ("WATCH_WEBHOOK_URL", "https://example.org/x", "file_only", "watch.webhook_url"),
            ("WATCH_DESKTOP", "sh,-c,true", "file_only", "watch.desktop"),
            ("RECEIPT_TTL_S", "80000", "looser", "receipt_ttl_s"),
        )
    ],
)
def test_a_looser_variable_is_ignored_and_reported(
    tmp_path: Path, variable: str, value: str, kind: str, about: str, wording: Wording
) -> None:
    filed, config = read(
        tmp_path, {"caps": {"per_job_usd": 5}, "platforms": ["local"]}, {f"GPUWARDEN_{variable}": value}
    )
    assert config.policy == filed
    [notice] = config.notices
    assert (notice.kind, notice.name, notice.about) == (kind, f"GPUWARDEN_{variable}", about) and not notice.question
    wording(notice.text, notice.name, about)
    assert PINS[1] not in notice.text and "example.org" not in notice.text


def test_an_empty_policy_file_variable_counts_as_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    config = load_config({"GPUWARDEN_HOME": str(tmp_path / "home"), "GPUWARDEN_POLICY": ""})
    assert config.policy == Policy() and config.policy_file.name == "policy.toml" and os.sep in str(config.policy_file)
