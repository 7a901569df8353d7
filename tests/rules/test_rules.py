"""Every rule has an example that fires and one that stays silent; the rules' page is generated from them."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpuwarden.rules
from gpuwarden.core.errors import NotSupported, Unreachable
from gpuwarden.core.models import (
    Artifact,
    Disclosure,
    JobSpec,
    Known,
    Unknown,
    Verdict,
)
from gpuwarden.core.policy import Policy, Secrets
from gpuwarden.core.rules import BLOCKING, Finding, Found, Severity, rule, run_rules
from gpuwarden.core.states import Job
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.lifecycle.submission.facts import gather
from gpuwarden.profiles import load_profile
from gpuwarden.rules import catalog, page
from gpuwarden.rules.facts import Leak, SubmitFacts
from preflight_cases import CASES
from rule_kit import (
    ANYWHERE,
    CODE,
    EVERY_SECRET,
    GONE,
    HEADER,
    MISPLACED,
    OWNED,
    RENTED,
    changed,
    example_files,
    examples_of,
    file,
    looked,
    script,
    submit,
    teardown,
)
from wording import Wording

STORED = Known((file(stored=True),))
# A new rule's example has its own file: tests/rule_examples/<the rule's module>.py, found by its name.
# rule id -> (facts that fire it, facts that do not); more than one of each if the cases differ.
EXAMPLES: dict[str, tuple[list[Any], list[Any]]] = {
    "PF-ACCT-001": ([looked("PF-ACCT-001")], [submit(), looked("PF-PLACE-001")]),
    "PF-COST-001": (
        [submit(quote=Unknown("no answer")), submit(quote=None), submit(quote=None, max_cost_usd=3, timeout_s=None)],
        [submit(), submit(quote=Unknown("no answer"), max_cost_usd=3), submit(OWNED, quote=None)],
    ),
    "PF-COST-002": (
        [submit(timeout_s=7200, max_cost_usd=3)],
        [submit(timeout_s=7200, max_cost_usd=4), submit(max_cost_usd=3, quote=Unknown("no answer")), submit()],
    ),
    "PF-STORE-001": (
        [
            submit(artifact_store=Unknown("no answer")),
            submit(artifact_store=Known("there is no bucket runs")),
            submit(artifact_store=Known(""), unset_store_keys=("GPUWARDEN_STORE_HF_TOKEN",)),
        ],
        [submit(), submit(artifact_store=Known(""))],
    ),
    "PF-OUT-001": (
        [submit(outputs=(name,) if name else ()) for name in ("", "out/*.pt", "~/out", "out/step-?", "$SCRATCH/out")],
        [submit(), submit(outputs=("out/a=1,b~2 [3] $",))],
    ),
    "PF-OUT-002": (
        [submit(), MISPLACED, submit(interruptible=True)],
        [submit(OWNED), submit(OWNED, outputs=("/dev/shm/out",)), submit(outputs=()), submit(None)],
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
        [
            teardown(files=Known((file(copied=False), file("b")))),
            teardown(files=Known((file(copied=False, stored=True), file("b", copied=False)))),
        ],
        [
            teardown(),
            teardown(files=Known((file(copied=False, stored=True), file("b")))),
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
        [
            *(teardown(copy_verdict=verdict) for verdict in (None, Verdict.REFUTED, Verdict.UNKNOWN)),
            teardown(copy_verdict=None, files=Known((file(copied=False, stored=True),))),
            teardown(files=Known((file(), file("b", copied=False, stored=True)))),
            teardown(copy_verdict=None, files=Known((file(), file("b", stored=True)))),
        ],
        [
            teardown(),
            teardown(copy_verdict=None, files=Known(())),
            teardown(copy_verdict=None, files=Known((file(copied=False),))),
            teardown(files=Known((file(stored=True),))),
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
FILES = example_files()


@pytest.mark.slow
def test_every_rule_has_firing_and_silent_examples() -> None:
    # CASES covers scripts and the Hub; `test_preflight.py` tries them one by one.
    assert EXAMPLES.keys() | FILES.keys() | CASES.keys() == RULES.keys()
    kept = EXAMPLES | {rule_id: examples_of(path) for rule_id, path in FILES.items()}
    assert [rule_id for rule_id, (fires, silent) in kept.items() if not fires or not silent] == []


LONG = {"PF-API-005", "PF-IN-002"}
"""Rules whose examples consist of many whole scripts."""


@pytest.mark.parametrize(
    "rule_id",
    [
        pytest.param(rule_id, marks=pytest.mark.slow if rule_id in LONG else ())
        for rule_id in sorted(EXAMPLES.keys() | FILES.keys())
    ],
)
def test_a_rule_fires_only_on_its_firing_examples(rule_id: str) -> None:
    fires, silent = EXAMPLES.get(rule_id) or examples_of(FILES[rule_id])
    for facts in fires:
        found = list(RULES[rule_id].run(facts))
        assert found and all(f.rule == rule_id and f.message and f.fix for f in found), facts
    for facts in silent:
        assert list(RULES[rule_id].run(facts)) == [], facts


def test_a_good_job_and_a_good_teardown_are_not_blocked() -> None:
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
        ("PF-OUT-002", submit(outputs=("/dev/shm/out",), teardown="stop"), Severity.ERROR),
        ("PF-OUT-002", submit(outputs=("/dev/shm/out",), interruptible=True), Severity.ERROR),
        ("PF-TIME-001", submit(OWNED, timeout_s=None), Severity.WARNING),
        ("PF-PLACE-001", looked("PF-PLACE-001", Severity.UNKNOWN), Severity.UNKNOWN),
        ("TD-LOAD-001", teardown(copy_verdict=Verdict.REFUTED), Severity.ERROR),
        ("TD-LOAD-001", teardown(copy_verdict=Verdict.REFUTED, copy_equal=True), Severity.ERROR),
        ("TD-LOAD-001", teardown(copy_verdict=Verdict.REFUTED, copy_equal=True, files=STORED), Severity.ERROR),
        ("TD-LOAD-001", teardown(copy_verdict=Verdict.UNKNOWN, copy_equal=True, files=STORED), Severity.WARNING),
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
        ("TD-VERB-002", teardown(profile=load_profile("runpod"), durable_storage=True), Severity.WARNING),
        ("TD-VERB-002", teardown(profile=changed(RENTED, "meter", stops_on=("stop",))), Severity.ERROR),
    ],
)
def test_a_rule_gives_each_case_its_severity(rule_id: str, facts: object, severity: Severity) -> None:
    assert severity in severities(rule_id, facts)


def test_unknown_never_reads_as_safe() -> None:
    """Every unknown fact of a teardown is reported; those about the machine and its files close the gate."""
    found = run_rules(
        catalog.rules_of("teardown"), teardown(machine=Unknown("x"), files=Unknown("x"), disclosure=Unknown("x"))
    )
    assert {f.rule for f in found} == {"TD-SEE-001", "TD-ELSE-001"}
    assert {f.rule for f in found if f.severity in BLOCKING} == {"TD-SEE-001"}


# ---------------------------------------------------------------------------------------------------- place, account


class Place:
    """A backend whose check of a place returns the findings of `look`."""

    takes_inputs = True

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
async def test_a_backends_findings_about_a_place_reach_the_submit_gate(
    tmp_path: Path, look: Callable[[], list[Finding]], rule_id: str, blocks: bool
) -> None:
    from doors import quick_warden

    ctx = quick_warden(tmp_path / "home")
    ctx._backends["local"] = Place(look)  # type: ignore[assignment]
    facts = await gather(ctx, JobSpec(platform="local", command=("true",)))
    found = [f for f in run_rules(catalog.rules_of("submit"), facts) if f.rule == rule_id]
    assert [f.blocks for f in found] == [blocks]


# ------------------------------------------------------------------------------------------------------------- page


def test_the_page_matches_the_generated_rules_page() -> None:
    text = page.page_file().read_text("utf-8")
    assert text == page.render_page(in_calls), "run: gpuwarden rules --write"
    assert all(f"## {rule_id}: " in text for rule_id in RULES)


def documented(example: str) -> SubmitFacts:
    """Return the facts of a documented example script. `# dependencies` without a header gets one."""
    if "# ///" not in example:
        example = re.sub(r"^(# dependencies = .*)$", r"# /// script\n\1\n# ///", example, flags=re.MULTILINE)
    return script(f"{example}\nimport os, subprocess, sys")


OF_SCRIPTS = [  # rules that read only the script
    "PF-API-001", "PF-API-002", "PF-API-003", "PF-API-004", "PF-API-007", "PF-API-008", "PF-DATA-005",
    "PF-DATA-006", "PF-DEP-001", "PF-DEP-002", "PF-DEP-003", "PF-ENV-001", "PF-ENV-002", "PF-ENV-003",
    "PF-OUT-004", "PF-PUSH-002", "PF-REL-001", "PF-REL-002", "PF-REL-003", "PF-SRC-002",
    "PF-SYS-001", "PF-SYS-002", "PF-SYS-003",
]  # fmt: skip


@pytest.mark.parametrize("rule_id", OF_SCRIPTS)
def test_a_documented_example_is_reported_and_its_alternative_passes(rule_id: str) -> None:
    assert list(RULES[rule_id].run(documented(RULES[rule_id].example)))
    assert not list(RULES[rule_id].run(documented(RULES[rule_id].instead)))


def test_every_documented_example_is_python() -> None:
    for documented_rule in RULES.values():
        missing = f"the docstring of {documented_rule.id} needs the sections Example: and Instead:"
        assert documented_rule.example and documented_rule.instead, missing
        ast.parse(documented_rule.example)
        ast.parse(documented_rule.instead)


def test_two_built_in_rules_cannot_share_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Path(importlib.import_module("gpuwarden.rules.pf_cost_001_cost_bounded").__file__ or "")
    (tmp_path / "pf_cost_001_again.py").write_text(first.read_text())
    monkeypatch.setattr(gpuwarden.rules, "__path__", [*gpuwarden.rules.__path__, str(tmp_path)])
    monkeypatch.setitem(sys.modules, "gpuwarden.rules.pf_cost_001_again", None)
    del sys.modules["gpuwarden.rules.pf_cost_001_again"]
    with pytest.raises(NotSupported, match="pf_cost_001_cost_bounded"):
        catalog.RULES.load("pf_cost_001_again")


def test_a_rule_without_a_reason_or_with_a_wrong_id_is_refused(wording: Wording) -> None:
    def bare(facts: object) -> list[Found]:
        return []

    def unexplained(facts: object) -> list[Found]:
        """Title, and no reason."""
        return []

    def full(facts: object) -> list[Found]:
        """Title.

        Why: because.

        Example:
            a = 1

        Instead:
            if a:
                b = 2

        """
        return []

    for check in (bare, unexplained):
        with pytest.raises(ValueError, match="PF-XX-001") as refused:
            rule("PF-XX-001", gate="submit", severity=Severity.ERROR, fix="f")(check)
        wording(refused, "PF-XX-001")
    for wrong in ("PF-X-1", "pf-abc-001", "TD-ABC-001"):
        with pytest.raises(ValueError, match=wrong) as refused:
            rule(wrong, gate="submit", severity=Severity.ERROR, fix="f")(full)
        wording(refused, wrong)
    made = rule("PF-ABC-001", gate="submit", severity=Severity.ERROR, fix="f")(full)
    assert (made.title, made.why, made.example, made.instead) == ("Title.", "because.", "a = 1", "if a:\n    b = 2")
