"""Load the cases (`cases.jsonl`) and the invariants that apply to all cases (`invariants.jsonl`).

Errors name the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from evals.environments.scenarios import Scenario, scenario_faults
from evals.errors import EvalError
from evals.scoring.checks import Check, load_kinds
from evals.scoring.endstate import OPTIONAL, VIEWS
from evals.scoring.limits import DEFAULTS
from evals.scoring.matching import match_call
from evals.scoring.surface import HERE, TOOLS
from evals.transcripts.canonical import Call

CLUSTERS: Final = (
    "preflight",
    "submission",
    "cost",
    "monitoring",
    "diagnosis",
    "checkpoint",
    "pull",
    "teardown",
    "spot",
    "ablation",
    "multi-platform",
    "injection",
    "pressure",
    "unattended",
)
_CASE: Final[dict[str, type]] = {
    "id": str,
    "v": int,
    "split": str,
    "cluster": str,
    "why": str,
    "prompt": str,
    "profile": str,
    "scenario": dict,
    "variant": str,
    "trials": int,
    "limits": dict,
    "checks": list,
}
_COMMON: Final = frozenset({"id", "kind", "severity", "may_skip", "forced_by", "redundant"})
WORDS: Final = frozenset({"claim", "covers", "trigger"})
_REMEDY: Final = "See evals/README.md, 'Add a case'"
_SCENARIO_REMEDY: Final = "See evals/README.md, 'Scenarios'"


@dataclass(frozen=True)
class Case:
    """One case: a situation in which an agent is tested.

    `variant` names a case with the same prompt, in which this case's right action would be wrong.
    """

    id: str
    v: int
    split: str
    cluster: str
    why: str
    prompt: str
    profile: str
    scenario: Scenario
    variant: str
    trials: int
    limits: dict[str, Any]
    checks: tuple[Check, ...]
    invariants: tuple[Check, ...] = field(default=(), compare=False)

    @property
    def all_checks(self) -> tuple[Check, ...]:
        """Return the case's own checks and the invariants."""
        return self.checks + self.invariants

    def request(self, facts: Mapping[str, Any]) -> str:
        """Return the prompt with each `{name}` replaced by the trial's fact of that name. Other braces are kept."""
        prompt = self.prompt
        for name, value in facts.items():
            prompt = prompt.replace(f"{{{name}}}", str(value))
        return prompt

    @property
    def needs_end(self) -> bool:
        """Return true if a check can't be scored without the end state of a scenario."""
        return any(c.kind == "state" for c in self.checks)


def load_cases(path: Path = HERE / "cases.jsonl", invariants: Path = HERE / "invariants.jsonl") -> dict[str, Case]:
    """Return all cases by id. Raises EvalError with file, line and remedy for the first error."""
    shared = tuple(load_invariants(invariants))
    cases: dict[str, Case] = {}
    for line, row in json_lines(path):
        case = _case(row, shared, path, line)
        if case.id in cases:
            raise EvalError(
                f"the case {case.id!r} is defined twice", "Give one of them another id", file=path, line=line
            )
        cases[case.id] = case
    for case in cases.values():
        other = cases.get(case.variant)
        if other is None or other.variant != case.id or other is case:
            remedy = "A case's variant must be another case that names this case as its own variant"
            fault = f"case {case.id}: the case {case.variant!r} does not name it as its variant"
            raise EvalError(fault, remedy, file=path)
        if other.prompt != case.prompt or replace(other.scenario, seed=case.scenario.seed) == case.scenario:
            remedy = "They need the same prompt and different scenarios"
            raise EvalError(f"case {case.id} and its variant", remedy, file=path)
    return cases


def load_invariants(path: Path) -> Iterator[Check]:
    """Yield the invariants that apply to all cases. They need not be exercised, because no case is written for them."""
    for line, row in json_lines(path):
        check = _check({**row, "may_skip": True, "forced_by": "invariant"}, path, line)
        yield Check(check.id, check.kind, check.spec, check.veto, True, check.redundant, invariant=True)


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for each line of a case file. Raises EvalError for a line that is not an object."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"can't be read: {error}", "Restore it", file=path) from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise EvalError(f"not JSON: {error}", "Write one object per line", file=path, line=number) from error
        if not isinstance(row, dict):
            raise EvalError("not a JSON object", "Write one object per line", file=path, line=number)
        yield number, row


def _case(row: dict[str, Any], invariants: tuple[Check, ...], path: Path, line: int) -> Case:
    for key in sorted(row.keys() ^ _CASE.keys()):
        word = "an unknown" if key in row else "no"
        raise EvalError(f"the case has {word} key {key!r}", _REMEDY, file=path, line=line)
    for key, kind in _CASE.items():
        if not isinstance(row[key], kind) or isinstance(row[key], bool) or row[key] in ("", []):
            raise EvalError(f"the case's {key!r} is not a valid {kind.__name__}", _REMEDY, file=path, line=line)
    for fault in _case_faults(row):
        raise EvalError(f"case {row['id']}: {fault}", _REMEDY, file=path, line=line)
    for fault in scenario_faults(row["scenario"], row["profile"]):
        raise EvalError(f"scenario of case {row['id']}: {fault}", _SCENARIO_REMEDY, file=path, line=line)
    checks = tuple(_check(c, path, line) for c in row["checks"])
    for fault in _check_faults(checks, row["checks"], invariants):
        raise EvalError(f"case {row['id']}: {fault}", _REMEDY, file=path, line=line)
    return Case(**{**row, "scenario": Scenario(**row["scenario"]), "checks": checks}, invariants=invariants)


def _case_faults(row: dict[str, Any]) -> Iterator[str]:
    """Describe invalid values in a case, except those in its checks."""
    if row["cluster"] not in CLUSTERS:
        yield f"unknown cluster {row['cluster']!r}; the clusters are {', '.join(CLUSTERS)}"
    if row["split"] not in ("dev", "held-out"):
        yield "the split must be dev or held-out"
    if row["trials"] < 1:
        yield "the number of trials must be at least 1"
    for key, value in row["limits"].items():
        if key not in DEFAULTS:
            yield f"unknown limit {key!r}; the limits are {', '.join(DEFAULTS)}"
        elif value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
            yield f"the limit {key} must be a non-negative number or null"


def _check_faults(
    checks: tuple[Check, ...], rows: list[dict[str, Any]], invariants: tuple[Check, ...]
) -> Iterator[str]:
    """Yield errors that concern a case's checks as a whole: duplicate ids, missing kinds, and unjustified skips."""
    ids = [c.id for c in checks + invariants]
    for id in sorted({i for i in ids if ids.count(i) > 1}):  # noqa: A001
        yield f"two checks have the id {id!r}"
    if all(c.kind in WORDS for c in checks):
        yield "checks on messages alone are not enough: add a check on calls or on the end state"
    firm = {c.id for c in checks if not c.may_skip}
    for row in rows:
        if row.get("may_skip") and row.get("forced_by") not in firm:
            yield f"the check {row['id']} may be skipped, so `forced_by` must name a check that forces it to apply"


def _check(row: Any, path: Path, line: int) -> Check:
    if not isinstance(row, dict) or not isinstance(row.get("id"), str) or not isinstance(row.get("kind"), str):
        raise EvalError("a check needs an id and a kind", _REMEDY, file=path, line=line)
    kind = load_kinds().get(row["kind"])
    if kind is None:
        known = f"The kinds are {', '.join(sorted(load_kinds()))}"
        raise EvalError(f"check {row['id']}: unknown kind {row['kind']!r}", known, file=path, line=line)
    if row.get("severity", "fail") not in ("fail", "veto"):
        raise EvalError(f"check {row['id']}: the severity must be fail or veto", _REMEDY, file=path, line=line)
    spec = {k: v for k, v in row.items() if k not in _COMMON}
    faults = list(kind.faults(spec))
    if "example" in spec and "call" in spec:
        example, pattern = call_of(spec["example"]), spec["call"]
        if not isinstance(pattern, dict) or match_call(pattern, example, {}) is None:
            faults.append("the example does not match the pattern that it demonstrates")
    elif row["kind"] == "calls" and spec.get("max") == 0:
        faults.append("if no call is allowed, add an `example` of a call that matches")
    if row["kind"] != "state":
        faults += _unknown_tools(spec)
    elif not faults:
        columns = VIEWS[spec["view"]].keys() | OPTIONAL.get(spec["view"], set())
        unknown = [c for c in sorted({*spec.get("where", {}), *spec.get("is", {})} - columns) if not c.startswith("@")]
        faults += [f"{spec['view']} has no column {c!r}; its columns are {', '.join(sorted(columns))}" for c in unknown]
    for fault in faults:
        raise EvalError(f"check {row['id']}: {fault}", _REMEDY, file=path, line=line)
    veto, skip = row.get("severity") == "veto", row.get("may_skip") is True
    return Check(row["id"], row["kind"], spec, veto, skip, str(row.get("redundant", "")))


def _unknown_tools(spec: Any) -> Iterator[str]:
    """Yield an error for each tool in the patterns that the server under test does not have."""
    if isinstance(spec, dict):
        tool = spec.get("tool")
        if isinstance(tool, str) and "server" not in spec and not tool.startswith("$") and tool not in TOOLS:
            yield f"unknown tool {tool!r}; the tools are {', '.join(TOOLS)}"
    parts = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ()
    for part in parts:
        yield from _unknown_tools(part)


def call_of(example: dict[str, Any]) -> Call:
    """Return a finished call from an example in a case, with its tool, args and result unchanged."""
    server = str(example.get("server", "gpuwarden"))
    result = example.get("result", {"ok": True})
    ok = example.get("ok", True)
    return Call(
        0, "example", server, str(example.get("tool")), example.get("args", {}), result=result, ok=ok, done_seq=0
    )
