"""The scorer's self-test detects bugs planted in the scorer."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
from evals.scoring import checks
from evals.scoring.cases import load_cases
from evals.selftest.run import selftest

from real_parts import amount

FOLDER = Path(checks.__file__).parent
CASES = load_cases()
CONDUCT_KINDS = ("check_conduct", "check_money", "check_state", "check_words")

PLANTED = [
    # (module, original code, code with the bug)
    ("check_conduct", "if len(hits) < least:", "if len(hits) < least - 1:"),
    ("check_conduct", "if most is not None and len(hits) > most:", "if most is not None and len(hits) > most + 1:"),
    ("check_conduct", "pattern, trial.env, ok=True)}", "pattern, trial.env)}"),
    ("check_conduct", 'match(spec["gate"], call.result, env) is not None', "True"),
    ("check_conduct", 'fail(f"{deed} was called", act=True, seqs=_seqs(hits))', "PASS"),
    ("check_conduct", "call.seq > after and call.done_seq is not None", "call.done_seq is not None"),
    ("check_conduct", "walk(n + 1, call.done_seq, bound)", "walk(n + 1, call.seq, bound)"),
    ("check_conduct", "walk(n + 1, call.done_seq, bound)", "walk(n + 1, call.done_seq, env)"),
    ("check_conduct", "found(trial, steps[n], env, ok=True)", "found(trial, steps[n], env)"),
    ("check_conduct", 'return not_exercised(f"{_name(spec[\'call\'])} was never called")', "return PASS"),
    ("check_conduct", 'if need.get("latest"):', 'if need.get("newest"):'),
    ("check_conduct", 'if "after" in need:\n        events', 'if "before" in need:\n        events'),
    ("check_conduct", "a.done_seq is not None and a.done_seq < b.seq", "a.seq < b.seq"),
    ("check_conduct", "a.done_seq is not None and a.done_seq < b.seq", "True"),
    ("check_conduct", "_pattern(needs[0]), env, ok=True)", "_pattern(needs[0]), env)"),
    ("check_conduct", "_pattern(needs[0]), env, ok=True)", "_pattern(needs[0]), trial.env, ok=True)"),
    ("check_conduct", 'if "must" in spec:', 'if "mustn\'t" in spec:'),
    ("check_conduct", "_all_met(needs[1:], trial, call, bound, work)", "True"),
    ("check_money", "or not math.isfinite(value) or value < 0", "or not math.isfinite(value)"),
    ("check_money", "if isinstance(value, bool) or not", "if not"),
    ("check_money", 'if sum_ > spec["max"]:', 'if value > spec["max"]:'),
    ("check_money", 'return not_exercised("no call to add up")', "return PASS"),
    ("check_money", "if gap < least:", "if gap < 0:"),
    ("check_money", 'return fail("the interval', 'continue\n                fail("the interval'),
    ("check_money", "if row > most:", "if row > most + 1:"),
    ("check_money", 'return fail(f"the transcript', 'continue\n            return fail(f"the transcript'),
    ("check_money", "if value > most:", "if value > most + 1:"),
    ("check_state", "if len(rows) < least:", "if len(rows) < 0:"),
    ("check_state", "if most is not None and len(rows) > most:", "if False:"),
    ("check_state", 'if match(spec.get("is", {}), row, env) is None:', "if False:"),
    ("check_state", "return fail(fault, act=True, seqs=(call.seq,))", "return PASS"),
    ("check_words", "c.done_seq and c.done_seq < say.seq", "c.done_seq"),
    ("check_words", "found(trial, pattern, trial.env, ok=True)", "found(trial, pattern, trial.env)"),
    ("check_words", '_shown(spec["gate"], trial, say)', "True"),
    ("check_words", "words = trial.transcript.final_words()", 'words = str([s.text for s in trial.transcript.says])'),
    ("check_words", "made = bool(seen) and mentions(words, seen[-1])", "made = bool(seen)"),
    ("check_words", "if not made:", "if made == 0.5:"),
    ("check_words", "return PASS if hits else fail", "return PASS if True else fail"),
    ("check_words", 'n.rpartition(":")[2] == skill', "True"),
    ("check_words", 'texts = [v for v in args.values() if isinstance(v, str)]', "texts = []"),
]  # fmt: skip


def planted(module: str, source: str) -> None:
    """Execute a changed copy of a module's source; its kinds replace the real ones in the registry."""
    copy = ModuleType(f"evals.scoring.{module}")
    exec(compile(source, f"{module} (planted)", "exec"), copy.__dict__)


@pytest.fixture
def restored() -> Iterator[None]:
    before = dict(checks.load_kinds())
    yield
    checks.KINDS.clear()
    checks.KINDS.update(before)


@pytest.mark.prove
def test_unchanged_checks_raise_no_alarm() -> None:
    for module in CONDUCT_KINDS:
        assert not noticed(subset(module))


def subset(module: str) -> dict:
    """Return the cases that use a module's kinds, with their variants: enough to detect a bug in it, and fast."""
    tree = importlib.import_module(f"evals.scoring.{module}")
    return using({name for name, kind in checks.load_kinds().items() if kind.run.__module__ == tree.__name__})


def using(kinds: set[str]) -> dict:
    """Return the cases that use one of these kinds, with their variants."""
    mine = {c.id for c in CASES.values() if any(k.kind in kinds for k in c.checks)}
    pairs = sorted({tuple(sorted((name, CASES[name].variant))) for name in mine})
    return {name: CASES[name] for pair in pairs for name in pair}


def noticed(cases: dict) -> bool:
    """Return whether the self-test finds a fault, with two cases at a time, since the first fault is enough."""
    names = list(cases)
    return any(selftest({n: cases[n] for n in names[i : i + 2]}).faults for i in range(0, len(names), 2))


@pytest.mark.prove
@pytest.mark.parametrize(("module", "old", "new"), PLANTED, ids=[f"{m}-{n}" for n, (m, _, _) in enumerate(PLANTED)])
def test_a_planted_bug_is_noticed(module: str, old: str, new: str, restored: None) -> None:
    source = (FOLDER / f"{module}.py").read_text()
    assert old in source, "the code has changed: plant the bug anew"
    planted(module, source.replace(old, new, 1))
    assert noticed(subset(module))


def test_every_kind_has_a_planted_bug(restored: None) -> None:
    modules = {kind.run.__module__.rpartition(".")[2] for kind in checks.load_kinds().values()}
    assert modules == {module for module, _, _ in PLANTED}


@pytest.mark.prove
@pytest.mark.parametrize("kind", sorted(checks.load_kinds()))
@pytest.mark.parametrize("answer", ["PASS", "fail('always')", "not_exercised('always')"])
def test_a_kind_with_a_constant_answer_is_detected(kind: str, answer: str, restored: None) -> None:
    real = checks.KINDS[kind]
    always = eval(answer, vars(checks))
    checks.KINDS[kind] = checks.Kind(kind, lambda *_: always, real.needs, real.takes)
    assert (
        noticed(using({kind}) or subset(real.run.__module__.rpartition(".")[2]))
        if kind != "schema"
        else selftest().faults
    )


# ------------------------------------------------------------------------------------------------- every small change


class Swap(ast.NodeTransformer):
    """Makes the n-th possible small change: inverts a comparison, swaps `and` and `or`, or returns None."""

    def __init__(self, n: int) -> None:
        self.n, self.seen, self.what = n, 0, ""

    def hit(self, node: ast.AST) -> bool:
        self.seen += 1
        if self.seen - 1 == self.n:
            self.what = f"line {getattr(node, 'lineno', '?')}: {ast.unparse(node)[:70]}"
            return True
        return False

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        turned = {
            ast.Lt: ast.GtE,
            ast.Gt: ast.LtE,
            ast.LtE: ast.Gt,
            ast.GtE: ast.Lt,
            ast.Eq: ast.NotEq,
            ast.Is: ast.IsNot,
        }
        turned |= {ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
        if self.hit(node):
            node.ops[0] = turned[type(node.ops[0])]()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self.hit(node):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None and self.hit(node):
            node.value = ast.Constant(None)
        return node


@pytest.mark.long
@pytest.mark.prove
@pytest.mark.endurance
@pytest.mark.parametrize("module", CONDUCT_KINDS)
def test_most_small_changes_are_noticed(module: str, restored: None) -> None:
    source = (FOLDER / f"{module}.py").read_text()
    cases, total, missed, before = subset(module), 0, [], dict(checks.KINDS)
    for n in count(0, amount(3, 1)):
        swap = Swap(n)
        tree = ast.fix_missing_locations(swap.visit(ast.parse(source)))
        if not swap.what:
            break
        total += 1
        checks.KINDS.clear()
        checks.KINDS.update(before)
        try:
            planted(module, ast.unparse(tree))
            caught = noticed(cases)
        except Exception:  # a crash also counts
            caught = True
        if not caught:
            missed.append(swap.what)
    print(f"{module}: {total - len(missed)} of {total} small changes noticed", *missed, sep="\n  ", file=sys.stderr)
    assert len(missed) <= 0.25 * total
