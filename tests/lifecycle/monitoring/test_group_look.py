"""The check of all nodes in an allocation, with given answers and with a fake engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.remote.host.node_talk import agent_source
from gpuwarden.remote.runner.group import check_nodes, problems
from wording import Wording

DATA = {"name": "data0", "kind": "", "up": True}
FACES = [DATA, {"name": "lo", "kind": "loopback", "up": True}, {"name": "docker0", "kind": "bridge", "up": True}]


def node(name: str, **changes: Any) -> dict[str, Any]:
    torch = {"torch": "2.13.0", "nccl": "2.29"}
    return {"node": name, "now": 100.0, "interfaces": FACES, "torch": torch, "env": {}, "fabric": {}, **changes}


def codes(*nodes: dict[str, Any], count: int = 2, **env: str) -> list[tuple[str, str]]:
    return [(p["code"], p["node"]) for p in problems(nodes, count, env, 99.0, 101.0)]


@pytest.mark.parametrize(
    ("nodes", "env", "found"),
    [
        ([node("a"), node("b")], {}, []),
        ([node("a"), node("b", now=190.0)], {}, [("clock_off", "b")]),
        ([node("a", now=10.0), node("b", now=102.9)], {}, [("clock_off", "a")]),
        ([node("a")], {}, [("silent", "")]),
        ([], {}, []),
        ([node("a"), node("b")], {"NCCL_SOCKET_IFNAME": "data"}, []),
        ([node("a"), node("b")], {"NCCL_SOCKET_IFNAME": "^docker,lo"}, []),
        ([node("a"), node("b")], {"GLOO_SOCKET_IFNAME": "data"}, [("interface_wrong", "a"), ("interface_wrong", "b")]),
        ([node("a"), node("b", env={"NCCL_SOCKET_IFNAME": "docker0"})], {}, [("interface_wrong", "b")]),
        ([node("a"), node("b", interfaces=FACES[1:])], {"NCCL_SOCKET_IFNAME": "data0"}, [("interface_wrong", "b")]),
        ([node("a"), node("b", interfaces=None)], {"NCCL_SOCKET_IFNAME": "data0"}, []),
        ([node("a"), node("b", torch={"torch": "2.1", "nccl": "2.29"})], {}, [("torch_differs", "b")]),
        ([node("a"), node("b", torch={"torch": "2.13.0", "nccl": "2.1"})], {}, [("nccl_differs", "b")]),
        ([node("a"), node("b", torch={})], {}, []),
        ([node("a"), node("b", fabric={"switches": 4, "service": "failed"})], {}, [("fabric_down", "b")]),
        ([node("a"), node("b", fabric={"switches": 0, "service": "failed"})], {}, []),
    ],
)
def test_only_observed_facts_are_reported_as_problems(
    nodes: list[dict[str, Any]], env: dict[str, str], found: list[tuple[str, str]]
) -> None:
    assert codes(*nodes, **env) == found


@given(st.floats(-1e6, 1e6), st.floats(0, 60), st.floats(0, 1))
def test_a_clock_within_the_duration_of_the_look_is_not_off(off: float, took: float, at: float) -> None:
    wrong = bool(problems([node("a", now=took * at + off)], 1, {}, 0.0, took))
    assert wrong == (not -2.0 <= took * at + off <= took + 2.0)
    if abs(off) <= 2:
        assert not wrong


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the look at a node is Linux's")
def test_the_agent_runs_as_a_program_in_the_run_folder(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "node_agent.py").write_text(agent_source())
    assert check_nodes(str(tmp_path), ["env", "SLURMD_NODENAME=n7"], 1, {}) == []
    seen = json.loads((tmp_path / "nodes.json").read_text())
    assert [(n["node"], n["hostname"]) for n in seen["nodes"]] == [("n7", os.uname().nodename)]
    (problem,) = check_nodes(str(tmp_path), ["env"], 1, {"NCCL_SOCKET_IFNAME": "eth99"})
    assert problem["code"] == "interface_wrong"
    wording(problem["text"], f"{os.uname().nodename}:", "NCCL_SOCKET_IFNAME", "eth99")


@pytest.mark.parametrize("start", [["false"], ["no-such-engine"], ["echo", "welcome"]])
def test_an_engine_that_fails_to_start_the_look_reports_no_problem(tmp_path: Path, start: list[str]) -> None:
    assert check_nodes(str(tmp_path), start, 2, {}) == []
    seen = json.loads((tmp_path / "nodes.json").read_text())
    assert (seen["asked"], seen["nodes"]) == (2, [])


ODD = [{"fabric": [4]}, {"torch": "2.13"}, {"env": ["A=1"]}, {"interfaces": {"lo": "up"}}, {"interfaces": ["lo"]}]


@pytest.mark.parametrize("odd", ODD, ids=json.dumps)
def test_a_malformed_answer_is_ignored(tmp_path: Path, odd: dict[str, Any]) -> None:
    (tmp_path / "node_agent.py").write_text(f"print({json.dumps(json.dumps({'ok': True, 'node': 'a', **odd}))})")
    assert check_nodes(str(tmp_path), ["env"], 1, {"NCCL_SOCKET_IFNAME": "eth0"}) == []
    assert json.loads((tmp_path / "nodes.json").read_text())["nodes"] == []


def test_a_look_that_times_out_reports_no_node_as_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    def cut_off(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout, output=json.dumps({"ok": True, **node("a")}).encode())

    monkeypatch.setattr(subprocess, "run", cut_off)
    monkeypatch.setattr(time, "time", lambda: 100.0)
    assert check_nodes(str(tmp_path), ["env"], 2, {}) == []
    seen = json.loads((tmp_path / "nodes.json").read_text())
    assert [n["node"] for n in seen["nodes"]] == ["a"]
    wording(seen["said"])
