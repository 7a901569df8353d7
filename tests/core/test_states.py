"""The three state machines: every state can be reached, and refusals of illegal moves list the legal ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.core import states
from gpuwarden.core.errors import Conflict
from gpuwarden.core.states import JOB, LEASE, TEARDOWN, Job, Lease, Teardown, check_move, legal

TABLES = {Job: JOB, Lease: LEASE, Teardown: TEARDOWN}
FIRST = {Job: Job.DRAFT, Lease: Lease.NONE, Teardown: Teardown.REQUESTED}
PAIRS = [(a, b) for kind in TABLES for a in kind for b in kind]


@pytest.mark.parametrize("kind", TABLES)
def test_every_state_has_a_row_and_can_be_reached(kind: type) -> None:
    table = TABLES[kind]
    assert set(table) == set(kind)
    seen, edge = {FIRST[kind]}, {FIRST[kind]}
    while edge:
        edge = {n for s in edge for n in table[s]} - seen
        seen |= edge
    assert seen == set(kind)


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=lambda s: str(s))
def test_a_move_is_allowed_exactly_when_the_table_lists_it(old: Job, new: Job) -> None:
    if new in TABLES[type(old)][old]:
        check_move("x", old, new)
        return
    with pytest.raises(Conflict) as refused:
        check_move("x", old, new)
    for move in legal(old):
        assert move in str(refused.value)


def test_safety_critical_transitions_are_exact() -> None:
    reaches_stopped = {old for old, new in ((o, n) for o, ns in LEASE.items() for n in ns) if new is Lease.STOPPED}
    assert Lease.NONE not in reaches_stopped
    assert {old for old, ns in TEARDOWN.items() if Teardown.EXECUTING in ns} == {Teardown.APPROVED}
    assert {old for old, ns in TEARDOWN.items() if Teardown.APPROVED in ns} == {Teardown.AWAITING_HUMAN}
    assert {Job.SUCCEEDED, Job.FAILED, Job.CANCELED, Job.REFUSED} == states.TERMINAL_JOBS
    assert set(Lease) - {Lease.NONE, Lease.STOPPED} == states.LIVE_LEASES


@given(st.lists(st.sampled_from(list(Teardown)), max_size=12))
def test_teardown_executes_only_directly_after_an_approval(walk: list[Teardown]) -> None:
    state, path = Teardown.REQUESTED, [Teardown.REQUESTED]
    for step in walk:
        try:
            check_move("t", state, step)
        except Conflict:
            continue
        state = step
        path.append(step)
    for before, after in itertools.pairwise(path):
        if after is Teardown.EXECUTING:
            assert before is Teardown.APPROVED
