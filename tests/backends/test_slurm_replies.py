"""Replies of different Slurm versions about jobs and the cluster, and how they combine with the runner's status."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuwarden.backends import _slurm_options as options
from gpuwarden.backends._slurm_limits import gpus_of, read_limits, requeue_delay
from gpuwarden.backends._slurm_observation import observation
from gpuwarden.backends._slurm_policy import seconds
from gpuwarden.backends._slurm_rows import Row, accounting_rows, exit_of, newest, number, queue_rows, states
from gpuwarden.core.engine import UNLIMITED, Ceiling, EngineRequest
from gpuwarden.core.errors import BadReply, BadRequest, NotSupported, Unreachable, WardenError
from gpuwarden.core.models import JobSpec
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.remote.host import slurm_agent
from wording import Wording


def old(**changes: Any) -> dict[str, Any]:
    """Return a row as Slurm 21.08 and 22.05 write it: plain strings and numbers."""
    return {
        "job_id": 7, "name": "gw-j1-a1", "job_state": "RUNNING", "state_reason": "None", "partition": "gpu",
        "nodes": "n1", "restart_cnt": 0, "submit_time": 100, "eligible_time": 100, "start_time": 200, "end_time": 3800,
        "time_limit": 60, "exit_code": 0, "tres_alloc_str": "cpu=4,gres/gpu=1", **changes,
    }  # fmt: skip


def num(value: float, **flags: bool) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value, **flags}


def new(**changes: Any) -> dict[str, Any]:
    """Return the same row as Slurm 23.11 and later write it: lists of states, numbers that may be unset or infinite."""
    times = {k: num(v) for k, v in old().items() if k.endswith("_time") or k == "time_limit"}
    code = {"status": ["SUCCESS"], "return_code": num(0), "signal": {"id": num(0, set=False), "name": ""}}
    return {**old(), **times, "job_state": ["RUNNING"], "exit_code": code, **changes}


def row(**changes: Any) -> Row:
    (found,) = queue_rows({"rows": [old(**changes)]})
    return found


def test_old_and_new_slurm_rows_parse_alike() -> None:
    first, second = queue_rows({"rows": [old(), new()]})
    assert first == second
    assert (first.stem, first.attempt, first.id, first.state, first.started_at) == ("gw-j1", 1, 7, "RUNNING", 200.0)
    assert first.allocation.ends_at == 3_800.0 and first.allocation.resources == "cpu=4,gres/gpu=1"


@pytest.mark.parametrize(
    ("value", "base", "flags"),
    [
        ("RUNNING", "RUNNING", set()),
        (["PENDING", "REQUEUED"], "PENDING", {"REQUEUED"}),
        (["COMPLETING", "FAILED"], "FAILED", {"COMPLETING"}),
        (["COMPLETING"], "RUNNING", {"COMPLETING"}),
        (["REQUEUE_HOLD"], "PENDING", {"REQUEUE_HOLD"}),
        ("RESV_DEL_HOLD", "PENDING", {"RESV_DEL_HOLD"}),
        ({"current": ["OUT_OF_MEMORY"], "reason": "OutOfMemory"}, "OUT_OF_MEMORY", set()),
        ({"current": "TIMEOUT"}, "TIMEOUT", set()),
        ("CANCELLED by 1000", "CANCELLED", set()),
        ("CANCELLED+", "CANCELLED", set()),
        ("PENDING,REQUEUED", "PENDING", {"REQUEUED"}),
    ],
)
def test_a_state_is_read_in_every_format(value: object, base: str, flags: set[str]) -> None:
    assert states(value) == (base, frozenset(flags))


@pytest.mark.parametrize("value", ["", None, [], "FUTURE_STATE", ["NEVER", "SEEN"], {"current": None}, 7])
def test_an_unknown_state_is_rejected(value: object) -> None:
    with pytest.raises(BadReply):
        states(value)


@pytest.mark.parametrize(
    ("value", "code", "signal"),
    [
        (0, 0, None),
        (768, 3, None),
        (15, None, 15),
        ("3:0", 3, None),
        ("0:9", None, 9),
        ({"return_code": 4, "signal": {"signal_id": 0}}, 4, None),
        ({"return_code": num(4), "signal": {"id": num(0, set=False)}}, 4, None),
        ({"return_code": num(0, set=False), "signal": {"id": num(9)}}, None, 9),
        (None, None, None),
        (num(256), 1, None),
    ],
)
def test_an_exit_code_is_read_in_every_format(value: object, code: int | None, signal: int | None) -> None:
    assert exit_of(value) == (code, signal)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (7, 7.0),
        ("12", 12.0),
        (num(5), 5.0),
        (num(0, set=False), None),
        (num(0, infinite=True), None),
        (2**32 - 1, None),
        (2**32 - 2, None),
        (2**16 - 1, 65_535.0),
        (2**16 - 2, 65_534.0),
        (True, None),
        ("soon", None),
        (None, None),
        ([1], None),
        (10**400, None),
        (float("nan"), None),
        (float("-inf"), None),
        (-1, None),
        (10**15, None),
    ],
)
def test_an_unset_number_is_none(value: object, read: float | None) -> None:
    assert number(value) == read


@pytest.mark.parametrize("value", [2**16 - 2, 2**16 - 1])
def test_a_16_bit_unset_value_is_a_number_in_wider_fields(value: int) -> None:
    found = row(job_id=value, time_limit=value, restart_cnt=value)
    assert (found.id, found.allocation.id, found.allocation.restarts) == (value, str(value), 0)
    assert found.allocation.ends_at == 200 + value * 60
    line = f"{value}|gw-j1-a1|COMPLETED|0:0|100|200|300|{value}|gpu|cpu=4|n1|/r/gw-j1\n"
    (ended,) = accounting_rows(line, {"gw-j1": "/r/gw-j1"})
    assert (ended.id, ended.allocation.used_s) == (value, value)
    assert exit_of({"return_code": 3, "signal": {"signal_id": value}}) == (3, None)


@pytest.mark.parametrize("rows", [None, {}, [7], [old(name="other")], [old(name=None)], [old(job_id=None)]])
def test_a_malformed_list_is_refused(rows: object) -> None:
    with pytest.raises(BadReply):
        queue_rows({"rows": rows})


FIELDS = ["submit_time", "start_time", "end_time", "restart_cnt", "time_limit", "exit_code", "job_id"]


@example("time_limit", 4_223_371_677)
@given(st.sampled_from(FIELDS), st.one_of(st.integers(), st.floats(), st.just("9" * 400 + ":1"), st.just(10**400)))
def test_odd_numbers_never_break_the_list(field: str, number: object) -> None:
    for changed in (old(**{field: number}), new(**{field: num(number)})):  # type: ignore[arg-type]
        try:
            [found] = queue_rows({"rows": [changed]})
        except BadReply:
            assert field == "job_id"
        else:
            assert datetime.fromtimestamp(max(found.ended_at or 0, found.allocation.ends_at or 0), UTC)


def test_the_live_job_of_the_last_attempt_counts() -> None:
    rows = queue_rows(
        {
            "rows": [
                old(job_state="FAILED", job_id=9),
                old(job_id=8),
                old(name="gw-j1-a2", job_id=3, job_state="PENDING"),
            ]
        }
    )
    assert newest(rows)["gw-j1"].id == 3
    assert newest(rows[:2])["gw-j1"].id == 8


def test_accounting_is_read_line_by_line() -> None:
    text = "8|gw-j1-a1|CANCELLED by 0|0:15|100|200|300|100|gpu|cpu=4|n1|/r/gw-j1\n"
    other = "9|gw-j1-a1|RUNNING|0:0|100|200|Unknown|100|gpu|cpu=4|n1|/somewhere/else\n"
    (found,) = accounting_rows(text + other, {"gw-j1": "/r/gw-j1"})
    assert (found.id, found.state, found.signal, found.ended_at, found.allocation.used_s) == (
        8,
        "CANCELLED",
        15,
        300,
        100,
    )
    with pytest.raises(BadReply):
        accounting_rows("8|gw-j1-a1|RUNNING\n", {"gw-j1": "/r/gw-j1"})


# ---------------------------------------------------------------------------------------------- both views of a job


def status(state: str = "running", **changes: Any) -> dict[str, Any]:
    """Return the runner's status as the login node reads it. The process isn't visible there."""
    given = {
        "state": state, "folder": "present", "now": 1000.0, "attempt": 1, "requeues": 0, "started_at": 200.0,
        "updated_at": 995.0, "alive": False, "child_alive": False, "machine": "login/1", "log_bytes": 3,
        "reason": "exited", "exit_code": 0 if state == "succeeded" else None,
    }  # fmt: skip
    return {**given, **changes}


ABSENT = {"state": "absent", "folder": "absent", "now": 1000.0}
SAW: list[tuple[dict[str, Any], dict[str, Any] | None, Job, Code]] = [
    (status(), {}, Job.RUNNING, Code.ALIVE),
    (ABSENT, {}, Job.RUNNING, Code.ENGINE_STARTS),
    (ABSENT, {"job_state": "PENDING"}, Job.QUEUED, Code.ENGINE_QUEUE),
    (status("succeeded"), {"job_state": "COMPLETED"}, Job.SUCCEEDED, Code.EXITED),
    (status("succeeded"), {}, Job.RUNNING, Code.ENDING),
    (status("succeeded"), {"job_state": "FAILED", "exit_code": 256}, Job.FAILED, Code.EXITED),
    (status("failed", exit_code=3), {"job_state": "FAILED", "exit_code": 768}, Job.FAILED, Code.EXITED),
    (status("failed"), {"job_state": "COMPLETED"}, Job.UNKNOWN, Code.ENGINE_DISAGREES),
    (ABSENT, {"job_state": "COMPLETED"}, Job.UNKNOWN, Code.ENGINE_DISAGREES),
    (status(), {"job_state": "TIMEOUT"}, Job.FAILED, Code.TIME_LIMIT),
    (status("timeout"), {"job_state": "FAILED", "exit_code": 124 << 8}, Job.FAILED, Code.TIME_LIMIT),
    (status(), {"job_state": "OUT_OF_MEMORY"}, Job.FAILED, Code.OUT_OF_MEMORY),
    (status(), {"job_state": "NODE_FAIL"}, Job.PREEMPTED, Code.ENGINE_TOOK),
    (ABSENT, {"job_state": ["NODE_FAIL", "DROPPED"]}, Job.PREEMPTED, Code.ENGINE_TOOK),  # not a Slurm flag
    (status(), {"job_state": "PREEMPTED"}, Job.PREEMPTED, Code.ENGINE_TOOK),
    (status("preempted"), {"job_state": "FAILED", "exit_code": 143 << 8}, Job.PREEMPTED, Code.ENGINE_TOOK),
    (status("preempted"), {"job_state": "CANCELLED"}, Job.CANCELED, Code.STOPPED),
    (status("preempted"), {"job_state": "PENDING", "restart_cnt": 1}, Job.QUEUED, Code.ENGINE_QUEUE),
    (status("preempted"), {"restart_cnt": 1}, Job.RUNNING, Code.ENGINE_STARTS),
    (status("canceled"), {"job_state": "FAILED", "exit_code": 143 << 8}, Job.CANCELED, Code.STOPPED),
    (status(), {"job_state": "CANCELLED"}, Job.CANCELED, Code.STOPPED),
    (status("failed"), {"name": "gw-j1-a2", "job_state": "PENDING"}, Job.QUEUED, Code.ENGINE_QUEUE),
    (status("succeeded"), {"name": "gw-j1-a2", "job_state": "FAILED"}, Job.FAILED, Code.EXITED),
    (status("succeeded"), None, Job.SUCCEEDED, Code.EXITED),
    (status(), None, Job.UNKNOWN, Code.UNLISTED),  # not listed, but its runner is still running
    (status(updated_at=1004.0), None, Job.UNKNOWN, Code.UNLISTED),
    (status(updated_at=900.0), None, Job.FAILED, Code.VANISHED),
    (status(updated_at=5000.0), None, Job.FAILED, Code.VANISHED),
    (status(updated_at=900.0, heartbeat_s=1e9), None, Job.UNKNOWN, Code.UNLISTED),
    (status(updated_at=700.0, heartbeat_s=1e9), None, Job.FAILED, Code.VANISHED),
    (status(updated_at=None), None, Job.FAILED, Code.VANISHED),
    (ABSENT, None, Job.UNKNOWN, Code.NO_STATUS),
]


@pytest.mark.parametrize(("seen", "slurm", "state", "code"), SAW)
def test_runner_and_slurm_status_combine_into_one_observation(
    seen: dict[str, Any], slurm: dict[str, Any] | None, state: Job, code: Code
) -> None:
    found = observation(seen, None if slurm is None else row(**slurm))
    assert (found.state, found.reason) == (state, code)
    assert not found.machine and not found.lost, "a login node says nothing of a compute node"
    assert found.why
    assert found.meter is not False or found.state is not Job.UNKNOWN or slurm is not None, "unknown counts"
    if slurm is not None:
        assert found.allocation is not None and found.attempt == row(**slurm).attempt
        assert found.meter is (state is Job.RUNNING), (
            "the allocation counts while Slurm has it, and not a moment longer"
        )


# ------------------------------------------------------------------------------------------------------------ limits

CONFIG = "Configuration data as of now\nSLURM_VERSION           = {}\nAuthInfo = (null)\nMaxArraySize = 1001\n"
CONFIG += "PreemptType = preempt/qos\nPreemptMode = GANG,REQUEUE\nAccountingStorageType = accounting_storage/slurmdbd\n"
CONFIG += "AccountingStorageEnforce = associations,limits,qos\nClusterName = box\n"
PARTITION = (
    "PartitionName=gpu AllowAccounts=nlp,vision AllowQos=ALL Default=YES DefaultTime=01:00:00 GraceTime=0 "
    "MaxNodes=4 MaxTime=1-00:00:00 PreemptMode=GANG,REQUEUE State=UP TotalNodes=8"
)
NODES = (
    "gpu|gpu:a100:4(S:0-1),shard:8|64|515000|6|mix\ngpu|gpu:A100:8|128+|1031000+|2|idle\ncpu|(null)|32|190000|9|idle\n"
)


QOS = (
    "normal|1-00:00:00||||||||||||||",
    "long|7-00:00:00|cpu=64,mem=1T|gres/gpu:a100=2|node=4||5||9|||100||billing=600|cpu=9000|2-00:00:00",
    "short|30:00||||||||||||||",
)
USAGE = """\
Current Association Manager state
Association Records
ClusterName=box Account=root UserName= Partition= ID=1 ParentAccount= DefAssoc=No GrpSubmitJobs=900(30)
ClusterName=box Account=lab UserName= Partition= ID=2 ParentAccount=root(1) DefAssoc=No GrpTRES=cpu=N(6),mem=8T(0)
ClusterName=box Account=nlp UserName= Partition= ID=3 ParentAccount=lab(2) DefAssoc=No GrpJobs=20(20) MaxJobs=1(0) \
GrpWall=6000(5941.50)
ClusterName=box Account=nlp UserName=ada(7) Partition= ID=4 ParentAccount= DefAssoc=Yes MaxJobs=3(2) \
MaxSubmitJobs=5(4) MaxWallPJ=60 MaxTRESPJ=cpu=8,gres/gpu=N(0)
ClusterName=box Account=nlp UserName=bob(8) Partition= ID=5 ParentAccount= DefAssoc=Yes MaxJobs=1(1)
QOS Records
QOS=long(3) GrpJobs=N(3) GrpSubmitJobs=100(3) GrpTRESMins=cpu=N(0),billing=600(590) \
GrpWall=2880(30.25) MaxWallPJ=10080 \
Account Limits= nlp={MaxJobsPA=N(3) MaxSubmitJobsPA=N(3)} User Limits= 7={MaxJobsPU=5(2) MaxSubmitJobsPU=9(3)} \
8={MaxJobsPU=5(1) MaxSubmitJobsPU=9(1)}
"""


def answer(text: str = "", rc: int | None = 0, err: str = "") -> dict[str, Any]:
    return {"rc": rc, "out": text, "err": err}


def cluster(version: str = "24.05.3", **changes: Any) -> dict[str, Any]:
    whole = {
        "config": answer(CONFIG.format(version)),
        "partitions": answer(PARTITION),
        "nodes": answer(NODES),
        "user": "ada",
        "uid": 7,
        "associations": answer("box|nlp||normal,long|normal\nbox|vision|gpu|normal|\nother|secret||high|\n"),
        "qos": answer("".join(f"{row}\n" for row in QOS)),
        "usage": answer(USAGE),
        "check": answer(err="sbatch: Job 9 to start at 2026-11-22T20:00:00 using 1 processors on nodes n1"),
    }
    return {**whole, **changes}


def test_a_cluster_with_accounting_is_read_in_full() -> None:
    found = read_limits(cluster(), EngineRequest(queue="gpu"))
    assert (found.version, found.max_array, found.requeue_s, found.refusal) == ("24.05.3", 1001, 121.0, "")
    assert found.accounts == ("nlp", "vision") and found.qos == ("normal", "long"), "of this cluster alone"
    assert found.unread == ""
    queue = found.queue
    assert queue is not None and (queue.max_s, queue.default_s, queue.max_nodes, queue.nodes) == (86_400, 3_600, 4, 8)
    assert (queue.gpus, queue.cpus, queue.memory_mb) == ({"a100": 8}, 128, 1_031_000)
    assert (queue.accounts, queue.qos, queue.preempts) == (("nlp", "vision"), None, "requeue")


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (cluster("20.11.9"), NotSupported),
        (cluster(config=answer("welcome")), BadReply),
        (cluster(config=answer(rc=1, err="Unable to contact slurm controller")), Unreachable),
        (cluster(config=answer(rc=None, err="scontrol gave no answer in 40 s")), Unreachable),
        (cluster(partitions=answer("{}")), BadReply),
        (cluster(partitions=answer("")), BadReply),
        (cluster(partitions=None), BadReply),
        ({}, BadReply),
    ],
)
def test_a_silent_old_or_odd_cluster_raises(found: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        read_limits(found, EngineRequest())


def test_unreported_cluster_limits_are_unknown() -> None:
    none = answer(CONFIG.format("23.02.1").replace("slurmdbd", "none"))
    found = read_limits(cluster(config=none, nodes=answer(rc=1), check=answer(rc=None)), EngineRequest())
    assert (found.accounts, found.qos, found.ceilings, found.refusal, found.unread) == (None, None, (), "", "")
    assert found.queue is not None and (found.queue.gpus, found.queue.cpus) == (None, None)


@pytest.mark.parametrize("silent", [answer(rc=1, err="dbd is down"), answer("welcome|to us\n"), None])
def test_silent_or_odd_accounting_is_not_read_as_unlimited(silent: Any, wording: Wording) -> None:
    down = read_limits(cluster(associations=silent), EngineRequest())
    wording(down.unread)
    assert down.accounts == ("nlp",), "the controller names those that it knows"
    down = read_limits(cluster(usage=silent, qos=silent), EngineRequest())
    assert down.ceilings == ()
    wording(down.unread)
    lax = CONFIG.format("24.05.3").replace("associations,limits,qos", "none")
    assert read_limits(cluster(config=answer(lax), associations=silent), EngineRequest()).unread == "", (
        "nothing is enforced"
    )


def ceilings(queue: str = "PartitionName=gpu Default=YES State=UP", **asked: Any) -> set[Any]:
    found = read_limits(cluster(partitions=answer(queue)), EngineRequest(queue="gpu", **asked)).ceilings
    return {(c.owner, c.kind, c.resource, c.most, c.used) for c in found}


def test_a_jobs_limits_come_from_its_association_and_parent_accounts() -> None:
    above = {("the account lab", "job", "mem", 8 * 1024**2, 0), ("the account nlp", "running", "", 20, 20)}
    above_wall = {("the account nlp", "minutes", "wall", 6_000, 5_941)}
    own = {
        ("your account nlp", "running", "", 3, 2),
        ("your account nlp", "submitted", "", 5, 4),
        ("your account nlp", "job", "cpu", 8, 0),
    }
    top = {("the account root", "submitted", "", 900, 30)}
    assert ceilings() == own | above | above_wall | top | {("the QOS normal", "walltime", "", 86_400, 0)}
    assert ceilings(account="nlp", qos="long") == above | {
        ("the QOS long", "walltime", "", 604_800, 0),
        ("the QOS long", "job", "cpu", 64, 0),
        ("the QOS long", "job", "mem", 1024**2, 0),
        ("the QOS long", "machine", "gres/gpu:a100", 2, 0),
        ("the QOS long", "job", "node", 4, 0),
        ("the QOS long", "running", "", 5, 2),
        ("the QOS long", "submitted", "", 9, 3),
        ("the QOS long", "submitted", "", 100, 3),
        ("the QOS long", "minutes", "billing", 600, 590),
        ("the QOS long", "job_minutes", "cpu", 9_000, 0),
        ("the QOS long", "minutes", "wall", 2_880, 30),
    }, "a limit of the QOS takes the place of the same one of the accounts"
    assert ceilings(account="secret") == set()


def test_the_queues_own_qos_overrides_the_jobs() -> None:
    found = ceilings(queue="PartitionName=gpu Default=YES State=UP QoS=short", qos="long")
    walltimes = {row for row in found if row[1] == "walltime"}
    assert walltimes == {("the QOS short", "walltime", "", 1_800, 0)}


def test_a_refusal_explained_by_a_limit_is_not_repeated() -> None:
    said = answer(rc=1, err="allocation failure: Job violates accounting/QOS policy (job submit limit)")
    full = USAGE.replace("MaxSubmitJobs=5(4)", "MaxSubmitJobs=5(5)")
    assert read_limits(cluster(check=said, usage=answer(full)), EngineRequest()).refusal == ""
    assert "violates" in read_limits(cluster(check=said), EngineRequest()).refusal, (
        "no limit that is known is the reason"
    )
    said = answer(rc=1, err="allocation failure: Invalid qos specification")
    assert read_limits(cluster(check=said), EngineRequest(qos="nope")).refusal == ""
    assert read_limits(cluster(check=said), EngineRequest(qos="normal")).refusal


DIGITS = "9" * 5_000
HOSTILE = "a\x1b[31m$(reboot)`id`\u202e;" + "x" * 10_000


@given(
    st.sampled_from(["config", "partitions", "nodes", "associations", "qos", "usage", "check", "uid", "user"]),
    st.one_of(
        st.sampled_from([None, 3, [], {}, {"rc": 1}, DIGITS, answer(HOSTILE), answer(DIGITS), {"rc": 0, "out": []}]),
        st.builds(answer, st.text(max_size=200)),
    ),
)
@example("config", answer(f"SLURM_VERSION = {DIGITS}.1"))
@example("config", answer(f"SLURM_VERSION = 24.05\nMaxArraySize = {DIGITS}"))
@example("partitions", answer(f"PartitionName={HOSTILE} State={HOSTILE} MaxTime={DIGITS} AllowAccounts={HOSTILE}"))
@example("nodes", answer(f"{HOSTILE}|gpu:{HOSTILE}:{DIGITS}|{DIGITS}|{DIGITS}|x|x"))
@example("nodes", answer(f"gpu|gpu:{HOSTILE}:4|4|4|x|x"))
@example("associations", answer(f"c|{HOSTILE}|{HOSTILE}|{HOSTILE}|{HOSTILE}"))
def test_hostile_replies_never_crash_and_names_stay_on_one_short_line(part: str, hostile: Any) -> None:
    try:
        found = read_limits(cluster(**{part: hostile}), EngineRequest())
    except WardenError:
        return
    names = [*(found.accounts or ()), *(found.qos or ()), *(limit.owner for limit in found.ceilings)]
    for queue in found.queues:
        names += [queue.name, queue.state, queue.own_qos, *(queue.accounts or ()), *(queue.gpus or {})]
    assert all(name.isprintable() and len(name) < 200 for name in names)


@given(st.text(alphabet="QOS=ClusterNameUserAccount GrpTRESMaxJobsPU()0123456789{},:./N\n", max_size=300))
def test_hostile_tables_never_crash_the_parser(text: str) -> None:
    found = read_limits(cluster(usage=answer("Association Records\n" + text)), EngineRequest())
    assert all(isinstance(limit, Ceiling) for limit in found.ceilings)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("30", 1_800),
        ("30:00", 1_800),
        ("01:00:00", 3_600),
        ("1-00:00:00", 86_400),
        ("2-12", 216_000),
        ("1-06:30", 109_800),
        ("UNLIMITED", UNLIMITED),
        ("NONE", None),
        ("", None),
        (None, None),
        ("soon", None),
    ],
)
def test_a_time_is_read_in_every_format(text: str | None, read: int | None) -> None:
    assert seconds(text) == read


def test_gpus_and_requeue_delays_are_parsed() -> None:
    assert list(gpus_of("gpu:2")) == [("", 2)]
    assert list(gpus_of("gpu:a100:4(S:0-1),shard:8,gpu:v100:2(IDX:0-1)")) == [("a100", 4), ("v100", 2)]
    assert not list(gpus_of("(null)")) and not list(gpus_of("shard:gpu:3"))
    assert [requeue_delay(a) for a in ("", "socket=/x,cred_expire=5", "cred_expire=3", "cred_expire=600")] == [
        121,
        6,
        121,
        601,
    ]


# ---------------------------------------------------------------------------------------------------------- requests


def spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate({"platform": "slurm/box", "command": ("train",), "timeout_s": 3_600, **changes})


def test_a_job_becomes_sbatch_arguments() -> None:
    asked = {"partition": "gpu", "account": "nlp", "nodes": 2, "cpus": 8, "memory_gb": 64, "exclusive": True}
    given = options.arguments(spec(gpu="a100", gpu_count=4, options=asked))
    assert given == [
        "--partition=gpu", "--account=nlp", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--mem=64G",
        "--gres=gpu:a100:4", "--time=64", "--exclusive",
    ]  # fmt: skip
    assert "--gres=gpu:2" in options.arguments(spec(gpu="any", gpu_count=2))
    assert not [a for a in options.arguments(spec()) if "gres" in a]
    own = options.own_arguments(spec(name="run"), "gw-j1-a1", "/scratch/100%/gw-j1")
    assert "--job-name=gw-j1-a1" in own and "--comment=gpuwarden gw-j1-a1 run" in own and "--requeue" in own
    assert "--output=/scratch/100%%/gw-j1/engine.log" in own and "--signal=B:USR1@120" in own
    assert "--no-requeue" in options.own_arguments(spec(max_restarts=0), "n", "/r")


def test_the_warning_comes_after_the_time_limit_unless_walltime_is_shorter() -> None:
    whole, cut = spec(timeout_s=50_000), spec(timeout_s=50_000, options={"walltime_s": 300})
    walltime = options.engine_request(whole).walltime_s or 0
    assert walltime - options.WARNING_S - 60 >= 50_000 + 10, "Slurm may warn a minute early, and the job has a grace"
    assert options.engine_request(cut).walltime_s == 300
    assert "--signal=B:USR1@100" in options.own_arguments(cut, "n", "/r")


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition": "-p;rm"},
        {"partition": "a b"},
        {"nodes": 0},
        {"gres": "gpu:1 --wrap=x"},
        {"modules": ["a;b"]},
        {"unknown": 1},
        {"walltime_s": 1},
        {"constraint": "$(x)"},
    ],
)
def test_an_unknown_or_ambiguous_slurm_option_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="options"):
        options.read_options(spec(options=wrong))


@pytest.mark.skipif(shutil.which("sh") is None, reason="no POSIX shell")
def test_the_batch_script_runs_with_hostile_folder_names(tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s $(touch canary) "q"'
    odd.mkdir()
    runner = odd / "runner.py"
    runner.write_text("import sys, json\nprint(sys.argv[1:], json.load(sys.stdin)['attempt'])\n")
    text = options.batch_script(spec(), 3, sys.executable, runner.name, str(odd))
    done = subprocess.run(["sh", "-s"], input=text.encode(), capture_output=True, cwd=tmp_path, check=True, timeout=300)
    assert done.stdout.decode() == f"{['allot', str(odd)]} 3\n"
    assert not (tmp_path / "canary").exists()


@pytest.mark.skipif(shutil.which("sh") is None, reason="no POSIX shell")
def test_an_array_task_uses_its_own_run_folder_and_name(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("plain", "it's $(touch canary)", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "runner.py").write_text(
            f"import os, sys, json\nprint(sys.argv[2], json.load(sys.stdin)['part'], os.environ[{options.TASK!r}])\n"
        )
    text = options.array_script(spec(), 1, sys.executable, "runner.py", [str(folder) for folder in folders])
    for index, folder in enumerate(folders):
        env = {**os.environ, "SLURM_ARRAY_TASK_ID": str(index), "SLURM_ARRAY_JOB_ID": "12", "SLURM_JOB_ID": "12"}
        done = subprocess.run(
            ["sh", "-s"], input=text, capture_output=True, cwd=tmp_path, text=True, env=env, timeout=300
        )
        assert done.stdout == f"{folder} SLURM_ARRAY_TASK_ID 12_{index}\n"
    env["SLURM_ARRAY_TASK_ID"] = "3"
    done = subprocess.run(["sh", "-s"], input=text, capture_output=True, cwd=tmp_path, text=True, env=env, timeout=300)
    assert done.returncode == options.NO_TASK and not (tmp_path / "canary").exists()


# ------------------------------------------------------------------------------------------------------------- agent


def test_the_agent_filters_its_environment_for_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "PYTHONPATH"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SBATCH_ACCOUNT", "nlp")
    env = slurm_agent.environment({"SLURM_CONF": "/c", "PATH": "/a:/b"})
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "PYTHONPATH"} & set(env)
    assert (env["SBATCH_ACCOUNT"], env["SLURM_CONF"]) == ("nlp", "/c") and env["PATH"].startswith("/a:/b:")


@pytest.mark.parametrize(
    ("printed", "code"),
    [
        ("", 0),
        ("not json", 0),
        ("[]", 0),
        ('{"jobs": 7}', 0),
        ('{"jobs": [], "errors": [{"error": "no"}]}', 0),
        ('{"jobs": []}', 1),
        ('{"jobs": [7]}', 0),
        ('{"jobs": [{"job_id": 7, "jobName": "gw-j1-a1"}]}', 0),
        ('{"jobs": [{"job_id": 7, "name": {"set": true}}]}', 0),
    ],
)
def test_an_unreadable_list_is_not_read_as_empty(tmp_path: Path, printed: str, code: int) -> None:
    command = tmp_path / "squeue"
    command.write_text(f"#!/bin/sh\nprintf '%s' '{printed}'\nexit {code}\n")
    command.chmod(0o755)
    assert slurm_agent.queue({}, {"PATH": f"{tmp_path}:/usr/bin:/bin"})["rows"] is None
    command.write_text("#!/bin/sh\nprintf '%s' '{\"jobs\": [], \"errors\": []}'\n")
    assert slurm_agent.queue({}, {"PATH": f"{tmp_path}:/usr/bin:/bin"})["rows"] == []


def test_a_slurm_without_json_is_asked_for_text(tmp_path: Path) -> None:
    command = tmp_path / "squeue"
    line = f"7|7|N/A|gw-j1-a1|PENDING|Resources|gpu||100|N/A|N/A|1-00:30:00|{slurm_agent.getpass_user()}|/r/gw-j1"
    text = f'case "$1" in --json) echo "squeue: unrecognized option" >&2; exit 1;; esac; echo "{line}"'
    command.write_text(f"#!/bin/sh\n{text}\n")
    command.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    (found,) = queue_rows(slurm_agent.queue({"gw-j1": "/r/gw-j1"}, env))
    assert (found.id, found.state, found.allocation.why, found.submitted_at) == (7, "PENDING", "Resources", 100.0)
    command.write_text(f"#!/bin/sh\n{text.replace('N/A|1-00:30:00', '200|1-00:30:00').replace('PENDING', 'RUNNING')}\n")
    (found,) = queue_rows(slurm_agent.queue({"gw-j1": "/r/gw-j1"}, env))
    assert slurm_agent.spelled({"time_limit": "1-00:30:00"}) == {"time_limit": 1470}
    assert slurm_agent.spelled({"time_limit": "30:00"}) == {"time_limit": 30}
    assert slurm_agent.spelled({"time_limit": "UNLIMITED", "start_time": "N/A"}) == {}


def test_slurm_without_json_lists_array_tasks_individually(tmp_path: Path) -> None:
    home, names = tmp_path / "gw-r", ["gw-j0", "gw-j1"]
    home.mkdir()
    (home / "gw-r-a1.table").write_text(json.dumps({f"{name}-a1": n for n, name in enumerate(names)}))
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}-a1.array").write_text(json.dumps({"folder": str(home), "name": "gw-r-a1"}))
    end = f"low||100|N/A|N/A|30:00|{slurm_agent.getpass_user()}|{home}"
    lines = f"8|7|0|gw-r-a1|RUNNING|None|{end}\n7|7|1|gw-r-a1|PENDING|JobArrayTaskLimit|{end}\n"
    (tmp_path / "rows").write_text(lines)
    command = tmp_path / "squeue"
    command.write_text(f'#!/bin/sh\ncase "$1" in --json) exit 1;; esac; cat {tmp_path}/rows\n')
    command.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    rows = queue_rows(slurm_agent.queue({name: str(tmp_path / name) for name in names}, env))
    assert [(r.stem, r.attempt, r.state, r.allocation.id) for r in rows] == [
        ("gw-j0", 1, "RUNNING", "7_0"), ("gw-j1", 1, "PENDING", "7_1"),
    ]  # fmt: skip


def test_the_agent_runs_as_it_is_shipped(tmp_path: Path) -> None:
    source = Path(slurm_agent.__file__).read_bytes()
    request = json.dumps({"verb": "jobs", "folders": {}, "env": {"PATH": str(tmp_path)}}).encode()
    loader = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.argv[1])), 'a', 'exec'))"
    argv = [sys.executable, "-I", "-S", "-c", loader, str(len(source))]
    done = subprocess.run(argv, input=source + request, capture_output=True, check=True, timeout=300)
    reply = json.loads(done.stdout)
    assert reply["ok"] is True and "queue" in reply
