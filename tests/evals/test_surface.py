"""`tools.json` matches the real server's tools, in the form that the scorer uses to check arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evals.__main__ import main
from evals.errors import EvalError
from evals.harness.tool_schemas import Shown, as_text, schemas, shown
from evals.scoring.surface import HERE, TOOLS, faults

from evals_kit import CASE, RealServer


@pytest.fixture(scope="module")
def offer(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return shown(*RealServer(CASE.scenario, 1, tmp_path_factory.mktemp("scene")).server())


def test_tools_file_matches_the_server_schemas(offer: Shown) -> None:
    now = as_text(schemas(offer))
    assert now == (HERE / "tools.json").read_text("utf-8"), "python -m evals tools --write"


def test_every_server_schema_rule_is_checked(offer: Shown) -> None:
    for name, rules in schemas(offer).items():
        assert [fault.split()[-1] for fault in faults(name, {})] == rules.get("required", [])
        assert "no_such_argument" in list(faults(name, {"no_such_argument": 1}))[-1]


def test_an_unsupported_schema_rule_is_an_error(offer: Shown) -> None:
    tool: dict[str, Any] = json.loads(json.dumps(offer.tools[0]))
    name = next(iter(tool["inputSchema"]["properties"]))
    tool["inputSchema"]["properties"][name]["pattern"] = "^a"
    with pytest.raises(EvalError, match=rf"{tool['name']}\.{name} .*'pattern'"):
        schemas(Shown("", [tool]))


def test_tools_command_detects_and_rewrites_a_stale_file(
    offer: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("evals.__main__.HERE", tmp_path)
    monkeypatch.setattr("evals.__main__.shown", lambda *_: offer)
    old = {**TOOLS, "check_job": {"type": "object"}}
    (tmp_path / "tools.json").write_text(json.dumps(old))
    assert main(["tools"]) == 1
    assert "--write" in capsys.readouterr().out
    assert main(["tools", "--write"]) == 0
    assert (tmp_path / "tools.json").read_bytes() == (HERE / "tools.json").read_bytes()
