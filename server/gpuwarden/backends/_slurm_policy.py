"""Read the limits in Slurm's accounting: `sacctmgr show qos` and `scontrol -o show assoc_mgr`.

The controller's table lists the associations of the user and of the user's accounts up to the root, and the usage of
each limit. It omits a user's limits under a QOS until the user has a job in that QOS, so these limits are read from the
database.

A QOS limit replaces the association limit with the same name, and the queue's QOS takes precedence over the job's. The
group limits of every account above the user's also apply.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gpuwarden.core.engine import UNLIMITED, Ceiling, EngineRequest
from gpuwarden.core.sanitize import line

QOS_COLUMNS: Final = (
    "Name", "MaxWall", "MaxTRES", "MaxTRESPN", "MaxTRESPU", "MaxTRESPA", "MaxJobsPU", "MaxJobsPA", "MaxSubmitJobsPU",
    "MaxSubmitJobsPA", "GrpJobs", "GrpSubmitJobs", "GrpTRES", "GrpTRESMins", "MaxTRESMins", "GrpWall",
)  # fmt: skip
"""The fields that the agent requests from `sacctmgr show qos`, by their names in `scontrol`."""
_Kind = Literal["submitted", "running", "walltime", "job", "machine", "minutes", "job_minutes"]
_KINDS: Final[dict[str, _Kind]] = {
    "MaxWall": "walltime", "MaxTRES": "job", "MaxTRESPN": "machine", "MaxTRESPU": "job", "MaxTRESPA": "job",
    "MaxJobsPU": "running", "MaxJobsPA": "running", "MaxSubmitJobsPU": "submitted", "MaxSubmitJobsPA": "submitted",
    "GrpJobs": "running", "GrpSubmitJobs": "submitted", "GrpTRES": "job", "GrpTRESMins": "minutes",
    "MaxTRESMins": "job_minutes", "GrpWall": "minutes",
}  # fmt: skip
_SAME: Final = {
    "MaxWallPJ": "MaxWall", "MaxTRESPJ": "MaxTRES", "MaxTRESMinsPJ": "MaxTRESMins", "MaxJobs": "MaxJobsPU",
    "MaxSubmitJobs": "MaxSubmitJobsPU",
}  # fmt: skip
"""The names of an association's limits, mapped to the QOS limits that replace them."""
_UNITS: Final = {"": 1, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}
_FIELD: Final = re.compile(r"([A-Za-z/]+)=(\S*)")
_BLOCK: Final = re.compile(r"(\S+?)=\{([^}]*)\}")
_NUMBER: Final = re.compile(r"(\d{1,15})(?:\.\d+)?([KMGTP]?)[A-Z]?(?:\((\d{1,15})(?:\.\d+)?\))?")


@dataclass(frozen=True)
class Association:
    """One row of the controller's table. `user` is "" in an account's row; `parent` is the account above it."""

    account: str
    user: str
    partition: str
    parent: str
    default: bool
    fields: Mapping[str, str]


@dataclass(frozen=True)
class Table:
    """The controller's table: its associations, and the fields of each QOS, including this user's usage."""

    associations: tuple[Association, ...]
    qos: Mapping[str, Mapping[str, str]]


def read_table(text: str, user: str, uid: str) -> Table | None:
    """Parse the output of `scontrol -o show assoc_mgr`; None if the format is unknown."""
    if "Association Records" not in text:
        return None
    associations, qos = [], dict[str, Mapping[str, str]]()
    for row in text.splitlines():
        if row.startswith("ClusterName="):
            fields = dict(_FIELD.findall(row))
            who = fields.get("UserName", "").partition("(")[0]
            if who in ("", user):
                parent = fields.get("ParentAccount", "").partition("(")[0]
                associations.append(
                    Association(
                        fields.get("Account", ""), who, fields.get("Partition", ""), parent,
                        fields.get("DefAssoc") == "Yes", fields,
                    )
                )  # fmt: skip
        elif row.startswith("QOS="):
            whole, _, rest = row.partition("Account Limits=")
            accounts, users = (dict(_BLOCK.findall(part)) for part in rest.partition("User Limits=")[::2])
            own = next((text for who, text in users.items() if who in (uid, f"{user}({uid})")), "")
            fields = dict(_FIELD.findall(f"{whole} {own}"))
            fields |= {f"{name}@{who}": value for who, text in accounts.items() for name, value in _FIELD.findall(text)}
            qos[fields.get("QOS", "").partition("(")[0]] = fields
    return Table(tuple(associations), qos)


def own_accounts(table: Table) -> tuple[str, ...]:
    """Return the accounts with which the user has an association."""
    return tuple(dict.fromkeys(line(a.account, 80) for a in table.associations if a.user))


def ceilings(
    table: Table, request: EngineRequest, queue: str, layers: Sequence[tuple[str, Mapping[str, str]]]
) -> tuple[Ceiling, ...]:
    """Return the limits that apply to a job in `queue`.

    `layers` contains the queue's QOS and the job's QOS: for each, its name and its limits from the database.
    """
    chain = _chain(table, request.account, queue)
    account = chain[0].account if chain else request.account
    found: dict[tuple[str, str], list[Ceiling]] = {}
    for name, limits in layers:
        used = table.qos.get(name, {})
        counted = {field: used.get(f"{field}@{account}" if field.endswith("PA") else field, "") for field in limits}
        for key, ceiling in _of(f"the QOS {line(name, 80)}", limits, counted):
            found.setdefault(key, [ceiling])
    settled = set(found)
    for association in chain:
        owner = f"{'your account' if association.user else 'the account'} {line(association.account, 80)}"
        fields = {_SAME.get(name, name): value for name, value in association.fields.items()}
        if not association.user:
            fields = {name: value for name, value in fields.items() if name.startswith("Grp")}
        for key, ceiling in _of(owner, fields, fields):
            if key not in settled:
                found.setdefault(key, []).append(ceiling)
    return tuple(ceiling for row in found.values() for ceiling in row)


def _chain(table: Table, account: str, queue: str) -> list[Association]:
    """Return the user's association with `account`, or the default one if `account` is empty, and those of the accounts
    above.
    """
    mine = [a for a in table.associations if a.user and (a.account == account if account else a.default)]
    own = next((a for a in mine if a.partition == queue), next((a for a in mine if not a.partition), None))
    if own is None:
        return []
    above = {a.account: a for a in table.associations if not a.user and not a.partition}
    chain, name = [own], own.account
    while name in above and above[name] not in chain:
        chain.append(above[name])
        name = above[name].parent
    return chain


def _of(owner: str, limits: Mapping[str, str], used: Mapping[str, str]) -> Iterator[tuple[tuple[str, str], Ceiling]]:
    """Yield the limits of one owner, each with its name and resource."""
    for name, kind in _KINDS.items():
        text = limits.get(name, "")
        counts = re.search(r"\((\d{1,15})(?:\.\d+)?\)$", used.get(name, ""))  # the 2 in `5(2)`, `N(2)` or `60(2.50)`
        counted = int(counts[1]) if counts else 0
        if kind == "walltime":
            most = seconds(text)
            if most is not None and most < UNLIMITED:
                yield (name, ""), Ceiling(owner=owner, kind=kind, most=most)
        elif name == "GrpWall":  # a time in the database, but minutes in the controller's table
            most = seconds(text.partition("(")[0])
            if most is not None and most < UNLIMITED:
                yield (name, ""), Ceiling(owner=owner, kind=kind, most=most // 60, used=counted, resource="wall")
        elif "TRES" in name:
            there = dict(_resources(used.get(name, "")))
            for resource, (most, _) in _resources(text):
                spent = there.get(resource, (0, 0))[1] if kind == "minutes" else 0
                yield (
                    (name, resource),
                    Ceiling(owner=owner, kind=kind, most=most, used=spent, resource=line(resource, 60)),
                )
        elif (number := _number(text)) is not None:
            yield (name, ""), Ceiling(owner=owner, kind=kind, most=number[0], used=counted)


def _resources(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the limits in a string such as `cpu=6(2),mem=4G,gres/gpu:a100=N(0)`, in which N means no limit."""
    for part in text.split(","):
        resource, _, value = part.partition("=")
        number = _number(value)
        if number is not None:
            yield resource, number


def _number(text: str) -> tuple[int, int] | None:
    """Parse a limit and its usage from a string such as `5(2)`; None if there is no limit."""
    found = _NUMBER.fullmatch(text)
    return (int(int(found[1]) * _UNITS[found[2]]), int(found[3] or 0)) if found else None


def seconds(text: str | None) -> int | None:
    """Convert a time limit such as `1-12:00:00`, `30:00` or `UNLIMITED` to seconds; None if it is invalid."""
    if text in ("UNLIMITED", "INFINITE"):
        return UNLIMITED
    found = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text or "")
    if found is None:
        return None
    days, first, second, third = (int(part) if part is not None else None for part in found.groups())
    if days is not None:
        return days * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return (first or 0) * 3600 + (second or 0) * 60 + third
    return (first or 0) * 60 + (second or 0)
