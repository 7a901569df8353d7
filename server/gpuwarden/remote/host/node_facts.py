"""Models for facts about several nodes and the network paths between them. Unknown fields in replies are ignored.

A fact that could not be determined is None, or is missing from its list.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from gpuwarden.core.errors import BadReply

_PLAIN = re.compile(r"[A-Za-z0-9_.:@-]{1,15}")


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Interface(_Lenient):
    """A network interface, with or without an IPv4 address. `kind` is "" if ranks can use the interface."""

    name: str
    kind: str = ""
    up: bool | None = None
    mtu: int | None = None
    address: str | None = None
    prefix: int | None = None
    mbit: int | None = None
    default: bool = False

    @property
    def usable(self) -> bool:
        """Return whether ranks can use this interface.

        The interface's name must be safe in a shell, because a suggested fix may contain the name.
        """
        plain = _PLAIN.fullmatch(self.name) is not None
        return plain and not self.kind and self.up is True and self.network is not None

    @property
    def network(self) -> ipaddress.IPv4Network | None:
        """Return the network of the interface's address; None if unknown."""
        try:
            return ipaddress.IPv4Network(f"{self.address}/{self.prefix}", strict=False)
        except ValueError:
            return None


class Adapter(_Lenient):
    """A port of an InfiniBand or RoCE adapter."""

    name: str
    active: bool | None = None
    mbit: int | None = None


class Fabric(_Lenient):
    """An NVSwitch fabric. `switches` is None if the PCI devices can't be read."""

    switches: int | None = None
    driver: str | None = None
    service: str | None = None
    version: str | None = None
    gpus: int = 0
    states: tuple[str, ...] | None = None


class Torch(_Lenient):
    """The job's PyTorch, according to its package metadata. `nccl` is None if no NCCL package is installed."""

    python: str | None = None
    torch: str | None = None
    nccl: str | None = None


class Node(_Lenient):
    """One node, as reported by its agent."""

    boot: str | None = None
    network: str | None = None
    hostname: str = ""
    interfaces: tuple[Interface, ...] | None = None
    infiniband: tuple[Adapter, ...] = ()
    fabric: Fabric = Fabric()
    torch: Torch = Torch()
    env: Mapping[str, str] = {}

    @property
    def identity(self) -> tuple[str, str] | None:
        """Return the boot id and the network namespace, which identify the node; None if either is unknown."""
        return (self.boot, self.network) if self.boot and self.network else None


@dataclass(frozen=True)
class Offset:
    """The offset of a node's clock from this machine's clock, and its uncertainty, in seconds. Positive means ahead."""

    seconds: float
    uncertainty: float


@dataclass(frozen=True)
class NetworkPath:
    """The network path from one node to another. A value that could not be determined is None.

    `passes` is the largest packet in bytes that arrived unfragmented; `limit` is the limit that a router reported.
    `error` is the name of an errno, or OTHER_SERVICE or OTHER_ADDRESS.
    """

    source: str
    target: str
    reached: bool | None = None
    error: str = ""
    mtu: int | None = None
    passes: int | None = None
    limit: int | None = None


class Rank(_Lenient):
    """The last report from one rank in the all-reduce. `stage` is start, joining, met or done."""

    stage: str = "start"
    code: int | None = None
    torch: str | None = None
    nccl: str | None = None
    seconds: float | None = None
    right: bool | None = None
    error: str = ""


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce over all nodes: its backend and its size in bytes. `wanted` is False if it was not requested."""

    backend: str = ""
    size: int = 0
    ranks: Mapping[str, Rank] = field(default_factory=dict)
    wanted: bool = True


@dataclass(frozen=True)
class GroupFacts:
    """The facts about a group. `silent` maps each unresponsive node to the reason. The first node is the head."""

    names: tuple[str, ...]
    nodes: Mapping[str, Node]
    silent: Mapping[str, str] = field(default_factory=dict)
    offsets: Mapping[str, Offset] = field(default_factory=dict)
    ways: tuple[NetworkPath, ...] = ()
    sum: AllReduce = AllReduce()
    port: int = 0
    port_error: str = ""

    @property
    def head(self) -> str:
        """Return the node that ranks connect to."""
        return self.names[0]


def read_node(name: str, answer: Mapping[str, Any]) -> Node:
    """Parse an agent's facts. Raises BadReply for a reply in an unknown format."""
    try:
        return Node.model_validate(dict(answer))
    except ValidationError:
        raise BadReply(f"the facts from {name} have an unknown format", "Try again.") from None


def read_rank(answer: Mapping[str, Any]) -> Rank:
    """Parse a rank's report. If its format is unknown, treat the rank as never started."""
    try:
        return Rank.model_validate(dict(answer))
    except ValidationError:
        return Rank(error="its reply can't be parsed")
