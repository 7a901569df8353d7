"""Check a group of nodes before a job runs on them: each node, the network paths between nodes, and an all-reduce.

The check launches no job, writes no files and records nothing. Facts that can't be gathered remain unknown.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import anyio

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadReply, BadRequest, WardenError
from gpuwarden.core.sanitize import line
from gpuwarden.remote.host.node_facts import (
    AllReduce,
    GroupFacts,
    Interface,
    NetworkPath,
    Node,
    Offset,
    Rank,
    read_node,
    read_rank,
)
from gpuwarden.remote.host.node_findings import Verdict, judge_nodes
from gpuwarden.remote.host.node_interfaces import chosen
from gpuwarden.remote.host.node_talk import LOCAL, NodeTalk, open_talk
from gpuwarden.remote.ssh.config import check_host
from gpuwarden.static_analysis.group_launch import GroupLaunch

MOST_NODES: Final = 256
ALL_WAYS: Final = 6
"""Largest group for which every path is checked. In a larger group, only the paths to the head node and the paths along
a ring of all nodes are checked.
"""
CLOCK_ROUNDS: Final = 5
PORT: Final = 29_500
SIZE: Final = 8 << 20
PATH_S: Final = 60.0
"""Maximum duration of one path check in seconds. If packets are lost, each tested packet size takes a few seconds."""


@dataclass(frozen=True)
class NodeCheckSettings:
    """Settings for a check: the rendezvous port, the job's Python interpreter, and the all-reduce (skipped if `size` is
    0).
    """

    port: int = PORT
    python: str = ""
    size: int = SIZE
    within_s: float = 30.0
    rounds: int = 5
    launch: GroupLaunch = field(default_factory=GroupLaunch)


@dataclass(frozen=True)
class NodeCheckResult:
    """Result of a check: the facts, the verdict on them, and the new host keys."""

    facts: GroupFacts
    verdict: Verdict
    new_keys: dict[str, str]


async def check_nodes(
    names: Sequence[str], wanted: NodeCheckSettings, clock: Clock, config: Path | None = None
) -> NodeCheckResult:
    """Check the nodes; the first one is the rendezvous host. Raises BadRequest if the names form an invalid group."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadRequest(f"{twice[0]} is listed twice", "List each node once.")
    if not 2 <= len(names) <= MOST_NODES:
        raise BadRequest(
            f"a group of {len(names)} nodes can't be checked",
            f"Specify 2 to {MOST_NODES} hosts from your SSH configuration; the local machine is called {LOCAL}.",
        )
    for name in names:
        check_host(name)
    async with AsyncExitStack() as stack:
        talks, silent = await _opened(names, config, stack)
        group = _Group(talks, wanted, clock)
        facts = GroupFacts(tuple(names), {}, port=wanted.port)
        nodes, more = await _each(talks, group.node)
        facts = replace(facts, nodes=nodes, silent={**silent, **more})
        offsets, _ = await _each({n: talks[n] for n in nodes}, group.offset)
        facts = await group.ways(replace(facts, offsets=offsets))
        facts = await group.reduce(facts)
        keys = {name: talk.fingerprint for name, talk in talks.items() if talk.first_contact}
    return NodeCheckResult(facts, judge_nodes(facts, wanted.launch), keys)


async def _opened(
    names: Sequence[str], config: Path | None, stack: AsyncExitStack
) -> tuple[dict[str, NodeTalk], dict[str, str]]:
    """Start an agent on every node concurrently. Return the agents and the error for each node that did not respond."""
    talks: dict[str, NodeTalk] = {}
    silent: dict[str, str] = {}

    async def one(name: str) -> None:
        try:
            talks[name] = await open_talk(name, config)
            stack.push_async_callback(talks[name].aclose)
        except WardenError as error:
            silent[name] = error.message

    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(one, name)
    return {name: talks[name] for name in names if name in talks}, silent


async def _each(
    talks: dict[str, NodeTalk], look: Callable[[NodeTalk], Coroutine[Any, Any, Any]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Query all nodes concurrently.

    Return the responses in the order of the names, and the errors of the nodes that did not respond.
    """
    found: dict[str, Any] = {}
    silent: dict[str, str] = {}

    async def one(name: str, talk: NodeTalk) -> None:
        try:
            found[name] = await look(talk)
        except WardenError as error:
            silent[name] = error.message

    async with anyio.create_task_group() as group:
        for name, talk in talks.items():
            group.start_soon(one, name, talk)
    return {name: found[name] for name in talks if name in found}, silent


class _Group:
    """The agents on one group's nodes."""

    def __init__(self, talks: dict[str, NodeTalk], wanted: NodeCheckSettings, clock: Clock) -> None:
        self._talks, self._wanted, self._clock = talks, wanted, clock
        self._token = secrets.token_hex(16)

    async def node(self, talk: NodeTalk) -> Node:
        """Return the facts about one node."""
        python = self._wanted.python or (sys.executable if talk.name == LOCAL else "")
        return read_node(talk.name, await talk.ask("facts", python=python))

    async def offset(self, talk: NodeTalk) -> Offset:
        """Measure a node's clock offset, using the shortest of several round trips. Half of the round-trip time is the
        uncertainty.
        """
        best: Offset | None = None
        for _ in range(CLOCK_ROUNDS):
            sent = self._clock.now()
            now = (await talk.ask("clock")).get("now")
            half = (self._clock.now() - sent) / 2
            # `not 0 <= now` also rejects NaN, for which every comparison is false.
            if not isinstance(now, int | float) or isinstance(now, bool) or not 0 <= now < 1e12:
                raise BadReply(f"{talk.name} reported its clock in an unknown format", "Try again.")
            if best is None or half < best.uncertainty:
                best = Offset(now - sent - half, half)
        assert best is not None
        return best

    async def ways(self, facts: GroupFacts) -> GroupFacts:
        """Check the network paths between the nodes, over the chosen interfaces."""
        best = chosen(facts)
        there = [name for name in facts.names if name in best and name in facts.nodes]
        talks = {name: self._talks[name] for name in there}

        async def listen(talk: NodeTalk) -> dict[str, Any]:
            port = self._wanted.port if talk.name == facts.head else 0
            return await talk.ask("listen", address=best[talk.name].address, port=port, token=self._token)

        ears, _ = await _each(talks, listen)
        heard = {
            name: ear
            for name, ear in ears.items()
            if integer_or_none(ear.get("tcp")) and integer_or_none(ear.get("udp"))
        }
        targets = {name: [b for a, b in ways_between(there, facts.head) if a == name and b in heard] for name in there}

        async def look(talk: NodeTalk) -> list[NetworkPath]:
            return [
                await self._way(talk, target, best[talk.name], best[target], heard[target])
                for target in targets[talk.name]
            ]

        ways, _ = await _each(talks, look)
        await _each(talks, lambda talk: talk.ask("unlisten"))  # frees the port for jobs
        port_error = line(ears.get(facts.head, {}).get("error", ""), 60)
        return replace(facts, ways=tuple(way for found in ways.values() for way in found), port_error=port_error)

    async def _way(
        self, talk: NodeTalk, target: str, own: Interface, other: Interface, ports: Mapping[str, Any]
    ) -> NetworkPath:
        """Check one network path.

        Facts that the agent can't report remain unknown. An error does not stop the checks of other paths.
        """
        where: dict[str, Any] = {"source": own.address, "to": other.address, "token": self._token}
        found: dict[str, Any] = {}
        with suppress(WardenError):
            found = await talk.ask("reach", port=ports["tcp"], **where)
            found |= await talk.ask("path", timeout_s=PATH_S, udp=ports["udp"], mtu=own.mtu or 1500, **where)
        moved = found.get("reached") is True and found.get("seen") != own.address
        return NetworkPath(
            talk.name,
            target,
            reached=found["reached"] and not moved if isinstance(found.get("reached"), bool) else None,
            error="OTHER_ADDRESS" if moved else line(found.get("error", ""), 60),
            mtu=own.mtu,
            passes=integer_or_none(found.get("passes")),
            limit=integer_or_none(found.get("limit")),
        )

    async def reduce(self, facts: GroupFacts) -> GroupFacts:
        """Sum one tensor over all nodes if every node has PyTorch."""
        best, wanted = chosen(facts), self._wanted
        able = [n for n in facts.names if n in best and n in facts.nodes and facts.nodes[n].torch.python]
        if not wanted.size:
            return replace(facts, sum=AllReduce(wanted=False))
        if able != list(facts.names) or facts.port_error:
            return facts
        # If two names refer to the same machine, an all-reduce would not measure the network.
        if len({facts.nodes[n].identity for n in able}) < len(able):
            return facts
        backend = "nccl" if all(facts.nodes[n].fabric.gpus for n in able) else "gloo"
        common = {
            "backend": backend, "world": len(able), "to": best[facts.head].address, "port": wanted.port,
            "within_s": wanted.within_s, "rounds": wanted.rounds, "bytes": wanted.size,
        }  # fmt: skip

        async def rank(talk: NodeTalk) -> Rank:
            names = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), best[talk.name].name)
            python, number = facts.nodes[talk.name].torch.python, able.index(talk.name)
            env = {**wanted.launch.env, **names}
            patience = wanted.within_s + 40
            return read_rank(
                await talk.ask("reduce", timeout_s=patience, python=python, rank=number, env=env, **common)
            )

        ranks, silent = await _each(self._talks, rank)
        ranks |= {name: Rank(error=why) for name, why in silent.items()}
        return replace(facts, sum=AllReduce(backend, wanted.size, {name: ranks[name] for name in able}))


def integer_or_none(value: object) -> int | None:
    """Return a value from an agent's response if it is an integer, else None."""
    return value if type(value) is int else None


def ways_between(names: Sequence[str], head: str) -> list[tuple[str, str]]:
    """Return the paths to check, as pairs of source and target node."""
    if len(names) <= ALL_WAYS:
        return [(a, b) for a in names for b in names if a != b]
    ring = [*pairwise(names), (names[-1], names[0])]
    return list(dict.fromkeys([*((a, head) for a in names if a != head), *ring]))
