"""Check the software on several nodes: versions, timeouts, restarts, and an all-reduce. All functions are pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from gpuwarden.core.guidance import Scalar
from gpuwarden.remote.host.node_checks import unseen
from gpuwarden.remote.host.node_codes import Answer, Area, NodeCode, Problem
from gpuwarden.remote.host.node_facts import GroupFacts, Node, Rank
from gpuwarden.remote.host.node_interfaces import chosen
from gpuwarden.static_analysis.group_launch import GroupLaunch

MASKS_S: Final = 1800.0
"""If the timeout is at least this many seconds, a dead rank is detected so late that the cause is hard to find."""
DEFAULT_SINCE: Final = (2, 2)
"""The first PyTorch version whose default timeout for an NCCL group is 600 s instead of 1800 s."""
FAST_GLOO_MBIT: Final = 8_000
"""The highest bandwidth to expect from gloo, which copies data through the CPU."""
FEWEST_SHARE: Final = 0.25
"""The share of the link's speed that an 8 MB all-reduce must reach. It is low, because latency dominates on fast
links."""
ELASTIC_S: Final = 600


def versions(facts: GroupFacts) -> Iterator[Problem]:
    """Compare the PyTorch, NCCL and driver versions across all nodes."""
    area = Area.VERSIONS
    yield from unseen(facts, area, NodeCode.NO_TORCH)
    by_node = torches(facts)
    ranks = {name: facts.sum.ranks.get(name, Rank()) for name in facts.nodes}
    libraries = {name: ranks[name].nccl or node.torch.nccl for name, node in facts.nodes.items()}
    for name in facts.nodes:
        if by_node[name] is None:
            yield Problem(area, Answer.UNKNOWN, NodeCode.NO_TORCH, name)
    yield from version_differences(by_node, NodeCode.TORCH_DIFFERS)
    yield from version_differences(libraries, NodeCode.NCCL_DIFFERS)
    yield from version_differences({n: node.fabric.driver for n, node in facts.nodes.items()}, NodeCode.DRIVER_DIFFERS)
    for name, node in facts.nodes.items():
        if node.fabric.gpus and by_node[name] and libraries[name] is None:
            yield Problem(area, Answer.UNKNOWN, NodeCode.NCCL_UNSEEN, name)


def torches(facts: GroupFacts) -> dict[str, str | None]:
    """Return each node's PyTorch version: the version that a rank imported, or else the version in the metadata."""
    seen = {name: facts.nodes.get(name, Node()).torch.torch for name in facts.names}
    found = {name: facts.sum.ranks.get(name, Rank()).torch or version for name, version in seen.items()}
    return {name: None if version == "unknown" else version for name, version in found.items()}


def version_differences(versions: Mapping[str, str | None], code: NodeCode) -> Iterator[Problem]:
    """Yield a problem for each node whose version differs from that of the first node with a known version."""
    known = {name: version for name, version in versions.items() if version}
    first = next(iter(known), "")
    for name, version in known.items():
        if version != known[first]:
            answer = Answer.NOTE if code is NodeCode.DRIVER_DIFFERS else Answer.NO
            given: dict[str, Scalar] = {"version": version, "other": first, "others": known[first]}
            yield Problem(Area.VERSIONS, answer, code, name, given)


def judge_launch(launch: GroupLaunch, torches: Mapping[str, str | None]) -> Iterator[Problem]:
    """Check timeouts and restarts, based on the launch command and the PyTorch version on each node."""
    yield from timeouts(launch, torches)
    if launch.restarts and launch.restores is not True:
        seen = launch.restores is not None
        yield Problem(
            Area.RESTART,
            Answer.NO if seen else Answer.UNKNOWN,
            NodeCode.NOT_RESTORED if seen else NodeCode.RESTORE_UNSEEN,
            parameters={"restarts": launch.restarts},
        )
    if launch.launcher == "horovodrun" and launch.fewest is not None:
        patience = launch.env.get("HOROVOD_ELASTIC_TIMEOUT", "")
        seconds = int(patience) if patience.isdigit() else ELASTIC_S
        given: dict[str, Scalar] = {"fewest": launch.fewest, "seconds": seconds}
        yield Problem(Area.RESTART, Answer.NOTE, NodeCode.ELASTIC_PAUSE, parameters=given)
        if launch.workers is not None and launch.fewest >= launch.workers:
            yield Problem(Area.RESTART, Answer.NO, NodeCode.ELASTIC_TIGHT, parameters=given)


def timeouts(launch: GroupLaunch, torches: Mapping[str, str | None]) -> Iterator[Problem]:
    """Check how long ranks wait for a dead rank."""
    area = Area.TIMEOUTS
    for variable in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if launch.env.get(variable) == "0":
            yield Problem(area, Answer.NO, NodeCode.ERRORS_IGNORED, parameters={"variable": variable})
    if launch.timeout_s is not None:
        if launch.timeout_s >= MASKS_S:
            yield Problem(area, Answer.NO, NodeCode.TIMEOUT_MASKS, parameters={"minutes": launch.timeout_s / 60})
        return
    for name, version in torches.items():
        numbers = re.match(r"(\d+)\.(\d+)", version or "")
        if numbers is None:
            yield Problem(area, Answer.UNKNOWN, NodeCode.TIMEOUT_UNSEEN, name)
        elif (int(numbers[1]), int(numbers[2])) < DEFAULT_SINCE:
            yield Problem(area, Answer.NO, NodeCode.TIMEOUT_MASKS, name, {"minutes": MASKS_S / 60})


# ------------------------------------------------------------------------------------------------------- the all-reduce


def reduction(facts: GroupFacts) -> Iterator[Problem]:
    """Check the result of the all-reduce: dead ranks, waiting ranks, the sum's correctness, and the speed."""
    area, ranks = Area.REDUCE, facts.sum.ranks
    if not ranks:
        yield from [Problem(area, Answer.UNKNOWN, NodeCode.NOT_TRIED)] if facts.sum.wanted else ()
        return
    dead = [name for name, rank in ranks.items() if rank.stage == "start"]
    dead = dead or [name for name, rank in ranks.items() if rank.stage != "done" and (rank.code or 0) < 0]
    stuck = [name for name, rank in ranks.items() if rank.stage != "done" and name not in dead]
    for name in dead:
        yield Problem(area, Answer.NO, NodeCode.RANK_DEAD, name, {"code": ranks[name].code or 0}, ranks[name].error)
    for name in stuck:
        yield Problem(area, Answer.NO, NodeCode.RANKS_WAITED, name, {"stage": ranks[name].stage}, ranks[name].error)
    if any(rank.right is False for rank in ranks.values()):
        yield Problem(area, Answer.NO, NodeCode.WRONG_SUM)
    if not dead and not stuck:
        yield from bandwidth(facts)


def bandwidth(facts: GroupFacts) -> Iterator[Problem]:
    """Compare the bandwidth of the all-reduce with the group's slowest link."""
    count = len(facts.sum.ranks)
    slowest = max(rank.seconds or 0.0 for rank in facts.sum.ranks.values())
    if slowest <= 0:
        yield Problem(Area.REDUCE, Answer.UNKNOWN, NodeCode.NOT_TRIED)
        return
    # The rate at which each node in a ring sends, like the "bus bandwidth" in nccl-tests.
    mbit = 2 * (count - 1) / count * facts.sum.size * 8 / slowest / 1e6
    link = link_of(facts)
    given: dict[str, Scalar] = {
        "mbit": round(mbit), "milliseconds": round(slowest * 1000, 1), "backend": facts.sum.backend,
    }  # fmt: skip
    yield Problem(Area.REDUCE, Answer.NOTE, NodeCode.MEASURED, parameters=given)
    if link is None:
        yield Problem(Area.REDUCE, Answer.UNKNOWN, NodeCode.LINK_UNKNOWN, parameters=given)
        return
    expected = link if facts.sum.backend == "nccl" else min(link, FAST_GLOO_MBIT)
    if mbit < FEWEST_SHARE * expected:
        yield Problem(Area.REDUCE, Answer.NO, NodeCode.SLOW, parameters={**given, "expected": expected})


def link_of(facts: GroupFacts) -> int | None:
    """Return the speed of the slowest node's link in Mbit/s; None if unknown.

    The link is InfiniBand if NCCL can use it, otherwise the chosen interface.
    """
    best = chosen(facts)
    speeds: list[int | None] = []
    for name in facts.sum.ranks:
        node, own = facts.nodes.get(name), best.get(name)
        adapters = [a.mbit or 0 for a in node.infiniband if a.active] if node and facts.sum.backend == "nccl" else []
        speeds.append(max(adapters) if adapters else own.mbit if own else None)
    known = [speed for speed in speeds if speed]
    return min(known) if known and len(known) == len(speeds) else None
