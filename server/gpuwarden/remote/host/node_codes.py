"""Define the codes for multi-node checks, answers and problems. Programs compare these codes, never the messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuwarden.core.guidance import Scalar


class Area(StrEnum):
    """The areas to check, in the order in which they matter when a group of nodes starts."""

    IDENTITY = "identity"
    FABRIC = "fabric_manager"
    INTERFACE = "interface"
    RENDEZVOUS = "rendezvous"
    MTU = "mtu"
    CLOCK = "clock"
    VERSIONS = "versions"
    TIMEOUTS = "timeouts"
    RESTART = "elastic_restart"
    REDUCE = "all_reduce"


class NodeCode(StrEnum):
    """The code for a problem or a measurement."""

    SILENT = "silent"
    SAME_NODE = "same_node"
    IDENTITY_UNSEEN = "identity_unseen"
    FABRIC_DOWN = "fabric_down"
    FABRIC_VERSION = "fabric_version"
    FABRIC_STATE = "fabric_state"
    FABRIC_UNSEEN = "fabric_unseen"
    NO_FABRIC = "no_fabric"
    INTERFACES_UNSEEN = "interfaces_unseen"
    NO_INTERFACE = "no_interface"
    INTERFACE_OPEN = "interface_open"
    INTERFACE_WRONG = "interface_wrong"
    VARIABLE_DIFFERS = "variable_differs"
    NOT_REACHED = "not_reached"
    PORT_IN_USE = "port_in_use"
    NOT_LISTENING = "not_listening"
    OTHER_ADDRESS = "other_address"
    WAY_UNSEEN = "way_unseen"
    PACKETS_LOST = "packets_lost"
    PACKETS_CUT = "packets_cut"
    MTU_DIFFERS = "mtu_differs"
    MTU_UNSEEN = "mtu_unseen"
    CLOCK_OFF = "clock_off"
    CLOCK_UNSEEN = "clock_unseen"
    NO_TORCH = "no_torch"
    TORCH_DIFFERS = "torch_differs"
    NCCL_DIFFERS = "nccl_differs"
    DRIVER_DIFFERS = "driver_differs"
    NCCL_UNSEEN = "nccl_unseen"
    TIMEOUT_MASKS = "timeout_masks"
    TIMEOUT_UNSEEN = "timeout_unseen"
    ERRORS_IGNORED = "errors_ignored"
    NOT_RESTORED = "not_restored"
    RESTORE_UNSEEN = "restore_unseen"
    ELASTIC_PAUSE = "elastic_pause"
    ELASTIC_TIGHT = "elastic_tight"
    RANK_DEAD = "rank_dead"
    RANKS_WAITED = "ranks_waited"
    WRONG_SUM = "wrong_sum"
    SLOW = "slow"
    MEASURED = "measured"
    NOT_TRIED = "not_tried"
    LINK_UNKNOWN = "link_unknown"


class Answer(StrEnum):
    """The result of a check. A NOTE is reported but does not change the result."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"
    NOTE = "note"


@dataclass(frozen=True)
class Problem:
    """A problem or measurement: its code and parameters. `message` is untrusted text from a node."""

    area: Area
    answer: Answer
    code: NodeCode
    node: str = ""
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    message: str = ""
