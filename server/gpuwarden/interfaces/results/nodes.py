"""The reply of `gpuwarden nodes check`: the answer of each check, and the problems behind it in words."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from gpuwarden.core.guidance import Action, do, steps
from gpuwarden.core.models import Frozen
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import named, quoted
from gpuwarden.interfaces.results.base import Result
from gpuwarden.lifecycle.nodes import Looked
from gpuwarden.remote.host.node_codes import Answer, Area, NodeCode, Problem

TEXTS: Final[dict[NodeCode, str]] = {
    NodeCode.SILENT: "it does not answer",
    NodeCode.SAME_NODE: "it is the same machine as {other}",
    NodeCode.IDENTITY_UNSEEN: "whether it is another machine than the rest can't be seen",
    NodeCode.FABRIC_DOWN: "it has NVSwitches, and its fabric manager is {state}: every rank of the group would hang",
    NodeCode.FABRIC_VERSION: "its fabric manager is {version} and its driver {driver}; they have to be equal",
    NodeCode.FABRIC_STATE: "a GPU reports its NVLink fabric as {state}",
    NodeCode.FABRIC_UNSEEN: "whether its fabric manager runs, in the driver's version, can't be seen",
    NodeCode.NO_FABRIC: "it has no NVSwitch, so no fabric manager is needed",
    NodeCode.INTERFACES_UNSEEN: "its network interfaces can't be seen",
    NodeCode.NO_INTERFACE: "no interface of it is up, has an address that is its own, and leads to other machines",
    NodeCode.INTERFACE_OPEN: "ranks may meet over several interfaces ({names}) and nothing says which",
    NodeCode.INTERFACE_WRONG: "{variable} selects {taken}, and {best} leads to the other nodes",
    NodeCode.VARIABLE_DIFFERS: "{variable} is not the same as on the first node",
    NodeCode.NOT_REACHED: "it can't connect to {target} ({error})",
    NodeCode.PORT_IN_USE: "port {port} is taken: another job may be running there",
    NodeCode.NOT_LISTENING: "it can't listen for the others ({why})",
    NodeCode.OTHER_ADDRESS: "{target} sees it under another address than its own: ranks can't connect back",
    NodeCode.WAY_UNSEEN: "its way to {target} could not be looked at",
    NodeCode.PACKETS_LOST: "packets to {target} of {mtu} bytes are lost without a word, {passes} arrive: large "
    "collectives would hang",
    NodeCode.PACKETS_CUT: "packets to {target} are limited to {told} bytes on the way, and its interface sends {mtu}; "
    "routers say so, and TCP adapts",
    NodeCode.MTU_DIFFERS: "the interfaces differ in the size of their packets: {sizes}",
    NodeCode.MTU_UNSEEN: "which packets get to {target} could not be looked at",
    NodeCode.CLOCK_OFF: "its clock is {seconds:+} s off that of {head} (give or take {unsure} s)",
    NodeCode.CLOCK_UNSEEN: "its clock could not be compared closely enough",
    NodeCode.NO_TORCH: "which PyTorch a job gets there is not known",
    NodeCode.TORCH_DIFFERS: "it has PyTorch {version}, and {other} has {others}",
    NodeCode.NCCL_DIFFERS: "it has NCCL {version}, and {other} has {others}",
    NodeCode.DRIVER_DIFFERS: "it has the driver {version}, and {other} has {others}",
    NodeCode.NCCL_UNSEEN: "which NCCL a job gets there is not known",
    NodeCode.TIMEOUT_MASKS: "collectives wait {minutes:.0f} minutes for a dead rank, which hides what killed it",
    NodeCode.TIMEOUT_UNSEEN: "how long collectives wait for a dead rank is not known",
    NodeCode.ERRORS_IGNORED: "with {variable}=0 nothing ends the other ranks when one dies",
    NodeCode.NOT_RESTORED: "its workers are restarted up to {restarts} times, and its script loads no saved state: "
    "each restart begins at step 0",
    NodeCode.RESTORE_UNSEEN: "its workers are restarted up to {restarts} times; whether they load their saved state "
    "is not known",
    NodeCode.ELASTIC_PAUSE: "with fewer than {fewest} workers it pauses for {seconds} s without a word, then fails",
    NodeCode.ELASTIC_TIGHT: "it needs all {fewest} workers, so that the loss of one pauses it for {seconds} s",
    NodeCode.RANK_DEAD: "its rank ended before it met the others (exit code {code})",
    NodeCode.RANKS_WAITED: "its rank came as far as {stage} and waited for the others",
    NodeCode.WRONG_SUM: "the all-reduce gave a wrong sum",
    NodeCode.SLOW: "the all-reduce reached {mbit:,} Mbit/s, and the slowest link allows {expected:,}",
    NodeCode.MEASURED: "{backend} summed over all nodes in {milliseconds} ms, {mbit:,} Mbit/s",
    NodeCode.NOT_TRIED: "no all-reduce was run",
    NodeCode.LINK_UNKNOWN: "what the network should give is not known: an interface does not report its speed",
}
FIXES: Final[dict[Area, str]] = {
    Area.IDENTITY: "Name each machine once, by a name that leads to it alone.",
    Area.FABRIC: "Restart nvidia-fabricmanager in the driver's version, or exchange the machine.",
    Area.INTERFACE: "Give every rank the variables that are proposed here.",
    Area.RENDEZVOUS: "Open all ports between the nodes, or choose another port.",
    Area.MTU: "Set one packet size on every interface of the way.",
    Area.CLOCK: "Start time synchronization there, such as chrony.",
    Area.VERSIONS: "Install the same versions on every node, from one lock file.",
    Area.TIMEOUTS: "Set a timeout of some minutes, and leave asynchronous error handling on.",
    Area.RESTART: "Load the last whole checkpoint at every start, and rehearse it by killing a worker.",
    Area.REDUCE: "Look at the rank that ended first, with NCCL_DEBUG=INFO.",
}


class NodeFindingReply(Frozen):
    """One finding. `node` is empty where it is about the launch or the whole group."""

    check: str
    answer: str
    code: str
    node: str = ""
    message: str = ""


class NodesReply(Result):
    """The answer of each check: yes, no or unknown. `environment` is proposed for every rank."""

    nodes: list[str]
    checks: dict[str, str]
    details: list[NodeFindingReply] = Field(default_factory=list)
    environment: dict[str, str] = Field(default_factory=dict)
    meeting_place: str = ""
    new_host_keys: dict[str, str] = Field(default_factory=dict)


def text_of(problem: Problem) -> str:
    """Return the sentence of a problem; what a node said is quoted."""
    given = {k: named(v, 120) if isinstance(v, str) else v for k, v in problem.parameters.items()}
    said = f": {quoted(problem.said, 300)}" if problem.said else ""
    return TEXTS[problem.code].format(**given) + said


def looked_at(done: Looked) -> NodesReply:
    """Return the reply to a look at several nodes; not ok unless every check is answered with yes."""
    found, answers = done.verdict.problems, done.verdict.answers
    wrong = [area for area, answer in answers.items() if answer is Answer.NO]
    unseen = [area for area, answer in answers.items() if answer is Answer.UNKNOWN]
    parts = [
        f"{counted(len(areas), 'check')} {what}: {', '.join(areas)}"
        for areas, what in ((wrong, "failed"), (unseen, "could not be answered"))
        if areas
    ]
    hints = [FIXES[area] for area in wrong] if wrong else [do(Action.RETRY)] if unseen else []
    return NodesReply(
        ok=not wrong and not unseen,
        code="failed" if wrong else "unknown" if unseen else "ok",
        message=f"{'. '.join(parts) or 'Every check is in order'}.",
        next=steps(hints),
        nodes=[named(name, 255) for name in done.facts.names],
        checks={str(area): str(answer) for area, answer in answers.items()},
        details=[
            NodeFindingReply(
                check=p.area,
                answer=p.answer,
                code=p.code,
                node=named(p.node, 255) if p.node else "",
                message=text_of(p),
            )
            for p in found
        ],
        environment=dict(done.verdict.environment),  # of plain names only, to be used as it is
        meeting_place=done.verdict.meeting_place,
        new_host_keys=done.new_keys,
    )
