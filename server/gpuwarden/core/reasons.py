"""Represent the reasons for the state of a job or an instance as values. The program compares codes, never sentences.

A code records an observation or a decision by gpuwarden. Text that a job may have written never becomes a code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from gpuwarden.core.guidance import Scalar


class Code(StrEnum):
    """The reason for a state.

    The runner on the machine writes the codes in the first group to its status file. A job can write to the same
    file, so these codes only explain why a job ended; no decision depends on them.
    """

    EXITED = "exited"
    KILLED_BY_SIGNAL = "killed_by_signal"
    NOT_STARTED = "not_started"
    TIME_LIMIT = "time_limit"
    STOPPED = "stopped"
    TERMINATED = "terminated"
    RESTARTS_USED = "restarts_used"

    ALIVE = "alive"
    SILENT_SUPERVISOR = "silent_supervisor"
    UNWATCHED = "unwatched"
    LIVENESS_UNKNOWN = "liveness_unknown"
    ENDING = "ending"
    VANISHED = "vanished"
    OUT_OF_MEMORY = "out_of_memory"
    NO_RUN_FOLDER = "no_run_folder"
    NO_STATUS = "no_status"
    BAD_STATUS = "bad_status"
    UNKNOWN_STATE = "unknown_state"
    NO_ANSWER = "no_answer"
    PLATFORM_REPORT = "platform_report"
    ENGINE_QUEUE = "engine_queue"
    ENGINE_STARTS = "engine_starts"
    ENGINE_TOOK = "engine_took"
    ENGINE_DROPPED = "engine_dropped"
    ENGINE_DISAGREES = "engine_disagrees"
    UNLISTED = "unlisted"

    RELAUNCH = "relaunch"
    CANCELED = "canceled"
    CANCELED_EARLY = "canceled_early"
    COST_CAP = "cost_cap"
    COST_CAP_EARLY = "cost_cap_early"
    REFUSED_HOST = "refused_host"
    REFUSED_LAUNCH = "refused_launch"
    REFUSED_RENT = "refused_rent"
    FORBIDDEN = "forbidden"
    REFUSAL_UNSETTLED = "refusal_unsettled"
    UNFIT_HOST = "unfit_host"
    NO_INSTANCE_RENTED = "no_instance_rented"
    GIVEN_BACK = "given_back"
    GONE_EARLY = "gone_early"
    GONE = "gone"
    INTERRUPTED_EARLY = "interrupted_early"
    INTERRUPTED = "interrupted"
    RESTARTED = "restarted"
    INTERRUPTION_UNSEEN = "interruption_unseen"
    NOT_INTERRUPTED = "not_interrupted"
    TAKEN_FOR_GOOD = "taken_for_good"
    MAX_RESTARTS = "max_restarts"
    FOLDER_UNEXPLAINED = "folder_unexplained"
    FOLDER_REMOVED = "folder_removed"
    FOLDER_LATE = "folder_late"
    CAME_BACK_EMPTY = "came_back_empty"
    SELF_STOPPED = "self_stopped"
    PAUSED = "paused"
    PAUSED_INTERRUPTED = "paused_interrupted"
    RESUMED = "resumed"
    ENDED_PAUSED = "ended_paused"
    ANOTHER_MACHINE = "another_machine"
    NOT_RELAUNCHED = "not_relaunched"

    STORE_UNREACHABLE = "store_unreachable"
    STORE_DENIED = "store_denied"
    STORE_NO_CLIENT = "store_no_client"
    STORE_INVALID = "store_invalid"
    STORE_EMPTY = "store_empty"
    STORE_INCOMPLETE = "store_incomplete"
    STORE_STALE = "store_stale"
    STORE_CHANGED = "store_changed"
    STORE_UNCHECKED = "store_unchecked"
    STORE_MACHINE_SILENT = "store_machine_silent"
    STORE_UNSIGNED = "store_unsigned"
    STORE_NO_END = "store_no_end"
    STORE_OTHER_OUTPUTS = "store_other_outputs"
    STORE_STARTED_SINCE = "store_started_since"
    STORE_NO_LAST_LOOK = "store_no_last_look"


_TEXTS: Final[dict[Code, str]] = {
    Code.EXITED: "the command ended",
    Code.KILLED_BY_SIGNAL: "a signal ended the command",
    Code.NOT_STARTED: "the command could not be started",
    Code.TIME_LIMIT: "the time limit was reached",
    Code.STOPPED: "stopped on request",
    Code.TERMINATED: "an external signal ended it",
    Code.RESTARTS_USED: "it requested a restart, but no restarts are left",
    Code.OUT_OF_MEMORY: "the kernel killed the command because it ran out of memory",
    Code.ALIVE: "alive",
    Code.SILENT_SUPERVISOR: "its supervisor is alive but has not written anything for {seconds} s",
    Code.UNWATCHED: "its supervisor died, but the job's own process is still running; cancel the job or let it end",
    Code.LIVENESS_UNKNOWN: "its last status is running, but this machine can't check whether the process is alive",
    Code.ENDING: "its status is {state}, but its supervisor is still running",
    Code.VANISHED: "its process is gone and did not leave a final status (it was killed, or the machine restarted)",
    Code.NO_RUN_FOLDER: "the machine has no run folder for the job",
    Code.NO_STATUS: "the run folder has no status, so the job was never launched there",
    Code.BAD_STATUS: "invalid runner status: {problem}",
    Code.UNKNOWN_STATE: "the runner reports the state {state}",
    Code.NO_ANSWER: "the machine does not answer",
    Code.ENGINE_QUEUE: "it is waiting in the engine's queue (reason: {why})",
    Code.ENGINE_STARTS: "the engine is running it, but its runner has not reported yet",
    Code.ENGINE_TOOK: "the engine revoked its allocation ({state})",
    Code.ENGINE_DROPPED: "the engine dropped the job from its queue before it started",
    Code.UNLISTED: "the engine does not list the job, but the job's runner is still writing its status",
    Code.ENGINE_DISAGREES: "the engine reports {state}, but the job's runner has not recorded an end",
    Code.RELAUNCH: "relaunch",
    Code.CANCELED: "canceled on request",
    Code.CANCELED_EARLY: "canceled before it was launched",
    Code.COST_CAP: "stopped at its cost cap of {cap}",
    Code.COST_CAP_EARLY: "its cost cap of {cap} was reached before the launch",
    Code.REFUSED_HOST: "{message}",
    Code.REFUSED_LAUNCH: "the job could not be launched: {message}",
    Code.REFUSED_RENT: "the platform refused to rent a machine: {message}",
    Code.FORBIDDEN: "the policy no longer allows {platform}, so no machine was rented",
    Code.REFUSAL_UNSETTLED: "the platform refused to rent a machine: {message}. A second check will determine whether "
    "it rented one anyway",
    Code.UNFIT_HOST: "the machine is not suitable for the job: {message}. It is still rented and billed.",
    Code.NO_INSTANCE_RENTED: "no machine could be rented in {tries} attempts",
    Code.GIVEN_BACK: "the instance was released because {cause}; cost so far: {cost}",
    Code.GONE_EARLY: "the instance was gone before the launch",
    Code.GONE: "the instance is gone, and so is the job",
    Code.INTERRUPTED_EARLY: "the platform reclaimed the machine before the launch",
    Code.INTERRUPTED: "the platform reclaimed the machine during the run",
    Code.RESTARTED: "the machine was restarted during the run",
    Code.INTERRUPTION_UNSEEN: "the job's process is gone; it is not yet known whether the machine is being reclaimed",
    Code.NOT_INTERRUPTED: "a signal ended the job, and the machine was not reclaimed",
    Code.TAKEN_FOR_GOOD: "the provider permanently reclaimed the machine, and its files are lost",
    Code.MAX_RESTARTS: "this was interruption number {times}; the job's restart limit is {limit}",
    Code.FOLDER_UNEXPLAINED: "the machine has no run folder for the job. It is unknown whether the process is alive",
    Code.FOLDER_REMOVED: "the machine has not restarted, but the job's run folder was removed from it. "
    "It is unknown whether the job's process is alive",
    Code.FOLDER_LATE: "the machine restarted and has no run folder yet; the next check shows whether the job is lost",
    Code.CAME_BACK_EMPTY: "the machine restarted, and two checks found no run folder for the job: "
    "the job's process is dead, and files that were only on the machine are lost",
    Code.PAUSED: "its process received a signal to save and has ended; it starts again only if you resume the job",
    Code.PAUSED_INTERRUPTED: "its process was interrupted before it could be paused; it starts again only if you "
    "resume the job",
    Code.RESUMED: "resumed on request",
    Code.ENDED_PAUSED: "its machine was stopped or terminated while the job was paused",
    Code.ANOTHER_MACHINE: "its machine was permanently reclaimed; the job resumes from its proven copy on "
    "another machine",
    Code.NOT_RELAUNCHED: "the machine was permanently reclaimed, and no replacement is rented: {cause}",
    Code.SELF_STOPPED: "its machine is stopped, presumably because it stopped itself; the job's outcome will be known "
    "when the machine is started again",
    Code.STORE_UNREACHABLE: "the artifact store can't be reached from here: {message}",
    Code.STORE_DENIED: "the artifact store denies read access to this process: {message}",
    Code.STORE_NO_CLIENT: "the artifact store can't be read here: {message}",
    Code.STORE_INVALID: "the artifact store's manifest can't be read: {message}",
    Code.STORE_EMPTY: "the artifact store has no manifest for this job yet: no upload has completed",
    Code.STORE_INCOMPLETE: "{count} of the declared files are not in the artifact store yet, such as {path}",
    Code.STORE_STALE: "{count} of the declared files changed after they were uploaded, such as {path}",
    Code.STORE_CHANGED: "{count} objects in the artifact store differ from the machine's files, such as {path}",
    Code.STORE_UNCHECKED: "{count} objects in the artifact store have no checksum to compare, such as {path}",
    Code.STORE_MACHINE_SILENT: "the machine did not return its files' digests, so the artifact store could not "
    "be checked: {message}",
    Code.STORE_UNSIGNED: "the artifact store's manifest is not signed by the job's own runner",
    Code.STORE_NO_END: "the artifact store's manifest was written before the job's last attempt and its upload ended",
    Code.STORE_OTHER_OUTPUTS: "the artifact store's manifest does not cover {path}, which was declared later",
    Code.STORE_STARTED_SINCE: "the machine was started again after the artifact store's manifest was written",
    Code.STORE_NO_LAST_LOOK: "the artifact store's manifest was not updated right before the machine stopped itself",
}


@dataclass(frozen=True)
class Reason:
    """A code with the parameters for its sentence. `message` is untrusted text from a runner or a platform."""

    code: Code
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    message: str = ""

    @property
    def text(self) -> str:
        """Return one sentence. It may contain untrusted text, so the caller must limit its length."""
        return self.message or _TEXTS.get(self.code, str(self.code)).format(**self.parameters)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form for events."""
        return {"code": str(self.code), "parameters": dict(self.parameters)}


def because(code: Code, message: str = "", /, **parameters: Scalar) -> Reason:
    """Return the reason for a code and its parameters."""
    return Reason(code, parameters, message)


def known_code(value: object, among: Iterable[Code] = Code) -> Code | None:
    """Return the code with this value; None if this version does not know it."""
    current = "self_stopped" if value == "parked" else value  # its name in older ledgers
    return next((code for code in among if code == current), None)
