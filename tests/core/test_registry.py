"""Plug-ins: checks of their contract, additions by installed packages, and messages about broken plug-ins."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest

from doors import quick_warden
from gpuwarden.backends.base import BACKENDS
from gpuwarden.checkpoints import archive
from gpuwarden.checkpoints.plugins import FORMATS, LAYOUTS
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core import installing
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.contract import Contract, class_faults
from gpuwarden.core.errors import NotFound, NotSupported
from gpuwarden.core.evidence import Cause
from gpuwarden.core.guidance import manual_text
from gpuwarden.core.models import JobSpec, Level, Verdict
from gpuwarden.core.registry import Registry
from gpuwarden.core.rules import run_rules
from gpuwarden.interfaces.cli.doctor import plugin_rows
from gpuwarden.interfaces.hooks.guard.declared import table
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.lifecycle.submission.facts import gather
from gpuwarden.profiles import load_profile
from gpuwarden.providers.base import PROVIDERS, account_keys, load_provider
from gpuwarden.rules.catalog import RULES, all_rules, rules_of
from gpuwarden.rules.page import page_file, render_page
from plugin_kit import Packages
from wording import Wording

EVERY = (PROVIDERS, BACKENDS, FORMATS, LAYOUTS, RULES)

FORMAT = """
from gpuwarden.checkpoints.file_model import Anatomy, Broken

NAME = "weights list"
LOAD = "parsed"

def claims(name, head):
    return name.endswith(".wlist")

def read(source, limits):
    if source.head(4) != b"WLST":
        raise Broken("does not begin with WLST")
    return Anatomy(NAME, proved=["it begins with WLST"])
"""
LAYOUT = """
from gpuwarden.checkpoints.findings import Judgement

NAME = "list of weights"

def claims(folder):
    return "weights.wlist" in folder.files

def judge(folder, found):
    return Judgement(NAME, folder.rel, problems=["has no index"])
"""
RULE = '''
from gpuwarden.core.rules import Found, Severity, rule

@rule("PF-ACME-001", gate="submit", severity=Severity.WARNING, fix="Name the team.")
def team_named(facts):
    """The job names a team.

    Why: the bill is split by team.
    """
    if "TEAM" not in facts.spec.env:
        yield Found("no TEAM is set")
'''
PROVIDER = """
from pathlib import Path
from gpuwarden.core.clock import Clock
from gpuwarden.core.profile import Profile
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.providers.vastai import Vast

class Mine(Vast):
    name = "mycloud"

ACCOUNT_KEYS = ("MYCLOUD_KEY",)
SHELL_GUARD = ShellGuard(ends={"mycloud": ("box kill",)})

def create(profile: Profile, state: Path, clock: Clock) -> Mine:
    return Mine(profile, clock)
"""
BACKEND = """
from gpuwarden.backends.local import LocalBackend
from gpuwarden.core.clock import Clock

class Mine(LocalBackend):
    name = "mine"

def create(clock: Clock) -> Mine:
    return Mine(clock)
"""
SOUND: dict[str, tuple[Registry, str, str]] = {
    "formats": (FORMATS, "wlist", FORMAT),
    "layouts": (LAYOUTS, "wlist_folder", LAYOUT),
    "rules": (RULES, "pf_acme_001_team_named", RULE),
    "providers": (PROVIDERS, "mycloud", PROVIDER),
    "backends": (BACKENDS, "mine", BACKEND),
}


@pytest.mark.parametrize("registry", EVERY, ids=lambda r: r.what)
def test_every_built_in_plugin_keeps_its_contract(registry: Registry) -> None:
    found = registry.statuses()
    assert found and [s for s in found if s.fault or s.origin] == []
    assert [s.name for s in found] == registry.names() == registry.built_in()


# -------------------------------------------------------------------------------------------------- entry points


@pytest.mark.parametrize("group", SOUND)
def test_installed_package_adds_a_plugin_that_listing_does_not_import(packages: Packages, group: str) -> None:
    registry, name, source = SOUND[group]
    before = registry.names()
    packages.one(group, name, source)
    assert registry.names() == sorted([*before, name]) and f"their_{name}" not in sys.modules
    assert registry.load(name).__name__ == f"their_{name}"
    assert registry.broken() == [] and name in dict(registry.usable())
    row = next(r for r in plugin_rows() if r.what == f"{registry.what} {name}")
    assert row.ok and "someones-plugins 1.0" in row.found


def test_added_provider_and_its_declarations_are_used(packages: Packages, tmp_path: Path) -> None:
    packages.one("providers", "mycloud", PROVIDER)
    made = load_provider("mycloud", load_profile("vastai"), tmp_path, SystemClock())
    assert made.name == "mycloud"
    assert {"MYCLOUD_KEY", "MYCLOUD_KEY_FILE"} <= account_keys()
    assert table()["ends"]["mycloud"] == ("box kill",)


def test_guard_table_is_refused_if_a_provider_cannot_be_loaded(packages: Packages) -> None:
    packages.one("providers", "mycloud", "import nothing_like_it")
    with pytest.raises(NotSupported, match="'mycloud'"):
        table()
    assert "VAST_API_KEY" in account_keys()


def test_an_added_format_examines_files(packages: Packages, tmp_path: Path) -> None:
    packages.one("formats", "wlist", FORMAT, package="a")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights.wlist").write_bytes(b"WLST1")
    assert verify(tmp_path / "run" / "weights.wlist", Level.LOAD).verdict is Verdict.PROVEN
    (tmp_path / "run" / "weights.wlist").write_bytes(b"WLS")
    assert verify(tmp_path / "run" / "weights.wlist", Level.LOAD).verdict is Verdict.REFUTED


def test_an_added_layout_judges_a_folder(packages: Packages, tmp_path: Path) -> None:
    packages.one("layouts", "wlist_folder", LAYOUT)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights.wlist").write_bytes(b"WLST1")
    report = verify(tmp_path / "run", Level.LOAD)
    assert report.verdict is Verdict.REFUTED and Cause.CONTRADICTION in report.causes


def test_added_rule_joins_the_gate_but_not_the_rules_page(packages: Packages) -> None:
    packages.one("rules", "pf_acme_001_team_named", RULE)
    assert "PF-ACME-001" in {r.id for r in rules_of("submit")}
    assert render_page(in_calls) == page_file().read_text("utf-8")


@pytest.mark.parametrize(
    ("registry", "name"), [(PROVIDERS, "vastai"), (BACKENDS, "local"), (FORMATS, "safetensors"), (LAYOUTS, "dcp")]
)
def test_a_built_in_plugin_cannot_be_replaced(packages: Packages, registry: Registry, name: str) -> None:
    ours = registry.load(name)
    packages.one(registry.group.partition(".")[2], name, "raise SystemExit('imported')")
    assert registry.load(name) is ours and registry.names() == registry.built_in()
    (row,) = [r for r in plugin_rows() if not r.ok]
    assert "someones-plugins 1.0" in row.found and row.what == f"{registry.what} {name}"


def test_two_packages_with_the_same_plugin_name_are_both_refused(packages: Packages, wording: Wording) -> None:
    packages.one("backends", "mine", BACKEND, package="a")
    packages.add("b", {"gpuwarden.backends": {"mine": "their_mine"}}, {})
    with pytest.raises(NotSupported) as refused:
        BACKENDS.load("mine")
    wording(refused, "a 1.0", "b 1.0")
    assert [s.name for s in BACKENDS.broken()] == ["mine"]


# ------------------------------------------------------------------------------------------------ broken plug-ins

# fmt: off
BROKEN: dict[str, tuple[str, str, str, str]] = {
    "a format whose LOAD is None": (
        "formats", "wlist",
        FORMAT.replace('LOAD = "parsed"', "LOAD = None"), "LOAD",
    ),
    "a format with a misspelt LOAD": ("formats", "wlist", FORMAT.replace("parsed", "parse"), "'parse'"),
    "a format without a name": ("formats", "wlist", FORMAT.replace("NAME = ", "NAM = "), "NAME"),
    "a format of a built-in name": (
        "formats", "wlist",
        FORMAT.replace("weights list", "gguf"), "gguf",
    ),
    "an async format": ("formats", "wlist", FORMAT.replace("def read", "async def read"), "read"),
    "a format that reads without limits": (
        "formats", "wlist",
        FORMAT.replace("(source, limits)", "(source)"), "read(source)",
    ),
    "a layout that judges alone": (
        "layouts", "wl",
        LAYOUT.replace("(folder, found)", "(folder)"), "judge(folder, found)",
    ),
    "a layout whose claims are a list": ("layouts", "wl", LAYOUT + "\nclaims = []\n", "claims"),
    "a module with two rules": (
        "rules", "pf_acme_001_x",
        RULE + "\nother = team_named.__class__(**{**vars(team_named), 'id': 'PF-ACME-002'})", "2",
    ),
    "a rule under another name": ("rules", "pf_other_001_x", RULE, "pf_acme_001"),
    "a rule with a built-in id": ("rules", "pf_cost_001_x", RULE.replace("ACME", "COST"), "PF-COST-001"),
    "a rule without a reason": ("rules", "pf_acme_001_x", RULE.replace("Why:", "Because:"), "PF-ACME-001"),
    "a provider without guard patterns": (
        "providers", "mycloud",
        PROVIDER.replace("SHELL_GUARD =", "GUARD ="), "SHELL_GUARD",
    ),
    "a provider whose keys are a text": (
        "providers", "mycloud",
        PROVIDER.replace('("MYCLOUD_KEY",)', '"MYCLOUD_KEY"'), "ACCOUNT_KEYS",
    ),
    "a provider that says not what it makes": (
        "providers", "mycloud",
        PROVIDER.replace(" -> Mine", ""), "create",
    ),
    "a provider that makes a text": (
        "providers", "mycloud",
        PROVIDER.replace("-> Mine", "-> str"), "str.terminate",
    ),
    "a provider with a plain list": (
        "providers", "mycloud",
        PROVIDER.replace('    name = "mycloud"', "    def list(self): ..."), "Mine.list",
    ),
    "a provider that ends several": (
        "providers", "mycloud",
        PROVIDER.replace('    name = "mycloud"', "    async def terminate(self, ids): ..."),
        "terminate(self, id",
    ),
    "a backend of another call": ("backends", "mine", BACKEND.replace("(clock: Clock)", "()"), "create(clock)"),
    "a backend whose stop has no grace": (
        "backends", "mine",
        BACKEND.replace('    name = "mine"', "    async def stop(self, handle): ..."), "Mine.stop(self, handle)",
    ),
    "a module with a mistake": ("backends", "mine", "def create(:", "SyntaxError"),
    "a module that ends the program": ("backends", "mine", "raise SystemExit(3)", "SystemExit: 3"),
    "a module that needs another": ("backends", "mine", "import a_scheduler.client", "'a_scheduler'"),
}
THEIRS = ("SyntaxError", "SystemExit: 3", "'a_scheduler'")  # Python's own messages
# fmt: on


@pytest.mark.parametrize("case", BROKEN)
def test_broken_plugin_is_reported_with_package_file_and_fault(packages: Packages, case: str, wording: Wording) -> None:
    group, name, source, fault = BROKEN[case]
    registry = SOUND[group][0]
    packages.one(group, name, source)
    with pytest.raises(NotSupported) as refused:
        registry.load(name)
    said = refused.value.message
    assert fault in said and repr(name) in said and "someones-plugins 1.0" in said and f"their_{name}" in said
    if fault not in THEIRS:
        wording(said, "someones-plugins 1.0", f"their_{name}", repr(name))
    assert "someones-plugins" in manual_text(refused.value.next_steps) or "pip install a_scheduler" in manual_text(
        refused.value.next_steps
    )
    (row,) = [r for r in plugin_rows() if not r.ok]
    assert row.what == f"{registry.what} {name}" and fault[:20] in row.found
    assert name in registry.names() and [n for n, _ in registry.usable()] == registry.built_in()


def test_objects_made_by_a_plugin_are_checked_against_the_contract(packages: Packages, wording: Wording) -> None:
    packages.one("backends", "mine", BACKEND.replace('name = "mine"', 'name = "other"; seals = "yes"'))
    with pytest.raises(NotSupported) as refused:
        BACKENDS.make("mine", SystemClock())
    wording(refused, "Mine.seals", "'yes'", "bool")
    packages.one("backends", "mine2", BACKEND, package="b")
    with pytest.raises(NotSupported) as refused:
        BACKENDS.make("mine2", SystemClock())
    wording(refused, "Mine.name", "'mine2'", "'mine'")


def test_missing_package_error_names_the_install_command(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "find_spec", lambda name: True)
    points = {"gpuwarden.backends": {"slurp": "their_slurp", "slurp2": "their_slurp"}}
    packages.add("acme", points, {"their_slurp.py": "import a_scheduler"}, extras={"slurp": "a-scheduler>=2"})
    with pytest.raises(NotSupported) as with_extra:
        BACKENDS.load("slurp")
    with pytest.raises(NotSupported) as without:
        BACKENDS.load("slurp2")
    python = shlex.quote(sys.executable)
    assert manual_text(with_extra.value.next_steps) == f"Install it: {python} -m pip install 'a-scheduler>=2'"
    assert manual_text(without.value.next_steps) == f"Install it: {python} -m pip install a_scheduler"
    monkeypatch.setattr(installing, "find_spec", lambda name: None)  # uv creates environments without pip
    assert (
        installing.install_command("a_scheduler", "slurp", "acme")
        == f"uv pip install --python {python} 'a-scheduler>=2'"
    )


def test_unknown_plugin_is_not_found() -> None:
    with pytest.raises(NotFound, match="'slurp'") as caught:
        BACKENDS.load("slurp")
    assert ", ".join(BACKENDS.names()) in manual_text(caught.value.next_steps)


@pytest.mark.anyio
async def test_unloadable_teardown_rule_blocks_the_submit_gate_too(packages: Packages, tmp_path: Path) -> None:
    packages.one("rules", "td_acme_001_x", "import nothing_like_it")
    facts = await gather(quick_warden(tmp_path / "home"), JobSpec(platform="local", command=("true",)))
    (found,) = [f for f in run_rules(rules_of("submit"), facts) if f.rule == "PF-PLUG-001"]
    assert found.blocks and "td_acme_001_x" in found.message
    assert len(all_rules()) == len(RULES.built_in())


def test_broken_format_or_layout_makes_the_verdict_unknown(packages: Packages, tmp_path: Path) -> None:
    (tmp_path / "weights.wlist").write_bytes(b"WLST1")
    packages.one("formats", "wlist", FORMAT.replace('"parsed"', "None"), package="a")
    report = verify(tmp_path / "weights.wlist", Level.LOAD)
    assert report.verdict is Verdict.UNKNOWN and "LOAD" in report.model_dump_json()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("hello\n")
    sound = verify(tmp_path / "run", Level.STRUCTURE)
    packages.one("layouts", "wlist_folder", "import nothing_like_it", package="b")
    report = verify(tmp_path / "run", Level.STRUCTURE)
    assert "wlist_folder" in report.model_dump_json() and "wlist_folder" not in sound.model_dump_json()
    assert report.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    "change",
    [
        ('return "weights.wlist" in folder.files', "raise KeyError(folder)"),
        ('return Judgement(NAME, folder.rel, problems=["has no index"])', "return 3"),
        ('return Judgement(NAME, folder.rel, problems=["has no index"])', "return None"),
    ],
    ids=["raises", "a number", "nothing"],
)
def test_failing_layout_makes_the_verdict_unknown(
    packages: Packages, tmp_path: Path, change: tuple[str, str], wording: Wording
) -> None:
    packages.one("layouts", "wlist_folder", LAYOUT.replace(*change))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights.wlist").write_bytes(b"WLST1")
    report = verify(tmp_path / "run", Level.STRUCTURE)
    assert (report.verdict, report.causes) == (Verdict.UNKNOWN, (Cause.UNREAD,))
    (doubt,) = report.doubts
    wording(doubt.partition(":")[0])


@pytest.mark.parametrize("work", ["return None", "raise struct.error('short')", "raise KeyError('w')"])
def test_failing_format_makes_the_verdict_unknown(packages: Packages, tmp_path: Path, work: str) -> None:
    source = "import struct\n" + FORMAT.partition("def read")[0] + f"def read(source, limits):\n    {work}\n"
    packages.one("formats", "wlist", source)
    (tmp_path / "weights.wlist").write_bytes(b"WLST1")
    assert verify(tmp_path / "weights.wlist", Level.LOAD).verdict is Verdict.UNKNOWN


def test_archive_ignores_plugins_of_the_machine(packages: Packages, tmp_path: Path) -> None:
    packages.one("formats", "wlist", "raise SystemExit('code of the machine was run')")
    (tmp_path / "a.wlist").write_bytes(b"WLST1")
    (tmp_path / "a.pyz").write_bytes(archive.build())
    done = subprocess.run(
        [sys.executable, "-S", str(tmp_path / "a.pyz"), "examine", str(tmp_path / "a.wlist")],
        env={"PYTHONPATH": str(packages.root / 'someones-plugins')}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (found,) = json.loads(done.stdout)["files"]
    assert found["causes"] == [Cause.UNREAD] and found["format"] == "unknown"


# ---------------------------------------------------------------------------------------------------- signatures


class Wanted(Protocol):
    async def ask(self, a: int, *, b: int = 1) -> int: ...
    def tell(self, a: int, b: int = 0) -> int: ...


def made(ask: Any, tell: Any) -> type:
    return type("Made", (), {"ask": ask, "tell": tell})


async def ask(self: Any, a: int, *, b: int = 1) -> int:
    return a


def tell(self: Any, a: int, b: int = 0) -> int:
    return a


async def wide(self: Any, a: int, **more: int) -> int:
    return a


async def open_ask(self: Any, a: int, b: int = 1, c: int = 2) -> int:
    return a


async def renamed(self: Any, x: int, *, b: int = 1) -> int:
    return x


async def needs_more(self: Any, a: int, c: int, *, b: int = 1) -> int:
    return a


async def needs_b(self: Any, a: int, *, b: int) -> int:
    return a


def by_name(self: Any, *, a: int, b: int = 0) -> int:
    return a


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        (ask, tell, ""), (wide, tell, ""), (open_ask, tell, ""),
        (None, tell, "Made.ask"), (renamed, tell, "Made.ask"), (needs_more, tell, "Made.ask"),
        (needs_b, tell, "Made.ask"), (tell, tell, "Made.ask"), (3, tell, "Made.ask"),
        (ask, ask, "Made.tell"), (ask, by_name, "Made.tell"),
    ],
)  # fmt: skip
def test_method_must_accept_every_call_of_the_protocol(first: Any, second: Any, fault: str, wording: Wording) -> None:
    found = class_faults(made(first, second), Wanted)
    assert bool(found) is bool(fault) and all(f.startswith(fault) for f in found[:1]), found
    if fault:
        wording("\n".join(found))


def test_a_method_that_is_only_inherited_from_the_protocol_is_missing(wording: Wording) -> None:
    class Lazy(Wanted):
        async def ask(self, a: int, *, b: int = 1) -> int:
            return a

    (fault,) = class_faults(Lazy, Wanted)
    wording(fault, "Lazy.tell")


def test_annotations_that_cannot_be_evaluated_are_a_fault() -> None:
    module = ModuleType("m")
    exec("from __future__ import annotations\ndef create() -> Nowhere: ...", vars(module))
    assert "Nowhere" in Contract("m", functions={"create": ()}, product=Wanted).faults(module, "m")[0]
