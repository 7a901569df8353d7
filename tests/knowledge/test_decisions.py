"""Decision lists: their schema, their links, how outcomes are judged, and the checks that run on a job's machine."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from counting import counted_lines
from doors import JOB, quick_warden
from gpuwarden.core.errors import BadRequest, Unreachable
from gpuwarden.core.inputs import build
from gpuwarden.core.models import CommandOutput, Handle, JobSpec, Observation
from gpuwarden.core.states import Job
from gpuwarden.interfaces.results.decisions import decision_reply, outcome_line, outcome_reply, steps_of
from gpuwarden.interfaces.results.diagnosing import diagnose_log
from gpuwarden.interfaces.results.references import look_up
from gpuwarden.knowledge import Sign, shipped
from gpuwarden.knowledge.decisions import (
    MAX_TEXT,
    PAGE,
    READERS,
    Check,
    CommandHost,
    decision_lists,
    for_entries,
    for_signs,
    for_words,
    read_lists,
)
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.decision_checks import UNKNOWN, outcomes
from gpuwarden.lifecycle.monitoring.diagnose import diagnosed
from gpuwarden.lifecycle.records import JobRecord, read_job
from gpuwarden.lifecycle.submission.submit import submit
from runner_kit import call
from waiting import soon
from wording import Wording

CHECKS = {f"{one.id}/{check.id}": check for one in decision_lists() for check in one.checks}
READING = {name: check for name, check in CHECKS.items() if check.reads}
OUTCOMES = [{"id": "a", "when": "one", "means": "this"}, {"id": "b", "when": "two", "means": "that"}]


def test_every_ambiguous_symptom_has_a_list_and_every_link_resolves() -> None:
    names = [one.id for one in decision_lists()]
    assert names == ["hang", "loss", "throughput", "memory", "pending", "disk", "download"]
    assert [key for one in decision_lists() for key in one.links if key not in shipped().gotchas] == []
    assert PAGE in shipped().pages


def test_every_trouble_sign_of_a_running_job_has_a_list() -> None:
    for sign in (Sign.STALL, Sign.SLOWED, Sign.LOSS_SPIKE, Sign.NONFINITE_LOSS, Sign.OOM_KILL, Sign.DISK_FULL):
        assert len(for_signs([sign])) == 1, sign
    assert for_signs([Sign.TIME_LIMIT]) == ()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"command": ["rm", "-r", "x"]}, id="removes"),
        pytest.param({"command": ["cat", "/etc/passwd"]}, id="reads passwords"),
        pytest.param({"command": ["cat", "/proc/../etc/passwd"]}, id="leaves /proc"),
        pytest.param({"command": ["nvidia-smi", "--gpu-reset"]}, id="resets"),
        pytest.param({"command": ["nvidia-smi", "--query-gpu=x", "--loop=1"]}, id="loops"),
        pytest.param({"command": ["dmesg", "--clear"]}, id="clears"),
        pytest.param({"command": ["df", "{pid}"]}, id="another placeholder"),
        pytest.param({"on": "here"}, id="here"),
        pytest.param({"command": ["df", "{home}"]}, id="an unknown placeholder"),
        pytest.param({"outcomes": [OUTCOMES[0], OUTCOMES[0]]}, id="one outcome twice"),
        pytest.param({"value": "(\\d+)"}, id="a value that no outcome uses"),
        pytest.param({"outcomes": OUTCOMES[:1]}, id="one outcome"),
    ],
)
def test_a_check_that_is_not_read_only_or_consistent_is_refused(change: dict[str, Any], wording: Wording) -> None:
    good = {"id": "x", "question": "Is it?", "command": ["df", "/tmp"], "reads": True, "outcomes": OUTCOMES}
    assert Check.model_validate(good).on is CommandHost.MACHINE
    with pytest.raises(ValidationError) as refused:
        Check.model_validate(good | change)
    (fault,) = refused.value.errors()
    ours = fault.get("ctx", {}).get("error")
    if isinstance(ours, ValueError):
        wording(ours)
    else:
        assert (fault["type"], fault["loc"]) == ("too_short", ("outcomes",))


def test_a_mistake_in_the_page_is_reported_with_its_line() -> None:
    with pytest.raises(BadRequest, match=r"^x\.md:4: "):
        read_lists("# x\n\n## A\n```yaml decision\nid: a\n", "x.md")
    with pytest.raises(BadRequest, match=r"^x\.md:\d+: "):
        read_lists("## A\n```yaml decision\nid: a\nunknown: 1\n```\n", "x.md")


SMI = "nvidia-smi: command failed\n"


@pytest.mark.parametrize(
    ("name", "text", "exit_code", "outcome", "value"),
    [
        ("hang/cards", "100\n3\n", 0, "spinning", 100),
        ("hang/cards", "0\n0\n", 0, "idle", 0),
        ("hang/cards", "40\n", 0, "working", 40),
        ("hang/cards", "[N/A]\n", 0, None, None),
        ("hang/cards", SMI, 9, None, None),
        ("hang/processes", "Ss   systemd\nDl   python3\n", 0, "waits-for-disk", None),
        ("hang/processes", "Sl   python\nZ    pt_main_thread\n", 0, "died", None),
        ("hang/processes", "Sl   python\n", 0, "alive", None),
        ("hang/kernel", "[1.0] NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus\n", 0, "xid", None),
        ("hang/kernel", "dmesg: read kernel buffer failed: Operation not permitted\n", 1, "not-allowed", None),
        ("hang/kernel", "dmesg: broken\n", 1, None, None),
        ("hang/kernel", "", 0, "quiet", None),
        ("loss/card", "0\n2\n", 0, "memory-errors", 2),
        ("loss/precision", "7.5\n", 0, "no-bf16", 7.5),
        ("loss/precision", "9.0\n", 0, "bf16", 9.0),
        ("throughput/clocks", "        HW Thermal Slowdown            : Active\n", 0, "hot", None),
        ("throughput/clocks", "        HW Thermal Slowdown            : Not Active\n", 0, "free", None),
        ("throughput/clocks", SMI, 9, None, None),
        ("throughput/cards", "35\n60\n", 0, "starved", 60),
        ("throughput/cpu", "usage_usec 1\nnr_periods 200\nnr_throttled 50\nthrottled_usec 9\n", 0, "throttled", 25),
        ("throughput/cpu", "usage_usec 1\nnr_periods 0\nnr_throttled 0\n", 0, None, None),
        ("throughput/disk", "some avg10=1.00 avg60=40.00 total=1\nfull avg10=9.0 avg60=31.5 a\n", 0, "waits", 31.5),
        ("throughput/swap", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", 0, "enough", 0),
        ("memory/host-kills", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n", 0, "killed", 2),
        ("memory/host-memory", "        total  used\nMem:  1000  950  1 1 1 1\nSwap: 0 0 0\n", 0, "full", 95),
        ("memory/card-memory", "79000, 81559\n10, 81559\n", 0, "full", 100 * 79000 / 81559),
        ("disk/bytes", "Use%\n 98%\n", 0, "full", 98),
        ("disk/inodes", "IUse%\n    -\n", 0, None, None),
        ("download/names", "", 2, "does-not-resolve", None),
        ("download/names", "13.33.1.2 huggingface.co\n", 0, "resolves", None),
    ],
)  # fmt: skip
def test_command_output_decides_the_outcome(
    name: str, text: str, exit_code: int, outcome: str | None, value: float | None
) -> None:
    found, number = CHECKS[name].judge(text, exit_code)
    assert (found.id if found else None, number) == (outcome, value)


@pytest.mark.parametrize("text", ["\n" * 100_000, " " * 100_000, "1" * 100_000, "1\n\n" * 50_000, "9" * 350 + "%\n"])
def test_made_up_output_costs_little_and_yields_no_infinite_number(text: str) -> None:
    for name, one in READING.items():
        with counted_lines() as lines:
            _, number = one.judge(text)
        assert lines() <= 3 * MAX_TEXT and (number is None or math.isfinite(number)), name


@pytest.mark.slow
@given(st.sampled_from(sorted(READING)), st.text(max_size=200), st.integers(-9, 255))
def test_any_output_is_judged_without_failing(name: str, text: str, exit_code: int) -> None:
    found, _ = READING[name].judge(text, exit_code)
    assert found is None or found in READING[name].outcomes


@pytest.mark.parametrize("name", [n for n, c in READING.items() if c.command[0] in {"df", "cat", "free", "ps"}])
def test_standard_linux_commands_run_and_are_judged(name: str, tmp_path: Path) -> None:
    one = READING[name]
    if one.command[0] == "cat" and not Path(one.command[1]).exists():
        pytest.skip(f"{one.command[1]} doesn't exist here")
    found = call("look", tmp_path, {"commands": {"x": list(one.command)}})["answers"]["x"]
    assert found["why"] == "" and found["text"], found
    if found["exit"] == 0 and "-" not in found["text"].split():
        assert one.judge(found["text"])[0] is not None or "nr_periods 0" in found["text"] or not one.value


@pytest.mark.slow
def test_the_runner_bounds_its_commands(tmp_path: Path) -> None:
    commands = {
        "missing": ["no-such-program-here"],
        "folder": ["df", "{folder}"],
        "no-shell": ["echo", "$HOME; ls"],
        "long": ["seq", "1", "100000"],
        "fails": ["ls", "/no/such/folder"],
    }
    answers = call("look", tmp_path, {"commands": commands})["answers"]
    assert answers["missing"] == {"exit": None, "text": "", "why": "missing"}
    assert answers["folder"]["exit"] == 0
    assert answers["no-shell"]["text"] == "$HOME; ls\n"
    assert len(answers["long"]["text"]) == 16 << 10 and answers["long"]["text"].endswith("100000\n")
    assert answers["fails"]["exit"] and "No such file" in answers["fails"]["text"]
    for wrong in ({"x": "df /tmp"}, {"x": []}, {"x": [1]}, ["df"], {str(n): ["df"] for n in range(17)}):
        assert call("look", tmp_path, {"commands": wrong})["code"] == "bad_request"


def test_a_slow_command_times_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gpuwarden.remote.runner import look as module

    monkeypatch.setattr(module, "EACH_S", 0.2)
    found = module.command_outputs(str(tmp_path), {"commands": {"x": ["sleep", "60"]}})
    assert found["answers"]["x"] == {"exit": None, "text": "", "why": "timeout"}
    monkeypatch.setattr(module, "ALL_S", 0.0)
    assert module.command_outputs(str(tmp_path), {"commands": {"x": ["df"]}})["answers"]["x"]["why"] == "timeout"


# -------------------------------------------------------------------------------------------- on a job's machine


class Machine:
    """A backend whose machine prints output chosen by the test."""

    def __init__(self, printed: dict[str, CommandOutput] | Exception) -> None:
        self.printed = printed
        self.asked: list[tuple[str, ...]] = []

    async def look(self, handle: Handle, commands: Any) -> dict[str, CommandOutput]:
        self.asked += commands.values()
        if isinstance(self.printed, Exception):
            raise self.printed
        return {name: self.printed.get(argv[0], CommandOutput(why="missing")) for name, argv in commands.items()}


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return quick_warden(tmp_path / "home")


async def running(ctx: Context) -> JobRecord:
    spec = build(JobSpec, {**JOB})
    job = (await submit(ctx, spec, receipt=(await submit(ctx, spec)).receipt)).job
    assert job is not None

    async def started() -> bool:
        return (await check(ctx, job.id)).job.handle is not None

    await soon(started)
    return read_job(ctx.ledger, job.id)


@pytest.mark.slow
@pytest.mark.anyio
async def test_read_only_checks_of_a_stalled_job_take_one_call(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    job = await running(ctx)
    machine = Machine(
        {"nvidia-smi": CommandOutput(exit=0, text="100\n"), "ps": CommandOutput(exit=0, text="Rl python\n")}
    )
    monkeypatch.setattr(Context, "backend", lambda self, name: machine)
    found = await outcomes(ctx, job, for_signs([Sign.STALL]))
    assert [(one.check, one.outcome) for one in found] == [
        ("cards", "spinning"), ("processes", "alive"), ("kernel", UNKNOWN),
    ]  # fmt: skip
    assert (found[0].value, found[0].see) == (100.0, ("DIST-025", "DIST-028"))
    assert found[2].why == "missing"
    assert all(argv[0] in READERS for argv in machine.asked)
    wording(outcome_line(outcome_reply(found[0])).partition(". ")[0], "hang/cards", "spinning", 100)
    machine.printed = Unreachable("gone", "")
    assert {one.outcome for one in await outcomes(ctx, job, for_signs([Sign.STALL]))} == {UNKNOWN}
    assert await outcomes(ctx, job, ()) == ()


@pytest.mark.slow
@pytest.mark.anyio
async def test_check_job_queries_the_machine_only_for_a_troubled_job(ctx: Context) -> None:
    job = await running(ctx)
    healthy = await diagnosed(ctx, job, Observation(state=Job.RUNNING))
    assert healthy.checks == ()
    stalled = await diagnosed(
        ctx, job.__class__(**{**vars(job), "state": Job.RUNNING}), Observation(state=Job.RUNNING, stale=True)
    )
    made = {one.check: one.outcome for one in stalled.checks}
    assert made.keys() == {"cards", "processes", "kernel"}
    assert made["processes"] != UNKNOWN or shutil.which("ps") is None


def test_slurm_and_kubernetes_are_not_queried() -> None:
    from gpuwarden.backends.base import CommandBackend
    from gpuwarden.backends.kubernetes import KubernetesBackend
    from gpuwarden.backends.slurm import SlurmBackend
    from gpuwarden.backends.ssh import SshBackend

    assert issubclass(SshBackend, CommandBackend)
    assert not issubclass(SlurmBackend, CommandBackend) and not issubclass(KubernetesBackend, CommandBackend)


# ------------------------------------------------------------------------------------------------------- display


def test_search_and_diagnose_return_the_list_for_a_symptom() -> None:
    assert for_words("my training is stuck at 100 % GPU") is for_words("程序卡死了") is decision_lists()[0]
    assert for_words("the loss becomes smaller") is None and for_words("unhangs") is None
    found = look_up("training hangs at 100 % GPU utilisation").decision
    assert found is not None and found.id == "hang" and len(found.checks) == 4
    assert look_up("evaluation_strategy").decision is None
    timeout = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000)"
    reply = diagnose_log(f"step 3/9 loss 1.0\n[rank0]: {timeout}", 1)
    assert reply.diagnoses[0].id == "DIST-025" and reply.decision is not None and reply.decision.id == "hang"


def test_a_list_is_rendered_with_pasteable_commands(wording: Wording) -> None:
    reply = decision_reply(for_entries(["CKPT-004"]))
    assert reply is not None
    text = "\n".join(steps_of(reply))
    assert "\n     df --output=pcent '{folder}'\n" in text
    wording("\n".join(text.splitlines()[:4]))
    assert for_entries(["HUB-011"]) is None and decision_reply(None) is None
