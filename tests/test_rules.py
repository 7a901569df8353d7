"""Every rule has an example that fires and one that stays silent; the page of the rules is the one they write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.core.errors import Unreachable
from gpuwarden.core.guidance import steps
from gpuwarden.core.models import (
    Artifact,
    Disclosure,
    InputFile,
    Instance,
    InstanceState,
    JobSpec,
    Known,
    Manifest,
    Quote,
    Unknown,
    Verdict,
)
from gpuwarden.core.policy import Policy, Secrets
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import BLOCKING, Finding, Found, Severity, rule, run_rules
from gpuwarden.core.states import Job
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.lifecycle.submission.facts import gather
from gpuwarden.profiles import load_profile
from gpuwarden.rules import catalog, page
from gpuwarden.rules.facts import Leak, OutputFile, SubmitFacts, TeardownFacts
from gpuwarden.scripts.script import read_script
from test_rules_preflight import CASES

RENTED = load_profile("vastai")
OWNED = load_profile("local")

# ------------------------------------------------------------------------------------------------ small factories


def changed(profile: Profile, part: str, **values: Any) -> Profile:
    """A profile with one of its blocks changed."""
    return profile.model_copy(update={part: getattr(profile, part).model_copy(update=values)})


def submit(profile: Profile | None = RENTED, **given: Any) -> SubmitFacts:
    """Facts of a job that nothing is wrong with, changed as told: fields of the spec, or of the facts."""
    mine = {k: given.pop(k) for k in tuple(given) if k in SubmitFacts.__dataclass_fields__}
    spec = {"platform": "vastai", "command": ("train",), "outputs": ("out",), "timeout_s": 1_000, **given}
    return SubmitFacts(
        **{
            "spec": JobSpec.model_validate(spec),
            "policy": Policy(),
            "profile": profile,
            "platforms": ("local", "vastai"),
            "quote": Known(Quote(platform="vastai", price_usd_per_hour=2.0, source="test", at=0)),
            **mine,
        }
    )


def script(text: str) -> SubmitFacts:
    """Facts of a job with that script."""
    spec = JobSpec(platform="vastai", script=text, outputs=("out",), timeout_s=1_000)
    return replace(submit(), spec=spec, script=read_script(text))


CODE = InputFile(path="code/a.py", size=3, sha256="0" * 64)


def file(path: str = "out/a.safetensors", **more: Any) -> OutputFile:
    """One file of the job that dies with the machine and has a copy."""
    return OutputFile(**{"path": path, "size": 10, "tier": "disk", "dies": True, "copied": True, **more})


MACHINE = Known(Instance(id="i1", state=InstanceState.RUNNING, meter=True))


def teardown(**given: Any) -> TeardownFacts:
    """Facts of a machine that may go: the job ended well, and what dies is copied and proven."""
    whole = {
        "job_id": "j1",
        "job_state": Job.SUCCEEDED,
        "verb": "terminate",
        "profile": RENTED,
        "machine": MACHINE,
        "files": Known((file(),)),
        "manifest": Manifest(taken_at=0, files=()),
        "copy_verdict": Verdict.PROVEN,
        "disclosure": Known(Disclosure()),
    }
    return TeardownFacts(**{**whole, **given})


def looked(rule_id: str, severity: Severity = Severity.ERROR) -> SubmitFacts:
    return submit(
        looked=(Finding(rule=rule_id, severity=severity, message="it can't be written", fix=steps("Fix it.")),)
    )


GONE = {"machine": Known(None)}
HEADER = '# /// script\n# requires-python = ">=3.11"\n# dependencies = [{}]\n# ///\nimport torch\n'
MISPLACED = submit(load_profile("runpod"), outputs=("/root/out",), teardown="stop")
EVERY_SECRET = Policy(secrets=Secrets(allowed=("*",)))
ANYWHERE = changed(RENTED, "limits", default_timeout_s=1800)

# rule id -> (facts that it speaks up about, facts that it is silent about); more than one of each where cases differ.
EXAMPLES: dict[str, tuple[list[Any], list[Any]]] = {
    "PF-ACCT-001": ([looked("PF-ACCT-001")], [submit(), looked("PF-PLACE-001")]),
    "PF-COST-001": (
        [submit(quote=Unknown("no answer")), submit(quote=None)],
        [submit(), submit(quote=Unknown("no answer"), max_cost_usd=3), submit(OWNED, quote=None)],
    ),
    "PF-COST-002": (
        [submit(timeout_s=7200, max_cost_usd=3)],
        [submit(timeout_s=7200, max_cost_usd=4), submit(max_cost_usd=3, quote=Unknown("no answer")), submit()],
    ),
    "PF-OUT-001": ([submit(outputs=())], [submit()]),
    "PF-OUT-002": (
        [submit(), MISPLACED, submit(interruptible=True)],
        [submit(OWNED), submit(outputs=()), submit(None)],
    ),
    "PF-PLACE-001": ([looked("PF-PLACE-001")], [submit(), looked("PF-PLACE-002")]),
    "PF-PLACE-002": ([looked("PF-PLACE-002", Severity.WARNING)], [submit(), looked("PF-PLACE-001")]),
    "PF-PLT-001": ([submit(None)], [submit()]),
    "PF-PLT-002": (
        [submit(policy=Policy(platforms=("local",))), submit(policy=Policy(platforms=()))],
        [submit(), submit(policy=Policy(platforms=("vast*",)))],
    ),
    "PF-PLT-003": ([submit(unusable="no such backend")], [submit()]),
    "PF-PLT-004": ([submit(unsold="there is no such GPU")], [submit()]),
    "PF-IN-001": ([submit(inputs=(CODE,), inputs_left_out=("code/.git",))], [submit()]),
    "PF-SEC-004": (
        [submit(inputs=(CODE,), input_leaks=(Leak("code/a.py", "a token"),) * 11)],
        [submit(inputs=(CODE,))],
    ),
    "PF-SEC-001": ([submit(leaks=(Leak("args[0]", "a token"),))], [submit()]),
    "PF-SEC-002": ([submit(secrets=("HF_TOKEN",), unset_secrets=("HF_TOKEN",))], [submit(secrets=("HF_TOKEN",))]),
    "PF-SEC-003": (
        [
            submit(secrets=("PGPASSWORD",)),
            submit(secrets=("VAST_API_KEY",), account_secrets=("VAST_API_KEY",), policy=EVERY_SECRET),
            submit(secrets=("HF_TOKEN",), policy=Policy(secrets=Secrets(allowed=()))),
        ],
        [
            submit(secrets=("HF_TOKEN", "WANDB_API_KEY")),
            submit(secrets=("PGPASSWORD",), policy=EVERY_SECRET),
        ],
    ),
    "PF-SPOT-001": (
        [submit(changed(RENTED, "spot", offered=False), interruptible=True)],
        [submit(interruptible=True), submit(changed(RENTED, "spot", offered=False)), submit(None, interruptible=True)],
    ),
    "PF-SRC-001": (
        [script("def f(:"), script("# /// script\n# dependencies = [\n# ///\n")],
        [script("x = 1"), submit()],
    ),
    "PF-SRC-002": (
        [script("import torch"), script(HEADER.format(""))],
        [script(HEADER.format('"torch"')), script("import json"), script("import torch; def"), submit()],
    ),
    "PF-TIME-001": (
        [submit(timeout_s=None), submit(OWNED, timeout_s=None), submit(ANYWHERE, timeout_s=None)],
        [submit()],
    ),
    "PF-TIME-002": (
        [submit(timeout_s=1299, estimate_s=1000)],
        [submit(timeout_s=1300, estimate_s=1000), submit(), submit(timeout_s=None, estimate_s=1000)],
    ),
    "PF-VERB-001": (
        [submit(changed(RENTED, "verbs", stop=None), teardown="stop")],
        [submit(teardown="stop"), submit(None, teardown="stop"), submit(OWNED, teardown="stop")],
    ),
    "TD-COPY-001": (
        [teardown(files=Known((file(copied=False), file("b"))))],
        [
            teardown(),
            teardown(files=Known((file(copied=False, dies=False),))),
            teardown(files=Known((file(copied=False),)), **GONE),
        ],
    ),
    "TD-COPY-002": ([teardown(changed=("out/a",))], [teardown(), teardown(changed=("out/a",), **GONE)]),
    "TD-ELSE-001": (
        [
            teardown(disclosure=Unknown("no answer")),
            teardown(disclosure=Known(Disclosure(processes=("vim notes",)))),
            teardown(disclosure=Known(Disclosure(files=(Artifact(path="/root/x", size=1),)))),
            teardown(disclosure=Known(Disclosure(complete=False))),
        ],
        [teardown(), teardown(disclosure=Unknown("no answer"), **GONE)],
    ),
    "TD-ELSE-002": (
        [
            teardown(disclosure=Known(Disclosure(files=(Artifact(path=path, size=1),))))
            for path in (
                "final.safetensors",
                "save/model.pt",
                "/workspace/ckpt/last.ckpt",
                "runs/checkpoint-500/rng_state",
                "pytorch_model-00001-of-00002.bin",
                "model.ckpt-1.data-00000-of-00001",
                "out.gguf",
                "lightning_logs/version_0/checkpoints/epoch=1-step=2.ckpt",
                "trainer_state.json",
            )
        ],
        [
            teardown(),
            teardown(disclosure=Unknown("no answer")),
            teardown(disclosure=Known(Disclosure(files=(Artifact(path="a/model.pt", size=1),))), **GONE),
            *(
                teardown(disclosure=Known(Disclosure(files=(Artifact(path=path, size=1),))))
                for path in (
                    "samples/001.png",
                    "train.log",
                    "notes.txt",
                    "data.bin",
                    "cache/models--a--b/blobs/0a1b.safetensors",
                    "/root/.cache/torch/x.pth",
                    "lib/python3.12/site-packages/scipy/x.npz",
                    "data/train.parquet",
                )
            ),
        ],
    ),
    "TD-JOB-001": (
        [teardown(job_state=Job.RUNNING), teardown(job_state=Job.PREEMPTED), teardown(job_state=Job.UNKNOWN)],
        [teardown(), teardown(job_state=Job.FAILED), teardown(job_state=Job.RUNNING, **GONE)],
    ),
    "TD-JOB-002": ([teardown(other_jobs=("j2",))], [teardown()]),
    "TD-LOAD-001": (
        [teardown(copy_verdict=None), teardown(copy_verdict=Verdict.REFUTED), teardown(copy_verdict=Verdict.UNKNOWN)],
        [
            teardown(),
            teardown(copy_verdict=None, files=Known(())),
            teardown(copy_verdict=None, files=Known((file(copied=False),))),
            teardown(copy_verdict=None, **GONE),
        ],
    ),
    "TD-OUT-001": ([teardown(missing=("logs",))], [teardown(), teardown(missing=("logs",), **GONE)]),
    "TD-OUT-002": ([teardown(skipped=("out/link leaves its folder",))], [teardown(), teardown(skipped=("x",), **GONE)]),
    "TD-SEE-001": (
        [teardown(machine=Unknown("no answer")), teardown(files=Unknown("no answer"))],
        [teardown(), teardown(files=Unknown("no answer"), **GONE)],
    ),
    "TD-VERB-001": ([teardown(profile=changed(RENTED, "verbs", stop=None), verb="stop")], [teardown(verb="stop")]),
    "TD-VERB-002": (
        [teardown(verb="stop"), teardown(profile=changed(RENTED, "meter", stops_on=("stop",)))],
        [teardown()],
    ),
}

RULES = {r.id: r for r in catalog.all_rules()}


def test_every_rule_has_an_example_that_fires_and_one_that_is_silent() -> None:
    assert EXAMPLES.keys() | CASES.keys() == RULES.keys()  # those of scripts and the Hub are in test_rules_preflight
    assert [rule_id for rule_id, (fires, silent) in EXAMPLES.items() if not fires or not silent] == []


@pytest.mark.parametrize("rule_id", sorted(EXAMPLES))
def test_a_rule_speaks_where_it_should_and_only_there(rule_id: str) -> None:
    fires, silent = EXAMPLES[rule_id]
    for facts in fires:
        found = list(RULES[rule_id].run(facts))
        assert found and all(f.rule == rule_id and f.message and f.fix for f in found), facts
    for facts in silent:
        assert list(RULES[rule_id].run(facts)) == [], facts


def test_a_good_job_and_a_good_teardown_meet_no_rule_that_blocks() -> None:
    assert [f for f in run_rules(catalog.rules_of("submit"), submit(max_cost_usd=3)) if f.blocks] == []
    assert run_rules(catalog.rules_of("teardown"), teardown()) == []


def severities(rule_id: str, facts: object) -> set[Severity]:
    return {f.severity for f in RULES[rule_id].run(facts)}


@pytest.mark.parametrize(
    ("rule_id", "facts", "severity"),
    [
        ("PF-OUT-001", submit(OWNED, outputs=()), Severity.WARNING),
        ("PF-OUT-001", submit(outputs=()), Severity.ERROR),
        ("PF-OUT-002", MISPLACED, Severity.ERROR),
        ("PF-TIME-001", submit(OWNED, timeout_s=None), Severity.WARNING),
        ("PF-PLACE-001", looked("PF-PLACE-001", Severity.UNKNOWN), Severity.UNKNOWN),
        ("TD-LOAD-001", teardown(copy_verdict=Verdict.REFUTED), Severity.ERROR),
        ("TD-LOAD-001", teardown(copy_verdict=Verdict.REFUTED, copy_equal=True), Severity.ERROR),
        ("TD-LOAD-001", teardown(copy_verdict=Verdict.REFUTED, job_state=Job.FAILED), Severity.ERROR),
        (
            "TD-LOAD-001",
            teardown(copy_verdict=Verdict.REFUTED, job_state=Job.FAILED, copy_equal=True),
            Severity.WARNING,
        ),
        ("TD-LOAD-001", teardown(copy_verdict=None, job_state=Job.FAILED), Severity.ERROR),
        ("TD-LOAD-001", teardown(copy_verdict=Verdict.UNKNOWN), Severity.ERROR),
        ("TD-LOAD-001", teardown(copy_verdict=Verdict.UNKNOWN, copy_unread=("a.dat",)), Severity.WARNING),
        ("TD-LOAD-001", teardown(copy_verdict=Verdict.REFUTED, copy_unread=("a.dat",)), Severity.ERROR),
        ("TD-LOAD-001", teardown(copy_verdict=Verdict.REFUTED, copy_aside=("a.png",)), Severity.WARNING),
        ("TD-LOAD-001", teardown(copy_verdict=Verdict.UNKNOWN, copy_aside=("a.png",)), Severity.ERROR),
        ("TD-VERB-002", teardown(verb="stop"), Severity.WARNING),
        ("TD-VERB-002", teardown(profile=changed(RENTED, "meter", stops_on=("stop",))), Severity.ERROR),
    ],
)
def test_a_rule_weighs_each_case(rule_id: str, facts: object, severity: Severity) -> None:
    assert severity in severities(rule_id, facts)


def test_unknown_never_reads_as_safe() -> None:
    """Each unknown fact of a teardown is said; those about the machine and its files close the gate."""
    found = run_rules(
        catalog.rules_of("teardown"), teardown(machine=Unknown("x"), files=Unknown("x"), disclosure=Unknown("x"))
    )
    assert {f.rule for f in found} == {"TD-SEE-001", "TD-ELSE-001"}
    assert {f.rule for f in found if f.severity in BLOCKING} == {"TD-SEE-001"}


# ---------------------------------------------------------------------------------------------------- place, account


class Place:
    """A backend whose look at the place finds what it is told."""

    def __init__(self, look: Callable[[], list[Finding]]) -> None:
        self.look = look

    async def check(self, place: object) -> list[Finding]:
        return self.look()


def unreachable() -> list[Finding]:
    raise Unreachable("the host does not answer", "Is it on?")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("look", "rule_id", "blocks"),
    [
        (
            lambda: [Finding(rule="PF-PLACE-002", severity=Severity.WARNING, message="0.1 GB are free")],
            "PF-PLACE-002",
            False,
        ),
        (lambda: [Finding(rule="PF-PLACE-001", severity=Severity.ERROR, message="not writable")], "PF-PLACE-001", True),
        (lambda: [Finding(rule="SSH-9", severity=Severity.ERROR, message="no key")], "PF-PLACE-001", True),
        (unreachable, "PF-PLACE-001", True),
    ],
)
async def test_what_a_backend_says_of_a_place_passes_the_submit_gate(
    tmp_path: Path, look: Callable[[], list[Finding]], rule_id: str, blocks: bool
) -> None:
    from doors import quick_warden

    ctx = quick_warden(tmp_path / "home")
    ctx._backends["local"] = Place(look)  # type: ignore[assignment]
    facts = await gather(ctx, JobSpec(platform="local", command=("true",)))
    found = [f for f in run_rules(catalog.rules_of("submit"), facts) if f.rule == rule_id]
    assert [f.blocks for f in found] == [blocks]


# ------------------------------------------------------------------------------------------------------------- page


def test_the_page_is_the_one_that_the_rules_write() -> None:
    text = page.page_file().read_text("utf-8")
    assert text == page.render_page(in_calls), "run: gpuwarden rules --write"
    assert all(f"## {rule_id}: " in text for rule_id in RULES)


def test_a_rule_without_a_reason_or_with_a_wrong_id_is_refused() -> None:
    def bare(facts: object) -> list[Found]:
        return []

    def told(facts: object) -> list[Found]:
        """Title.

        Why: because.
        """
        return []

    with pytest.raises(ValueError, match="docstring"):
        rule("PF-X-001".replace("X", "XX"), gate="submit", severity=Severity.ERROR, fix="f")(bare)
    for wrong in ("PF-X-1", "pf-abc-001", "TD-ABC-001"):
        with pytest.raises(ValueError, match="not a rule id"):
            rule(wrong, gate="submit", severity=Severity.ERROR, fix="f")(told)
    assert rule("PF-ABC-001", gate="submit", severity=Severity.ERROR, fix="f")(told).why == "because."
