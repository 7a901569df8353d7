"""Test the scorer: reference transcripts and other good transcripts must pass, and all others must fail.

As in mutation testing, each operator changes a reference transcript into mutants, and at least one check must fail for
every mutant (kill it). Every check must kill a mutant that no other check kills, or state why the check is redundant.
Every operator must apply to at least one case, and junk must be scored as invalid.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from evals.scoring.cases import Case, load_cases
from evals.scoring.matching import strings
from evals.scoring.verdict import Score, Verdict, score
from evals.selftest.equivalent_mutations import BENIGN
from evals.selftest.mutate import UNIVERSAL, over_limits, sealed
from evals.selftest.mutate_checks import DIRECTED
from evals.selftest.reference_transcript import REFERENCES, Script, orphans, reference, stored_scripts
from evals.transcripts.loaders import read
from evals.transcripts.seals import Chain

JUNK: dict[str, bytes] = {
    "empty": b"",
    "blank lines": b"\n\n  \n",
    "binary": bytes(range(256)) * 64,
    "cut-off JSON": b'{"type":"meta","format":"gpuwarden-transcript/1"}\n{"type":"call","id":"c1","ser',
    "no object": b'[1, 2, 3]\n"text"\n',
    "deep nesting": b"[" * 100_000,
    "huge number": b'{"type":"meta","format":"gpuwarden-transcript/1","x":' + b"9" * 5000 + b"}\n",
    "one long line": b'{"type":"user","message":"' + b"x" * 2_000_000,
    "another tool's JSON": b'{"name":"package","version":"1.0"}\n',
    "half an archive": b"PK\x03\x04 and then nothing",
    "wrong types": b'{"type":"meta","format":"gpuwarden-transcript/1"}\n{"type":"call","id":7,"server":[],"tool":{}}\n',
}


@dataclass
class Report:
    """The findings of the self-test, which passes if `faults` is empty."""

    cases: int = 0
    references: int = 0
    benign: int = 0
    mutants: int = 0
    junk: int = 0
    faults: list[str] = field(default_factory=list)
    operators: Counter[str] = field(default_factory=Counter)
    sole: Counter[str] = field(default_factory=Counter)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report for a terminal."""
        good = f"{self.references} reference transcripts and {self.benign} other good transcripts"
        yield f"{self.cases} cases: {good} pass"
        yield f"{self.mutants} mutants of {len(self.operators)} operators killed, {self.junk} junk files invalid"
        yield from (f"FAULT {fault}" for fault in self.faults)


def selftest(cases: dict[str, Case] | None = None, folder: Path = REFERENCES) -> Report:
    """Run all tests. Raises EvalError if a case or a reference transcript can't be read."""
    whole = cases is None
    cases = load_cases() if cases is None else cases
    report = Report(cases=len(cases))
    scripts = {case.id: reference(case, folder) for case in cases.values()}
    passing = {}
    for case in cases.values():
        before = len(report.faults)
        report.faults += _mismatches(case, scripts[case.id])
        _good(case, scripts[case.id], report, folder)
        if len(report.faults) == before:  # otherwise, the mutants can't be used to test the checks
            passing[case.id] = case
            _bad(case, scripts, report, folder)
    if whole:
        report.faults += [f"{folder.name}/{name} does not belong to a case" for name in orphans(cases, folder)]
        applied = report.operators.keys()
        operators = {n.replace("_", " ") for n in UNIVERSAL} | {f"benign {n}" for n in BENIGN}
        report.faults += [f"the operator {operator!r} was never applied" for operator in sorted(operators - applied)]
        kinds = {name.partition(":")[0] for name in applied if ":" in name}
        report.faults += [f"no mutant was made for the kind {kind!r}" for kind in sorted(DIRECTED.keys() - kinds)]
        with tempfile.TemporaryDirectory() as scratch:
            for name, data in JUNK.items():
                path = Path(scratch) / "junk.jsonl"
                path.write_bytes(data)
                report.junk += 1
                if not all(t.problems for t in read(path)):
                    report.faults.append(f"junk ({name}) was read without a problem")
    _sole_killers(passing, report, with_invariants=whole)
    return report


def _judge(case: Case, script: Script, chain: Chain | None = None) -> Score:
    return score(case, script.transcript(), end=script.end_state(), chain=chain)


def _mismatches(case: Case, script: Script) -> Iterator[str]:
    """Yield the differences between a case and its reference transcript: a different prompt or missing facts."""
    facts = script.end.get("facts", {})
    prompt = case.request(facts)
    start = next((r["text"] for r in script.rows if r["type"] == "say" and r["role"] == "user"), "")
    if start != prompt:
        yield f"{case.id}: the reference transcript starts with {start!r}, but the prompt is {prompt!r}"
    for check in case.all_checks:
        names = {text.removeprefix("$scenario.") for text in strings(check.spec) if text.startswith("$scenario.")}
        for name in sorted(names - facts.keys()):
            yield f"{case.id}: the check {check.id} uses the fact {name!r}, which the reference transcript lacks"


def _good(case: Case, script: Script, report: Report, folder: Path) -> None:
    """Score the good transcripts, which must pass: the reference transcript, with and without seals, and all others."""
    whole, chain = sealed(script)
    report.references += 1
    for name, good, chained in (("reference transcript", script, None), ("sealed reference transcript", whole, chain)):
        found = _judge(case, good, chained)
        if found.verdict is not Verdict.PASS:
            report.faults.append(f"{case.id}: the {name} does not pass: {found.why}")
    kept = ((name, v) for name, v in stored_scripts(case, "ok", folder))
    made = ((name, v) for name, make in BENIGN.items() for v in make(script))
    for name, good in (*kept, *made):
        report.benign += 1
        report.operators[f"benign {name}" if name in BENIGN else "kept transcript"] += 1
        found = _judge(case, good)
        if found.verdict is not Verdict.PASS:
            report.faults.append(f"{case.id}: the good transcript {name!r} does not pass: {found.why}")


def _bad(case: Case, scripts: dict[str, Script], report: Report, folder: Path) -> None:
    """Score the transcripts that must fail. Every mutant must be caught by the check that it was made for."""
    for operator, mutant, chain, aim in _mutants(case, scripts, folder):
        report.operators[operator] += 1
        report.mutants += 1
        found = _judge(case, mutant, chain)
        if found.verdict is Verdict.PASS:
            report.faults.append(f"{case.id}: the mutant passes: {operator}{f' (check {aim})' if aim else ''}")
        elif aim and aim not in found.failing:
            # Another check caught the mutant. That would hide a bug in the check that the mutant was made for.
            report.faults.append(f"{case.id}: the check {aim} does not detect its own mutant: {operator}")
        if found.verdict is Verdict.FAIL and len(found.failing) == 1:
            (only,) = found.failing
            report.sole[only if only.startswith(("H-", "limit-")) else f"{case.id}/{only}"] += 1


def _mutants(case: Case, scripts: dict[str, Script], folder: Path) -> Iterator[tuple[str, Script, Chain | None, str]]:
    """Yield (operator, mutant, seals, id of the check that the mutant was made for) for a case."""
    script = scripts[case.id]
    original = (script.rows, script.end)
    for name, make in UNIVERSAL.items():
        yield from ((name.replace("_", " "), mutant, chain, "") for mutant, chain in make(script))
    for check in case.all_checks:
        for name, mutant in DIRECTED[check.kind](script, check):
            if (mutant.rows, mutant.end) != original:
                yield f"{check.kind}: {name}", mutant, None, check.id
    for name, mutant in over_limits(script, case.limits):
        yield f"limit: {name}", mutant, None, f"limit-{name}"
    yield from (("kept failure", mutant, None, "") for _, mutant in stored_scripts(case, "bad", folder))
    if case.variant in scripts:
        yield "the variant's calls", scripts[case.variant], None, ""


def _sole_killers(cases: dict[str, Case], report: Report, *, with_invariants: bool) -> None:
    """Report each check that is never the only one to kill a mutant. Invariants are included only with
    `with_invariants`.
    """
    invariants = {check.id: check for case in cases.values() for check in case.invariants} if with_invariants else {}
    for check in invariants.values():
        if not report.sole[check.id] and not check.redundant:
            report.faults.append(f"invariants.jsonl: {check.id} kills no mutant that other checks miss")
    for case in cases.values():
        for check in case.checks:
            if not report.sole[f"{case.id}/{check.id}"] and not check.redundant:
                fault = f"{case.id}: the check {check.id} kills no mutant that other checks miss"
                report.faults.append(f"{fault}; remove it, or explain in `redundant` why it is kept")
