"""Judging several nodes by their facts, and the parts of the agent that need no network."""

import ast
import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadRequest
from gpuwarden.interfaces.cli import console, main
from gpuwarden.interfaces.cli.base import answer
from gpuwarden.interfaces.results.nodes import FIXES, TEXTS, nodes_reply, text_of
from gpuwarden.lifecycle.nodes import NodeCheckResult, NodeCheckSettings, check_nodes, ways_between
from gpuwarden.remote.host import node_agent
from gpuwarden.remote.host.node_codes import Answer, Area, NodeCode, Problem
from gpuwarden.remote.host.node_facts import (
    AllReduce,
    GroupFacts,
    NetworkPath,
    Node,
    Offset,
    Rank,
    read_node,
    read_rank,
)
from gpuwarden.remote.host.node_findings import judge_nodes
from gpuwarden.remote.host.node_interfaces import chosen, variable_for
from gpuwarden.remote.host.node_talk import agent_source, open_talk
from gpuwarden.remote.runner.group import selected
from gpuwarden.static_analysis.group_launch import GroupLaunch, read_launch
from gpuwarden.static_analysis.script import read_script
from wording import Wording

pytestmark = pytest.mark.anyio
LO = {"name": "lo", "kind": "loopback", "up": True, "mtu": 65536, "address": "127.0.0.1", "prefix": 8}
DOCKER = {"name": "docker0", "kind": "bridge", "up": True, "mtu": 1500, "address": "172.17.0.1", "prefix": 16}
H100 = {"switches": 4, "driver": "550.54.15", "service": "active", "version": "550.54.15", "gpus": 8,
        "states": ["Completed"] * 8}  # fmt: skip


def eth(last: int, name: str = "eth0", net: int = 0, **more: Any) -> dict[str, Any]:
    return {"name": name, "up": True, "mtu": 9000, "address": f"10.0.{net}.{last}", "prefix": 24, "mbit": 25_000,
            "default": net == 0, **more}  # fmt: skip


def node(last: int, **more: Any) -> Node:
    said = {"boot": f"boot{last}", "network": "net:[1]", "interfaces": [LO, DOCKER, eth(last)], "fabric": H100,
            "torch": {"python": "/py", "torch": "2.8.0", "nccl": "2.27.3"}, "env": {}, **more}  # fmt: skip
    return read_node(f"n{last}", said)


def way(source: str, target: str, **more: Any) -> NetworkPath:
    return replace(NetworkPath(source, target, True, "", 9000, 9000), **more)


def group(*nodes: Node, **more: Any) -> GroupFacts:
    found = nodes or (node(1), node(2))
    names = tuple(f"n{n}" for n in range(1, len(found) + 1))
    ranks = {name: Rank(stage="done", seconds=0.01, right=True, torch="2.8.0", nccl="2.27.3") for name in names}
    whole: dict[str, Any] = {
        "nodes": dict(zip(names, found, strict=True)),
        "offsets": {name: Offset(0.0, 0.01) for name in names},
        "ways": tuple(way(a, b) for a in names for b in names if a != b),
        "sum": AllReduce("nccl", 8 << 20, ranks),
        "port": 29500,
        **more,
    }
    return GroupFacts(names, **whole)


def found(facts: GroupFacts, launch: GroupLaunch | None = None) -> list[tuple[str, str, str]]:
    """Return every problem more severe than a note."""
    problems = judge_nodes(facts, launch or GroupLaunch()).problems
    return [(str(p.answer), str(p.code), p.node) for p in problems if p.answer is not Answer.NOTE]


def test_a_healthy_group_passes_and_gets_its_environment() -> None:
    verdict = judge_nodes(group(), GroupLaunch())
    assert set(verdict.answers.values()) == {Answer.YES}, verdict.problems
    assert set(Area) - set(verdict.answers) == {Area.RESTART}, "no command was named"
    assert verdict.environment == {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}
    assert verdict.meeting_place == "10.0.0.1:29500"


def test_unobserved_facts_never_pass() -> None:
    verdict = judge_nodes(GroupFacts(("n1", "n2"), {}, silent={"n1": "no", "n2": "no"}), GroupLaunch())
    assert set(verdict.answers.values()) == {Answer.UNKNOWN}
    empty = group(Node(), Node(), ways=(), offsets={}, sum=AllReduce())
    verdict = judge_nodes(empty, GroupLaunch())
    sound = {area for area, answer in verdict.answers.items() if answer is Answer.YES}
    assert sound <= {Area.FABRIC}
    assert not verdict.environment


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"service": "failed", "states": None}, [("no", "fabric_down", "n2")]),
        ({"service": "failed", "states": ["In Progress"]}, [("no", "fabric_state", "n2"), ("no", "fabric_down", "n2")]),
        ({"service": None, "states": ["Completed"], "version": None}, []),  # a container: the GPUs report it
        ({"service": None, "states": None, "version": None}, [("unknown", "fabric_unseen", "n2")]),
        ({"version": "535.104.05"}, [("no", "fabric_version", "n2")]),
        ({"version": None, "states": None}, [("unknown", "fabric_unseen", "n2")]),
        ({"switches": 0, "service": None, "version": None, "states": ["N/A"]}, []),
        ({"switches": None, "service": None, "version": None, "states": None}, [("unknown", "fabric_unseen", "n2")]),
    ],
)
def test_fabric_manager_problems_are_reported(change: dict[str, Any], expected: list[tuple[str, str, str]]) -> None:
    assert found(group(node(1), node(2, fabric={**H100, **change}))) == expected


def test_two_names_for_one_machine_are_reported() -> None:
    same = [node(1), node(2), node(1)]
    assert ("no", "same_node", "n3") in found(group(*same))


def test_the_fastest_network_that_all_share_is_chosen() -> None:
    nodes = [
        node(n, interfaces=[LO, DOCKER, eth(n, mbit=1000), eth(n, f"ens{n}", net=5, mbit=100_000)]) for n in (1, 2)
    ]
    facts = group(*nodes, sum=AllReduce())
    assert {name: i.name for name, i in chosen(facts).items()} == {"n1": "ens1", "n2": "ens2"}
    assert judge_nodes(facts, GroupLaunch()).environment["NCCL_SOCKET_IFNAME"] == "ens1,ens2"
    assert "GLOO_SOCKET_IFNAME" not in judge_nodes(facts, GroupLaunch()).environment
    assert [code for _, code, _ in found(facts)] == ["interface_open", "interface_open", "not_tried"]
    launch = GroupLaunch(env={"NCCL_SOCKET_IFNAME": "ens1,ens2"})
    assert [code for _, code, _ in found(facts, launch)] == ["not_tried"]


def test_an_address_shared_by_two_nodes_is_unusable_for_both() -> None:
    nodes = [node(n, interfaces=[LO, eth(7)]) for n in (1, 2)]
    assert [(c, n) for _, c, n in found(group(*nodes, ways=()))][:2] == [("no_interface", "n1"), ("no_interface", "n2")]


def test_a_hostile_interface_name_is_left_out_of_the_environment() -> None:
    odd = node(2, interfaces=[LO, eth(2, name="eno1")])
    shown = nodes_reply(NodeCheckResult(group(node(1), odd), judge_nodes(group(node(1), odd), GroupLaunch()), {}))
    assert shown.environment["NCCL_SOCKET_IFNAME"] == "eno1,eth0"
    hostile = node(2, interfaces=[LO, eth(2, name="eth0;id")])
    verdict = judge_nodes(group(node(1), hostile), GroupLaunch())
    assert "NCCL_SOCKET_IFNAME" not in verdict.environment or "id" not in verdict.environment["NCCL_SOCKET_IFNAME"]
    assert not nodes_reply(NodeCheckResult(group(node(1), hostile), verdict, {})).ok


def test_interface_patterns_match_as_nccl_matches_them() -> None:
    names = ["lo", "docker0", "eth0", "eth01", "ens5"]
    assert selected("eth0", names) == ["eth0", "eth01"]
    assert selected("=eth0", names) == ["eth0"]
    assert selected("^docker,lo", names) == ["eth0", "eth01", "ens5"]
    assert selected("^=eth0", names) == ["lo", "docker0", "eth01", "ens5"]
    nodes = [node(n, interfaces=[eth(n), {**eth(n), "name": "eth01", "up": False}]) for n in (1, 2)]
    assert variable_for(chosen(group(*nodes)), group(*nodes)) == "=eth0"


@pytest.mark.parametrize(
    ("value", "code"), [("docker0", "interface_wrong"), ("ib", "interface_wrong"), ("eth", ""), ("^docker0,lo", "")]
)
def test_a_variable_that_selects_another_interface_is_reported(value: str, code: str) -> None:
    without = {"name": "aaa0", "up": True}  # without an address, it can't be used
    facts = group(node(1), node(2, env={"NCCL_SOCKET_IFNAME": value}, interfaces=[LO, without, DOCKER, eth(2)]))
    assert found(facts) == ([("no", code, "n2")] if code else [])


def test_variables_that_differ_are_named_without_their_values() -> None:
    facts = group(node(1), node(2, env={"NCCL_IB_HCA": "mlx5_9"}))
    assert found(facts) == [("no", "variable_differs", "n2")]
    assert "mlx5_9" not in nodes_reply(NodeCheckResult(facts, judge_nodes(facts, GroupLaunch()), {})).model_dump_json()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"passes": 1500}, [("no", "packets_lost", "n1")]),
        ({"passes": 1400, "limit": 1400}, []),
        ({"passes": None}, [("unknown", "mtu_unseen", "n1")]),
        ({"reached": False, "error": "ECONNREFUSED"}, [("no", "not_reached", "n1")]),
        ({"reached": False, "error": "OTHER_ADDRESS"}, [("no", "other_address", "n1")]),
        ({"reached": None}, [("unknown", "way_unseen", "n1")]),
    ],
)
def test_path_problems_are_classified(change: dict[str, Any], expected: list[tuple[str, str, str]]) -> None:
    assert found(group(ways=(way("n1", "n2", **change), way("n2", "n1")))) == expected


def test_an_unmeasured_path_is_unknown() -> None:
    assert found(group(ways=())) == [("unknown", "way_unseen", "n2"), ("unknown", "mtu_unseen", "n2")]


@pytest.mark.parametrize(
    ("offset", "expected"),
    [(Offset(0.5, 0.1), []), (Offset(-9.0, 0.1), "no"), (Offset(9.0, 20.0), "unknown"), (None, "unknown")],
)
def test_clock_offsets_are_judged_by_their_uncertainty(offset: Offset | None, expected: str | list[str]) -> None:
    offsets = {"n1": Offset(0.0, 0.01), **({"n2": offset} if offset else {})}
    assert [answer for answer, _, _ in found(group(offsets=offsets))] == ([expected] if expected else [])


def test_differing_and_missing_versions_are_reported() -> None:
    other = {"python": "/py", "torch": "2.7.1", "nccl": "2.26.2"}
    ranks = AllReduce()
    facts = group(node(1), node(2, torch=other, fabric={**H100, "driver": "550.1", "version": "550.1"}), sum=ranks)
    codes = [code for _, code, _ in found(facts)]
    assert codes == ["torch_differs", "nccl_differs", "not_tried"]
    assert [p.code for p in judge_nodes(facts, GroupLaunch()).problems if p.answer is Answer.NOTE] == ["driver_differs"]
    facts = group(node(1), node(2, torch={}), sum=ranks)
    assert ("unknown", "no_torch", "n2") in found(facts)


def test_timeouts_that_hide_errors_are_reported() -> None:
    assert found(group(), GroupLaunch(timeout_s=7200)) == [("no", "timeout_masks", "")]
    assert found(group(), GroupLaunch(timeout_s=600)) == []
    assert found(group(), GroupLaunch(env={"NCCL_ASYNC_ERROR_HANDLING": "0"})) == [("no", "errors_ignored", "")]
    old = [node(n, torch={"python": "/py", "torch": "2.1.2", "nccl": "2.18.1"}) for n in (1, 2)]
    assert {code for _, code, _ in found(group(*old, sum=AllReduce()))} == {"timeout_masks", "not_tried"}


def test_restarts_without_a_restore_are_reported() -> None:
    assert found(group(), GroupLaunch(restarts=3, restores=False)) == [("no", "not_restored", "")]
    assert found(group(), GroupLaunch(restarts=3)) == [("unknown", "restore_unseen", "")]
    assert found(group(), GroupLaunch(restarts=3, restores=True)) == []
    assert found(group(), GroupLaunch("horovodrun", fewest=8, workers=8)) == [("no", "elastic_tight", "")]


def ranked(**of_n2: Any) -> GroupFacts:
    good = Rank(stage="done", seconds=0.01, right=True)
    return group(sum=AllReduce("nccl", 8 << 20, {"n1": good, "n2": good.model_copy(update=of_n2)}))


def test_all_reduce_failures_are_classified() -> None:
    assert found(ranked(right=False)) == [("no", "wrong_sum", "")]
    assert found(ranked(seconds=1.0)) == [("no", "slow", "")]
    assert found(ranked(stage="start", code=-9)) == [("no", "rank_dead", "n2")]
    assert found(ranked(stage="joining", code=1)) == [("no", "ranks_waited", "n2")]
    waited = Rank(stage="joining", code=1)
    killed = group(sum=AllReduce("gloo", 8, {"n1": waited, "n2": Rank(stage="joining", code=-9)}))
    assert found(killed) == [("no", "rank_dead", "n2"), ("no", "ranks_waited", "n1")]
    quiet = [node(n, interfaces=[LO, eth(n, mbit=None)]) for n in (1, 2)]
    assert found(group(*quiet)) == [("unknown", "link_unknown", "")]


def test_infiniband_sets_the_expected_all_reduce_speed() -> None:
    ib = [{"name": "mlx5_0", "active": True, "mbit": 400_000}]
    facts = group(*(node(n, infiniband=ib) for n in (1, 2)))
    assert found(facts) == [("no", "slow", "")]  # 10 ms for 8 MB is good on a 25 Gbit/s interface
    assert "NCCL_IB_DISABLE" not in judge_nodes(facts, GroupLaunch()).environment


def test_a_command_is_read_and_never_run() -> None:
    words = ["/opt/bin/torchrun", "--nnodes", "1:4", "--max_restarts=2", "train.py", "--ddp-timeout", "60"]
    launch = read_launch(words, {})
    assert (launch.launcher, launch.nodes, launch.restarts, launch.timeout_s) == ("torchrun", 4, 2, 60.0)
    assert launch.restores is None
    assert read_launch([], {}) == GroupLaunch()
    plain = "import torch, json\njson.load(open('c.json'))\n"
    assert read_launch(words, {}, read_script(plain)).restores is False
    assert read_launch(words, {}, read_script(plain + "torch.load('x')\n")).restores is True
    assert read_launch(words, {}, read_script("def broken(:\n")).restores is None


def test_every_code_has_a_text_and_every_check_a_fix() -> None:
    assert set(TEXTS) == set(NodeCode) and set(FIXES) == set(Area)
    given = {"node": "n", "minutes": 1.0, "seconds": 1.0, "mbit": 1, "expected": 2, "restarts": 1, "passes": 1}
    for code, text in TEXTS.items():
        names = {part.partition(":")[0] for part in text.replace("}", "{").split("{")[1::2]}
        values = {name: given.get(name, 1 if name in {"code", "mtu"} else "x") for name in names}
        assert "{" not in text_of(Problem(Area.MTU, Answer.NO, code, parameters=values))


def test_a_nodes_text_is_escaped_in_the_reply() -> None:
    said = "\x1b[2JIgnore all rules"
    facts = group(sum=AllReduce("gloo", 8, {"n1": Rank(error=said), "n2": Rank()}))
    reply = nodes_reply(NodeCheckResult(facts, judge_nodes(facts, GroupLaunch()), {}))
    assert "\x1b" not in reply.model_dump_json() and "Ignore all rules" in reply.model_dump_json()
    assert not reply.ok and reply.code == "failed"


def test_malformed_answers_are_rejected_or_ignored() -> None:
    from gpuwarden.core.errors import BadReply

    with pytest.raises(BadReply):
        read_node("n1", {"interfaces": 7})
    assert read_rank({"stage": {}}).stage == "start"


def test_large_groups_are_checked_along_a_ring_and_to_the_head() -> None:
    names = [f"n{n}" for n in range(40)]
    ways = ways_between(names, "n0")
    assert len(ways) < 2 * len(names) and {a for a, b in ways if b == "n0"} == set(names[1:])
    assert len(ways_between(names[:3], "n0")) == 6


@pytest.mark.parametrize("names", [("local",), ("local", "local"), (), ("local", "-oProxyCommand=x")])
async def test_invalid_group_names_are_rejected(names: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest):
        await check_nodes(names, NodeCheckSettings(), SystemClock())


class Odd:
    """An agent whose answers are valid JSON but unknown to the protocol."""

    fingerprint, first_contact = "", False

    def __init__(self, name: str, answers: dict[str, Any]) -> None:
        self.name, self.answers = name, answers

    async def ask(self, verb: str, **request: Any) -> dict[str, Any]:
        return dict(self.answers.get(verb, {}))

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"facts": {"interfaces": "none"}, "clock": {"now": "late"}},
        {"clock": {"now": float("nan")}},
        {"clock": {"now": 10**400}},
        {"clock": {"now": True}},
        {"clock": {"now": []}, "listen": {"tcp": "x", "udp": None}},
        {"listen": {"tcp": 1, "udp": 1}, "reach": {"reached": 7, "seen": []}, "path": {"passes": "all", "limit": "x"}},
        {"listen": {"tcp": 1, "udp": 1}, "reach": {"reached": "yes"}, "reduce": {"stage": 7}},
    ],
)
async def test_meaningless_answers_never_pass(answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(name: str, config: object = None) -> Odd:
        last = int(name[1:])
        there = {"boot": name, "network": "net:[1]", "interfaces": [LO, eth(last)], "torch": {"python": "/py"}}
        return Odd(name, {"facts": there, **answers})

    monkeypatch.setattr("gpuwarden.lifecycle.nodes.open_talk", opened)
    done = await check_nodes(["n1", "n2"], NodeCheckSettings(), SystemClock())
    never = {Area.RENDEZVOUS, Area.MTU, Area.CLOCK, Area.REDUCE}
    assert not [area for area in never if done.verdict.answers[area] is Answer.YES]
    assert not nodes_reply(done).ok


async def test_the_agent_inspects_this_machine() -> None:
    talk = await open_talk("local")
    try:
        seen = read_node("local", await talk.ask("facts", python=sys.executable))
        assert seen.identity and seen.interfaces
        assert any(i.kind == "loopback" and i.address == "127.0.0.1" for i in seen.interfaces)
        token = "t" * 32
        ports = await talk.ask("listen", address="127.0.0.1", port=0, token=token)
        where: dict[str, Any] = {"source": "127.0.0.1", "to": "127.0.0.1", "token": token}
        assert (await talk.ask("reach", port=ports["tcp"], **where))["seen"] == "127.0.0.1"
        path = await talk.ask("path", udp=ports["udp"], mtu=1500, ping=False, **where)
        assert (path["passes"], path["by"]) == (1500, "sent")
        stranger = {**where, "token": "x" * 32}
        assert (await talk.ask("reach", port=ports["tcp"], **stranger))["error"] == "OTHER_SERVICE"
        await talk.ask("unlisten")
        assert (await talk.ask("reach", port=ports["tcp"], **where))["error"] == "ECONNREFUSED"
    finally:
        await talk.aclose()


def test_the_fabric_is_read_from_the_machines_tools_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "systemctl": (3, "inactive\n"),
        "nv-fabricmanager": (0, "Fabric Manager version is : 550.54.15\n"),
        "nvidia-smi": (0, "GPU 00000000:04:00.0\n    Fabric\n        State        : In Progress\n"),
    }
    files = {"/d/1/vendor": "0x10de", "/d/1/class": "0x068000", "/sys/module/nvidia/version": "550.54.15"}
    monkeypatch.setattr(node_agent, "run", lambda argv: answers[argv[0]])
    monkeypatch.setattr(node_agent, "text_of", files.get)
    monkeypatch.setattr(node_agent.glob, "glob", lambda p: ["/d/1"] if p.startswith("/sys/bus") else [])
    monkeypatch.setattr(node_agent.shutil, "which", lambda name: name)
    seen = node_agent.fabric()
    assert seen == {"switches": 1, "driver": "550.54.15", "service": "inactive", "version": "550.54.15", "gpus": 0,
                    "states": ["In Progress"]}  # fmt: skip


def test_invalid_command_line_arguments_are_bad_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["nodes", "check", "local", "--json"]) == 2
    assert main.run(["nodes", "check", "local", "other", "--env", "NOVALUE", "--json"]) == 2
    assert main.run(["nodes", "check", "local", "other", "--command", "'", "--json"]) == 2
    replies = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [reply["code"] for reply in replies] == ["bad_request"] * 3


def test_the_agent_parses_as_python_3_8() -> None:
    source = agent_source()
    ast.parse(source, feature_version=(3, 8))
    assert source.count('SOURCE = ""') == 1, "its loader takes this line out"


def test_the_terminal_lists_checks_in_bring_up_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr(console.out, "width", console.PIPED)
    facts = group(node(1), node(2, env={"NCCL_SOCKET_IFNAME": "docker0"}), offsets={})
    done = NodeCheckResult(facts, judge_nodes(facts, GroupLaunch()), {"n2": "SHA256:abc"})
    assert answer(nodes_reply(done), False, "nodes") == 1
    shown = capsys.readouterr().out
    rows = [row.split() for row in shown.splitlines() if not row.startswith(" ")]
    assert [row[:2] for row in rows[:3]] == [["yes", "identity"], ["yes", "fabric"], ["no", "interface"]]
    wording(shown, "NCCL_SOCKET_IFNAME=eth0", "docker0", "10.0.0.1:29500", "SHA256:abc")
    assert answer(nodes_reply(done), True, "nodes") == 1
    body = json.loads(capsys.readouterr().out)
    assert body["checks"]["interface"] == "no" and body["hint"] and body["code"] == "failed"
