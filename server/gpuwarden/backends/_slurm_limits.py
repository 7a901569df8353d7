"""Read a cluster's limits from `scontrol show config`, `scontrol show partition`, `sinfo` and Slurm's accounting.

The output format of these commands has not changed for many versions. Missing values are treated as unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from gpuwarden.backends._slurm_policy import QOS_COLUMNS, Table, ceilings, own_accounts, read_table, seconds
from gpuwarden.core.engine import UNLIMITED, Ceiling, EngineLimits, EngineRequest, Queue
from gpuwarden.core.errors import BadReply, NotSupported, Unreachable
from gpuwarden.core.sanitize import line

OLDEST: Final = (21, 8)
"""The first version whose `squeue` supports JSON."""
REQUEUE_S: Final = 120.0
"""Munge credentials expire after two minutes by default. A requeued job can't start before they expire."""
SHORTEST_S: Final = 5.0
"""Slurm ignores a shorter credential lifetime and uses its default."""
_PREEMPTS: Final[dict[str, Literal["no", "requeue", "cancel", "suspend"]]] = {
    "OFF": "no",
    "REQUEUE": "requeue",
    "CANCEL": "cancel",
    "SUSPEND": "suspend",
}


def read_limits(found: Mapping[str, Any], request: EngineRequest) -> EngineLimits:
    """Parse the limits in the Slurm agent's reply.

    Raises a `WardenError` if the reply is missing or invalid, or if Slurm is too old.
    """
    pairs = (row.partition("=") for row in _text(found, "config").splitlines())
    config = {name.strip(): value.strip() for name, equals, value in pairs if equals}
    version = config.get("SLURM_VERSION", "")
    parts = re.match(r"(\d{1,4})\.(\d{1,4})\b", version)
    if parts is None:
        raise BadReply("Slurm's configuration has no version", "Check that these commands belong to Slurm.")
    if (int(parts[1]), int(parts[2])) < OLDEST:
        raise NotSupported(
            f"Slurm {line(version, 40)} is too old: gpuwarden needs 21.08 or newer",
            "Ask the cluster's administrator for an update.",
        )
    queues = _queues(_text(found, "partitions"), config, _nodes(_optional(found, "nodes")))
    policy = _policy(found, config, request, queues)
    check = found.get("check")
    refused = isinstance(check, Mapping) and isinstance(check.get("rc"), int) and check["rc"] != 0
    refusal = line(check.get("err") or "it gave no reason", 300) if refused and isinstance(check, Mapping) else ""
    return EngineLimits(
        engine="slurm",
        version=line(version, 40),
        request=request,
        queues=queues,
        accounts=policy.accounts,
        qos=policy.qos,
        ceilings=policy.ceilings,
        max_array=_leading_number(config.get("MaxArraySize")),
        requeue_s=requeue_delay(config.get("AuthInfo", "")),
        refusal="" if policy.explains(refusal, request) else refusal,
        unread=policy.unread,
    )


@dataclass(frozen=True)
class _Policy:
    """The accounting limits that apply to a job. On a cluster without accounting, all of them are unknown."""

    accounts: tuple[str, ...] | None = None
    qos: tuple[str, ...] | None = None
    ceilings: tuple[Ceiling, ...] = ()
    unread: str = ""

    def explains(self, refusal: str, request: EngineRequest) -> bool:
        """Return whether the known accounts, QOS or limits explain Slurm's refusal.

        If they do, they are reported instead of the refusal, whose text contains no numbers.
        """
        return any(
            text in refusal and known
            for text, known in (
                ("violates accounting/QOS policy", any(limit.exceeded(request) for limit in self.ceilings)),
                (
                    "Invalid account",
                    request.account and self.accounts is not None and request.account not in self.accounts,
                ),
                ("Invalid account", self.accounts == ()),
                ("Invalid qos", request.qos and self.qos and request.qos not in self.qos),
            )
        )


def _policy(
    found: Mapping[str, Any], config: Mapping[str, str], request: EngineRequest, queues: Sequence[Queue]
) -> _Policy:
    """Read the accounts, QOS and limits for a job. `unread` names enforced limits that the cluster did not report."""
    if not config.get("AccountingStorageType", "").endswith("slurmdbd"):
        return _Policy()
    enforced = set(re.findall(r"\w+", config.get("AccountingStorageEnforce", "none"))) - {"none", "null"}
    rows = _rows(_optional(found, "associations"), 5)
    known = _rows(_optional(found, "qos"), len(QOS_COLUMNS))
    table = read_table(_optional(found, "usage") or "", str(found.get("user")), str(found.get("uid")))
    silent = [part for part, answer in (("associations", rows), ("qos", known), ("usage", table)) if answer is None]
    mine = None if rows is None else [row for row in rows if row[0] == config.get("ClusterName", row[0])]
    policy = _Policy(
        accounts=_column(mine, 1) if mine is not None else own_accounts(table) if table else None,
        qos=_column(mine, 3),
        unread=_gap(found, silent) if silent and enforced else "",
    )
    if table is None or not enforced & {"limits", "safe"}:
        return policy
    queue = next((q for q in queues if (q.name == request.queue if request.queue else q.default)), None)
    layers = [name for name in (queue.own_qos if queue else "", _default_qos(mine, request, table)) if name]
    limits = {row[0]: dict(zip(QOS_COLUMNS, row, strict=True)) for row in known or ()}
    given = [(name, limits.get(name, {})) for name in layers]
    return replace(policy, ceilings=ceilings(table, request, queue.name if queue else "", given))


def _default_qos(mine: Sequence[Sequence[str]] | None, request: EngineRequest, table: Table) -> str:
    """Return a job's QOS: the requested QOS, or its association's default; "" if unknown."""
    if request.qos:
        return request.qos
    account = request.account or next((a.account for a in table.associations if a.user and a.default), "")
    rows = [row for row in mine or () if row[1] == account]
    row = next((row for row in rows if row[2] == request.queue), next((row for row in rows if not row[2]), None))
    if row is None:
        return ""
    return row[4] or (row[3] if "," not in row[3] else "")


def _gap(found: Mapping[str, Any], silent: Sequence[str]) -> str:
    """Return a description of the accounting queries that failed, with Slurm's error."""
    answers = (found.get(part) for part in silent)
    errors = (answer.get("err") for answer in answers if isinstance(answer, Mapping))
    what = {"associations": "accounts", "qos": "QOS", "usage": "limits"}
    message = next((str(error) for error in errors if error), "its reply can't be parsed")
    return f"the {' and '.join(what[part] for part in silent)} in Slurm's accounting: {line(message, 300)}"


def _rows(text: str | None, columns: int) -> list[list[str]] | None:
    """Return the rows that `sacctmgr` printed, or None if its output is missing or has an unknown format."""
    rows = [row.split("|") for row in text.splitlines() if row.strip()] if text is not None else None
    return rows if rows is not None and all(len(row) == columns for row in rows) else None


def _text(found: Mapping[str, Any], part: str) -> str:
    """Return the output of a required command. Raises BadReply or Unreachable if it is missing."""
    done = found.get(part)
    if not isinstance(done, Mapping) or not isinstance(done.get("out"), str):
        raise BadReply(f"the reply about Slurm's {part} can't be parsed", "Try again.")
    if done.get("rc") != 0:
        raise Unreachable(f"Slurm does not answer: {line(done.get('err') or 'no reason given', 300)}", "Try again.")
    return str(done["out"])


def _optional(found: Mapping[str, Any], part: str) -> str | None:
    """Return the output of an optional command, or None if the command failed."""
    done = found.get(part)
    answered = isinstance(done, Mapping) and done.get("rc") == 0 and isinstance(done.get("out"), str)
    return str(done["out"]) if answered and isinstance(done, Mapping) else None


def _queues(text: str, config: Mapping[str, str], machines: Mapping[str, Mapping[str, Any]]) -> tuple[Queue, ...]:
    rows = [dict(pair.split("=", 1) for pair in row.split() if "=" in pair) for row in text.splitlines() if row.strip()]
    if not rows or any("PartitionName" not in row for row in rows):
        raise BadReply("Slurm's list of partitions has an unknown format", "The list was ignored; try again.")
    preemption = config.get("PreemptType", "preempt/none").rpartition("/")[2]
    return tuple(_queue(row, config, preemption, machines.get(row["PartitionName"], {})) for row in rows)


def _queue(row: Mapping[str, str], config: Mapping[str, str], preemption: str, machines: Mapping[str, Any]) -> Queue:
    mode = row.get("PreemptMode", config.get("PreemptMode", "")).split(",")[-1].upper()
    preempts = "no" if preemption == "none" else _PREEMPTS.get(mode)
    return Queue(
        name=line(row["PartitionName"], 80),
        default=row.get("Default") == "YES",
        open={"UP": True, "DOWN": False, "DRAIN": False, "INACTIVE": False}.get(row.get("State", "")),
        state=line(row.get("State", ""), 40),
        max_s=seconds(row.get("MaxTime")),
        default_s=seconds(row.get("DefaultTime")),
        max_nodes=_leading_number(row.get("MaxNodes")),
        nodes=_leading_number(row.get("TotalNodes")),
        cpus=machines.get("cpus"),
        memory_mb=machines.get("memory_mb"),
        gpus=machines.get("gpus"),
        preempts=preempts,
        grace_s=_leading_number(row.get("GraceTime")),
        accounts=_admitted(row.get("AllowAccounts")),
        qos=_admitted(row.get("AllowQos")),
        own_qos=line("" if row.get("QoS") in (None, "N/A", "(null)") else row["QoS"], 80),
    )


def _nodes(text: str | None) -> dict[str, dict[str, Any]]:
    """Return, for each partition, the maximum resources of one machine."""
    found: dict[str, dict[str, Any]] = {}
    for row in (text or "").splitlines():
        fields = row.split("|")
        if len(fields) != 6:
            return {}
        most = found.setdefault(fields[0].rstrip("*"), {"cpus": None, "memory_mb": None, "gpus": {}})
        for name, text_value in (("cpus", fields[2]), ("memory_mb", fields[3])):
            value = _leading_number(text_value.rstrip("+"))
            most[name] = max(most[name] or 0, value) if value else most[name]
        for kind, count in gpus_of(fields[1]):
            most["gpus"][kind] = max(most["gpus"].get(kind, 0), count)
    return found


def gpus_of(gres: str) -> Iterator[tuple[str, int]]:
    """Yield the type and number of the GPUs in a GRES such as `gpu:a100:4(S:0-1),shard:8`; the type can be ""."""
    for found in re.finditer(r"(?:^|,)gpu:(?:([^:,()]+):)?(\d{1,9})\b", gres):
        yield line(found[1] or "", 40).lower(), int(found[2])


def _column(rows: Sequence[Sequence[str]] | None, column: int) -> tuple[str, ...] | None:
    """Return the distinct values of one column, whose cells may be lists, or None if `rows` is None."""
    if rows is None:
        return None
    values = (value for row in rows for value in row[column].split(","))
    return tuple(dict.fromkeys(line(value, 80) for value in values if value))


def _admitted(text: str | None) -> tuple[str, ...] | None:
    return None if text in (None, "ALL", "N/A", "(null)") else tuple(line(name, 80) for name in (text or "").split(","))


def _leading_number(text: str | None) -> int | None:
    """Parse the number at the start of a string.

    Return None if the string has no number there, and `UNLIMITED` for the word UNLIMITED.
    """
    if text in ("UNLIMITED", "INFINITE"):
        return UNLIMITED
    found = re.match(r"\d{1,15}\b", text or "")
    return int(found[0]) if found else None


def requeue_delay(auth: str) -> float:
    """Return the number of seconds until a requeued job can start, which is when its old credential expires."""
    found = re.search(r"\bcred_expire=(\d{1,6})\b", auth)
    expires = float(found[1]) if found else REQUEUE_S
    return (expires if expires >= SHORTEST_S else REQUEUE_S) + 1
