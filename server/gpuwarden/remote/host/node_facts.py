"""What was seen of several nodes and of the ways between them. Values; an agent's answer is read leniently.

Anything that could not be looked at is None, or is missing from its list.
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
    """A network interface with an IPv4 address or without. `kind` is "" for one that ranks can use."""

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
        """Return whether ranks on different nodes can meet over it. Its name is proposed to a shell, so it is plain."""
        plain = _PLAIN.fullmatch(self.name) is not None
        return plain and not self.kind and self.up is True and self.network is not None

    @property
    def network(self) -> ipaddress.IPv4Network | None:
        """Return the network that its address is in; None where that is not known."""
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
    """An NVSwitch fabric. `switches` None: it can't be seen whether there is one."""

    switches: int | None = None
    driver: str | None = None
    service: str | None = None
    version: str | None = None
    gpus: int = 0
    states: tuple[str, ...] | None = None


class Torch(_Lenient):
    """The PyTorch that a job gets, by its packages. `nccl` None: no package of that name."""

    python: str | None = None
    torch: str | None = None
    nccl: str | None = None


class Node(_Lenient):
    """One node, as its agent saw it."""

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
        """Return what no other node has: the boot of its kernel, and its network; None where either is unknown."""
        return (self.boot, self.network) if self.boot and self.network else None


@dataclass(frozen=True)
class Offset:
    """How far a node's clock is ahead of this machine's, in seconds, and how far off that may be."""

    seconds: float
    uncertainty: float


@dataclass(frozen=True)
class Way:
    """What came of the way from one node to another. None could not be looked at.

    `passes` is the largest packet that arrived whole, `told` the limit that a router named. `error` is an errno's name.
    """

    source: str
    target: str
    reached: bool | None = None
    error: str = ""
    mtu: int | None = None
    passes: int | None = None
    told: int | None = None


class Rank(_Lenient):
    """What one rank of the all-reduce said last: `stage` is start, joining, met or done."""

    stage: str = "start"
    code: int | None = None
    torch: str | None = None
    nccl: str | None = None
    seconds: float | None = None
    right: bool | None = None
    error: str = ""


@dataclass(frozen=True)
class Sum:
    """An all-reduce over all nodes: its backend and size. `wanted` is False where nobody asked for it."""

    backend: str = ""
    size: int = 0
    ranks: Mapping[str, Rank] = field(default_factory=dict)
    wanted: bool = True


@dataclass(frozen=True)
class GroupFacts:
    """Everything that was seen. `silent` has the nodes that did not answer, with why; the first name is the head."""

    names: tuple[str, ...]
    nodes: Mapping[str, Node]
    silent: Mapping[str, str] = field(default_factory=dict)
    offsets: Mapping[str, Offset] = field(default_factory=dict)
    ways: tuple[Way, ...] = ()
    sum: Sum = Sum()
    port: int = 0
    port_error: str = ""

    @property
    def head(self) -> str:
        """Return the node where ranks meet."""
        return self.names[0]


def read_node(name: str, answer: Mapping[str, Any]) -> Node:
    """Return an agent's facts. Raises BadReply for an answer in another form."""
    try:
        return Node.model_validate(dict(answer))
    except ValidationError:
        raise BadReply(f"{name} described itself in a form that is not known", "Try again.") from None


def read_rank(answer: Mapping[str, Any]) -> Rank:
    """Return what a rank said; a form that is not known counts as a rank that never came."""
    try:
        return Rank.model_validate(dict(answer))
    except ValidationError:
        return Rank(error="it gave an answer that is not understood")
