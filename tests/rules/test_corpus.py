"""The submit gate over a corpus of training scripts: healthy ones pass; each seeded fault is found."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from gpuwarden.core.rules import Finding, Severity, run_rules
from gpuwarden.rehearsal.hub.server import HubServer
from gpuwarden.rules.catalog import rules_of
from hubserver import config, hub_server
from paths import CORPUS
from rulefacts import HF_TOKEN, facts_for, seed_for_rules

SCRIPTS = CORPUS / "scripts"
INDEX: dict[str, dict[str, Any]] = tomllib.loads((SCRIPTS / "index.toml").read_text())
NAMES = sorted(p.stem for p in SCRIPTS.glob("*.py"))
SEEN = {Severity.ERROR, Severity.UNKNOWN, Severity.WARNING}
# Findings on the first run of any script, which are not about the script itself.
USUAL = {"PF-REL-004", "PF-OUT-002"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with hub_server(tmp_path_factory.mktemp("hub")) as server:
        seed_for_rules(server.store)
        yield server


def findings(hub: HubServer, name: str) -> list[Finding]:
    job = {k: v for k, v in INDEX.get(name, {}).items() if k != "rule"}
    spec = {"gpu": "a10g-large", "outputs": ["out"], "secrets": ["HF_TOKEN"], "timeout_s": 14_400} | job
    script = (SCRIPTS / f"{name}.py").read_text()
    facts = anyio.run(lambda: facts_for(script, hub=config(hub, HF_TOKEN), **spec))
    return run_rules(rules_of("submit"), facts)


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("ok_")])
def test_a_healthy_script_is_not_refused(hub: HubServer, name: str) -> None:
    found = findings(hub, name)
    assert [f for f in found if f.blocks] == []
    assert [f for f in found if f.severity is Severity.WARNING and f.rule not in USUAL] == []


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("bad_")])
def test_a_seeded_fault_is_seen(hub: HubServer, name: str) -> None:
    found = findings(hub, name)
    assert INDEX[name]["rule"] in {f.rule for f in found if f.severity in SEEN}


@pytest.mark.slow
def test_the_confusion_table_is_within_limits(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    table = {("ok", True): 0, ("ok", False): 0, ("bad", True): 0, ("bad", False): 0}
    for name in NAMES:
        found = [f for f in findings(hub, name) if f.severity in SEEN and f.rule not in USUAL]
        healthy = name.startswith("ok_")
        wanted = INDEX.get(name, {}).get("rule")
        flagged = any(f.blocks for f in found) if healthy else any(f.rule == wanted for f in found)
        table[("ok" if healthy else "bad", flagged)] += 1
    with capsys.disabled():
        print("\n            refused/caught   passed/missed")
        for kind in ("ok", "bad"):
            print(f"{kind:10} {table[(kind, True)]:>10} {table[(kind, False)]:>14}")
    assert len(NAMES) >= 40
    assert table[("ok", True)] == 0
    assert table[("bad", True)] >= 0.95 * (table[("bad", True)] + table[("bad", False)])


def test_scripts_and_index_entries_match() -> None:
    assert {n for n in NAMES if n.startswith("bad_")} == {n for n in INDEX if n.startswith("bad_")}
    assert set(INDEX) <= set(NAMES)
