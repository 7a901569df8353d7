"""Reply to `gpuwarden nodes check`: the result of each check, with its problems as sentences."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from gpuwarden.core.guidance import Action, do, steps
from gpuwarden.core.models import Frozen
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import named, quoted
from gpuwarden.interfaces.results.base import Result
from gpuwarden.lifecycle.nodes import NodeCheckResult
from gpuwarden.remote.host.node_codes import Answer, Area, NodeCode, Problem

TEXTS: Final[dict[NodeCode, str]] = {
    NodeCode.SILENT: "it does not answer",
    NodeCode.SAME_NODE: "it is the same machine as {other}",
    NodeCode.IDENTITY_UNSEEN: "it can't be determined whether this is a different machine from the others",
    NodeCode.FABRIC_DOWN: "it has NVSwitches, and its fabric manager is {state}: every rank of the group would hang",
    NodeCode.FABRIC_VERSION: "its fabric manager has version {version}, but its driver has {driver}; the versions must "
    "be equal",
    NodeCode.FABRIC_STATE: "a GPU reports its NVLink fabric as {state}",
    NodeCode.FABRIC_UNSEEN: "it can't be determined whether its fabric manager has the same version as the driver",
    NodeCode.NO_FABRIC: "it has no NVSwitch, so no fabric manager is needed",
    NodeCode.INTERFACES_UNSEEN: "its network interfaces can't be read",
    NodeCode.NO_INTERFACE: "it has no network interface that is up, has an address and reaches other machines",
    NodeCode.INTERFACE_OPEN: "ranks may connect over several interfaces ({names}) and no setting selects one",
    NodeCode.INTERFACE_WRONG: "{variable} selects {taken}, but the route to the other nodes goes through {best}",
    NodeCode.VARIABLE_DIFFERS: "{variable} differs from its value on the first node",
    NodeCode.NOT_REACHED: "it can't connect to {target} ({error})",
    NodeCode.PORT_IN_USE: "port {port} is in use: another job may be running there",
    NodeCode.NOT_LISTENING: "it can't listen for connections from the others ({why})",
    NodeCode.OTHER_ADDRESS: "{target} sees a source address that this node does not have, so ranks can't connect back",
    NodeCode.WAY_UNSEEN: "its route to {target} could not be checked",
    NodeCode.PACKETS_LOST: "packets of {mtu} bytes to {target} are silently dropped, but packets of {passes} bytes "
    "arrive: large collectives would hang",
    NodeCode.PACKETS_CUT: "the route to {target} limits packets to {limit} bytes, but the node's interface sends up to "
    "{mtu} bytes; routers report this, and TCP adapts",
    NodeCode.MTU_DIFFERS: "the interfaces have different packet sizes: {sizes}",
    NodeCode.MTU_UNSEEN: "the packet sizes that reach {target} could not be checked",
    NodeCode.CLOCK_OFF: "its clock differs from the clock on {head} by {seconds:+} s (± {unsure} s)",
    NodeCode.CLOCK_UNSEEN: "its clock could not be compared precisely enough",
    NodeCode.NO_TORCH: "the PyTorch version that a job on it would use is unknown",
    NodeCode.TORCH_DIFFERS: "it has PyTorch {version}, and {other} has {others}",
    NodeCode.NCCL_DIFFERS: "it has NCCL {version}, and {other} has {others}",
    NodeCode.DRIVER_DIFFERS: "it has driver {version}, and {other} has {others}",
    NodeCode.NCCL_UNSEEN: "the NCCL version that a job on it would use is unknown",
    NodeCode.TIMEOUT_MASKS: "collectives wait {minutes:.0f} minutes for a dead rank, which hides the cause",
    NodeCode.TIMEOUT_UNSEEN: "the time that collectives wait for a dead rank is unknown",
    NodeCode.ERRORS_IGNORED: "with {variable}=0, the other ranks keep running after one of them dies",
    NodeCode.NOT_RESTORED: "its workers are restarted up to {restarts} times, but its script loads no saved state: "
    "each restart begins at step 0",
    NodeCode.RESTORE_UNSEEN: "its workers are restarted up to {restarts} times; it is unknown whether they load their "
    "saved state",
    NodeCode.ELASTIC_PAUSE: "with fewer than {fewest} workers the job pauses silently for {seconds} s, then fails",
    NodeCode.ELASTIC_TIGHT: "the job needs all {fewest} workers, so the loss of one pauses it for {seconds} s",
    NodeCode.RANK_DEAD: "its rank exited before it connected to the others (exit code {code})",
    NodeCode.RANKS_WAITED: "its rank reached {stage} and then waited for the others",
    NodeCode.WRONG_SUM: "the all-reduce returned a wrong sum",
    NodeCode.SLOW: "the all-reduce reached {mbit:,} Mbit/s, but the slowest link allows {expected:,}",
    NodeCode.MEASURED: "a {backend} all-reduce over all nodes took {milliseconds} ms ({mbit:,} Mbit/s)",
    NodeCode.NOT_TRIED: "no all-reduce was run",
    NodeCode.LINK_UNKNOWN: "the expected network speed is unknown: an interface does not report its speed",
}
FIXES: Final[dict[Area, str]] = {
    Area.IDENTITY: "List each machine once, under a name that resolves only to that machine.",
    Area.FABRIC: "Run the version of nvidia-fabricmanager that matches the driver, or replace the machine.",
    Area.INTERFACE: "Set the proposed variables for every rank.",
    Area.RENDEZVOUS: "Open all ports between the nodes, or choose another port.",
    Area.MTU: "Set the same packet size on every interface along the route.",
    Area.CLOCK: "Start time synchronization, such as chrony, on these nodes.",
    Area.VERSIONS: "Install the same versions on every node, from one lock file.",
    Area.TIMEOUTS: "Set a timeout of a few minutes, and keep asynchronous error handling enabled.",
    Area.RESTART: "Load the last complete checkpoint at every start, and test this by killing a worker.",
    Area.REDUCE: "Repeat the check with NCCL_DEBUG=INFO, and examine the rank that ended first.",
}


class NodeFindingReply(Frozen):
    """One finding. `node` is empty if the finding concerns the launch or the whole group."""

    check: str
    answer: str
    code: str
    node: str = ""
    message: str = ""


class NodesReply(Result):
    """The result of each check: yes, no or unknown. `environment` has the variables proposed for every rank."""

    nodes: list[str]
    checks: dict[str, str]
    details: list[NodeFindingReply] = Field(default_factory=list)
    environment: dict[str, str] = Field(default_factory=dict)
    meeting_place: str = ""
    new_host_keys: dict[str, str] = Field(default_factory=dict)


def text_of(problem: Problem) -> str:
    """Return a problem as a sentence. Text from a node is quoted."""
    given = {k: named(v, 120) if isinstance(v, str) else v for k, v in problem.parameters.items()}
    message = f": {quoted(problem.message, 300)}" if problem.message else ""
    return TEXTS[problem.code].format(**given) + message


def nodes_reply(done: NodeCheckResult) -> NodesReply:
    """Return the reply to a check of several nodes. `ok` is true only if the result of every check is yes."""
    found, answers = done.verdict.problems, done.verdict.answers
    wrong = [area for area, answer in answers.items() if answer is Answer.NO]
    unseen = [area for area, answer in answers.items() if answer is Answer.UNKNOWN]
    parts = [
        f"{counted(len(areas), 'check')} {what}: {', '.join(areas)}"
        for areas, what in ((wrong, "failed"), (unseen, "inconclusive"))
        if areas
    ]
    hints = [FIXES[area] for area in wrong] if wrong else [do(Action.RETRY)] if unseen else []
    return NodesReply(
        ok=not wrong and not unseen,
        code="failed" if wrong else "unknown" if unseen else "ok",
        message=f"{'. '.join(parts) or 'All checks passed'}.",
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
        environment=dict(done.verdict.environment),  # plain names only, safe to use unquoted
        meeting_place=done.verdict.meeting_place,
        new_host_keys=done.new_keys,
    )
