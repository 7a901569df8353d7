"""Real nodes: network namespaces with an SSH server in each, and every fault that the check is meant to find."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpuwarden.core.clock import SystemClock
from gpuwarden.interfaces.results.nodes import nodes_reply
from gpuwarden.lifecycle.nodes import NodeCheckResult, NodeCheckSettings, check_nodes
from gpuwarden.remote.host import node_talk
from gpuwarden.remote.host.node_codes import Answer, Area, NodeCode
from nodes_kit import Nodes, ip
from real_parts import need

pytestmark = pytest.mark.anyio
QUICK = NodeCheckSettings(size=0)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("nodes"))
    try:
        yield made.start()
    finally:
        made.stop()


async def look(nodes: Nodes, *names: str, wanted: NodeCheckSettings = QUICK) -> NodeCheckResult:
    return await check_nodes(names, wanted, SystemClock(), nodes.config)


def codes(done: NodeCheckResult, area: Area, answer: Answer = Answer.NO) -> list[tuple[str, str]]:
    return [(p.node, p.code) for p in done.verdict.problems if p.area is area and p.answer is answer]


@pytest.mark.slow
async def test_a_sound_group_meets_over_its_data_interface(nodes: Nodes) -> None:
    done = await look(nodes, "a", "b", "c")
    good = {Area.IDENTITY, Area.FABRIC, Area.INTERFACE, Area.RENDEZVOUS, Area.MTU, Area.CLOCK}
    assert {area for area in good if done.verdict.answers[area] is not Answer.YES} == set(), done.verdict.problems
    assert [(w.source, w.target, w.passes) for w in done.facts.ways if w.source == "a"] == [
        ("a", "b", 9000),
        ("a", "c", 9000),
    ]
    assert done.verdict.environment["NCCL_SOCKET_IFNAME"] == done.verdict.environment["GLOO_SOCKET_IFNAME"] == "data0"
    assert done.verdict.environment["NCCL_IB_DISABLE"] == "1"
    assert done.verdict.meeting_place == f"{nodes.address('a')}:29500"
    assert Area.REDUCE not in done.verdict.answers, "nobody asked for it"
    bind = f"import socket; socket.create_server(('{nodes.address('a')}', 29500))"
    nodes.inside("a", [sys.executable, "-S", "-c", bind])


@pytest.mark.prove
async def test_a_node_with_a_smaller_mtu_drops_large_packets(nodes: Nodes) -> None:
    nodes.link("c", "data0", "mtu", "1500")
    try:
        done = await look(nodes, "a", "b", "c")
    finally:
        nodes.link("c", "data0", "mtu", "9000")
    assert codes(done, Area.MTU) == [("a", NodeCode.PACKETS_LOST), ("b", NodeCode.PACKETS_LOST)]
    assert {w.passes for w in done.facts.ways if w.target == "c"} == {1500}
    assert codes(done, Area.MTU, Answer.NOTE) == [("", NodeCode.MTU_DIFFERS)]


@pytest.mark.prove
async def test_a_router_that_reports_its_mtu_is_only_a_note(nodes: Nodes) -> None:
    nodes.link("r", "portc", "mtu", "4096")
    try:
        done = await look(nodes, "a", "c")
    finally:
        nodes.link("r", "portc", "mtu", "9000")
    assert ("a", NodeCode.PACKETS_CUT) in codes(done, Area.MTU, Answer.NOTE)
    (way,) = [w for w in done.facts.ways if w.source == "a"]
    assert (way.limit, way.passes) == (4096, 4096)
    # In the other direction, the packet is too large for the link from c to its router, and is lost there.
    assert codes(done, Area.MTU) == [("c", NodeCode.PACKETS_LOST)]
    for node in "ac":
        nodes.inside(node, ["ip", "route", "flush", "cache"])


@pytest.mark.prove
async def test_without_ping_packets_are_measured_over_udp(nodes: Nodes) -> None:
    fake = nodes.folder / "a" / "bin" / "ping"
    fake.write_text("#!/bin/sh\nexit 2\n")
    fake.chmod(0o755)
    nodes.link("c", "data0", "mtu", "1500")
    try:
        done = await look(nodes, "a", "c")
    finally:
        nodes.link("c", "data0", "mtu", "9000")
        fake.unlink()
    assert codes(done, Area.MTU) == [("a", NodeCode.PACKETS_LOST)]
    assert {w.passes for w in done.facts.ways} == {1500}


@pytest.mark.prove
async def test_an_unusable_interface_is_reported_with_the_usable_interface(nodes: Nodes) -> None:
    nodes.serve("b", "NCCL_SOCKET_IFNAME=docker0")
    try:
        done = await look(nodes, "a", "b")
    finally:
        nodes.serve("b")
    assert codes(done, Area.INTERFACE) == [("b", NodeCode.INTERFACE_WRONG)]
    said = next(f.message for f in nodes_reply(done).details if f.code == NodeCode.INTERFACE_WRONG)
    assert "docker0" in said and "data0" in said
    assert done.verdict.environment["NCCL_SOCKET_IFNAME"] == "data0"


@pytest.mark.prove
async def test_a_second_interface_leaves_the_choice_open(nodes: Nodes) -> None:
    ip("-n", nodes.space("b"), "link", "add", "eno9", "type", "veth", "peer", "name", "vethx")
    ip("-n", nodes.space("b"), "addr", "add", "192.168.77.1/24", "dev", "eno9")
    for name in ("eno9", "vethx"):
        nodes.link("b", name, "up")
    try:
        done = await look(nodes, "a", "b")
    finally:
        ip("-n", nodes.space("b"), "link", "del", "eno9")
    assert codes(done, Area.INTERFACE) == [("b", NodeCode.INTERFACE_OPEN)]


@pytest.mark.prove
async def test_a_node_that_fails_to_reach_the_head_is_named(nodes: Nodes) -> None:
    ip("-n", nodes.space("b"), "route", "add", "unreachable", f"{nodes.address('a')}/32")
    try:
        done = await look(nodes, "a", "b", "c")
    finally:
        ip("-n", nodes.space("b"), "route", "del", "unreachable", f"{nodes.address('a')}/32")
    assert ("b", NodeCode.NOT_REACHED) in codes(done, Area.RENDEZVOUS)
    assert not {"c"} & {node for node, _ in codes(done, Area.RENDEZVOUS)}


@pytest.mark.prove
async def test_a_port_in_use_is_reported(nodes: Nodes) -> None:
    bind = f"s = socket.create_server(('{nodes.address('a')}', 29500))"
    code = f"import socket; {bind}; print('up', flush=True); s.accept()"
    argv = ["ip", "netns", "exec", nodes.space("a"), sys.executable, "-I", "-S", "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"up\n"
        try:
            done = await look(nodes, "a", "b")
        finally:
            other.terminate()
    assert codes(done, Area.RENDEZVOUS) == [("a", NodeCode.PORT_IN_USE)]


@pytest.mark.prove
async def test_a_node_that_answers_to_two_names_is_one_machine(nodes: Nodes) -> None:
    done = await look(nodes, "a", "b", "b2")
    assert codes(done, Area.IDENTITY) == [("b2", NodeCode.SAME_NODE)]
    assert not done.facts.sum.ranks


@pytest.mark.prove
async def test_a_clock_that_is_off_is_measured(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    source = node_talk.agent_source()
    read, moved = '{"now": ', '{"now": float(os.environ.get("SKEW", 0)) + '
    assert source.count(read) == 1
    monkeypatch.setattr(node_talk, "agent_source", lambda: source.replace(read, moved))
    nodes.serve("b", "SKEW=90")
    try:
        done = await look(nodes, "a", "b", "c")
    finally:
        nodes.serve("b")
    assert codes(done, Area.CLOCK) == [("b", NodeCode.CLOCK_OFF)]
    (off,) = [p for p in done.verdict.problems if p.code is NodeCode.CLOCK_OFF]
    assert 80 < float(str(off.parameters["seconds"])) < 100


@pytest.mark.prove
async def test_a_node_that_is_down_is_unknown_and_never_passes(nodes: Nodes) -> None:
    nodes.servers["c"].stop()
    try:
        done = await look(nodes, "a", "b", "c")
    finally:
        nodes.serve("c")
    assert set(done.facts.silent) == {"c"}
    unknown = {Area.IDENTITY, Area.FABRIC, Area.INTERFACE, Area.RENDEZVOUS, Area.MTU, Area.CLOCK, Area.VERSIONS}
    assert all(done.verdict.answers[area] is Answer.UNKNOWN for area in unknown)
    assert nodes_reply(done).code == "unknown"
    assert not done.verdict.environment


@pytest.mark.prove
async def test_a_dead_node_hides_no_problem_between_its_neighbors(nodes: Nodes) -> None:
    """Its neighbors are still checked, and problems between them are reported."""
    nodes.servers["b"].stop()
    nodes.link("c", "data0", "mtu", "1500")
    try:
        done = await look(nodes, "a", "b", "c", "b2")
    finally:
        nodes.link("c", "data0", "mtu", "9000")
        nodes.serve("b")
    assert set(done.facts.silent) == {"b", "b2"}
    assert {(w.source, w.target) for w in done.facts.ways} == {("a", "c"), ("c", "a")}
    assert codes(done, Area.MTU) == [("a", NodeCode.PACKETS_LOST)]
    assert nodes_reply(done).code == "failed"


@pytest.mark.prove
class TestReduce:
    """The all-reduce, with PyTorch on every node."""

    async def test_all_ranks_finish_and_the_speed_is_measured(self, nodes: Nodes) -> None:
        torch()
        done = await look(nodes, "a", "b", "c", wanted=NodeCheckSettings(rounds=3))
        assert {r.stage for r in done.facts.sum.ranks.values()} == {"done"}, done.facts.sum
        assert all(r.right for r in done.facts.sum.ranks.values())
        assert [c for _, c in codes(done, Area.REDUCE, Answer.NOTE)] == [NodeCode.MEASURED]
        assert done.verdict.answers[Area.VERSIONS] is done.verdict.answers[Area.TIMEOUTS] is Answer.YES

    async def test_a_dead_rank_is_distinguished_from_waiting_ranks(self, nodes: Nodes) -> None:
        torch()
        site = nodes.folder / "b" / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(
            "import os, sys\nif sys.orig_argv[-1] == 'reduce':\n    os.kill(os.getpid(), 9)\n"
        )
        nodes.serve("b", f"PYTHONPATH={site}")
        try:
            done = await look(nodes, "a", "b", "c", wanted=NodeCheckSettings(within_s=5, rounds=1))
        finally:
            nodes.serve("b")
        found = codes(done, Area.REDUCE)
        assert found[0] == ("b", NodeCode.RANK_DEAD)
        assert sorted(found[1:]) == [("a", NodeCode.RANKS_WAITED), ("c", NodeCode.RANKS_WAITED)]

    async def test_a_link_below_its_rated_speed_is_slow(self, nodes: Nodes) -> None:
        torch()
        argv = ["tc", "-n", nodes.space("b"), "qdisc", "add", "dev", "data0", "root", "tbf"]
        argv += ["rate", "40mbit", "burst", "128kb", "latency", "200ms"]
        need("tc with a token bucket", subprocess.run(argv, capture_output=True, check=False).returncode == 0)
        try:
            done = await look(nodes, "a", "b", wanted=NodeCheckSettings(size=1 << 20, rounds=1))
        finally:
            subprocess.run(["tc", "-n", nodes.space("b"), "qdisc", "del", "dev", "data0", "root"], check=True)
        assert [c for _, c in codes(done, Area.REDUCE)] == [NodeCode.SLOW], done.facts.sum


def torch() -> None:
    """Skip the test, naming PyTorch, if this Python lacks it."""
    import importlib.util

    need("PyTorch", importlib.util.find_spec("torch") is not None)
