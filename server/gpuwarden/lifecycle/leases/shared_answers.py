"""Share responses within one pass over all jobs: one list of machines per platform, one poll of jobs per place.

A pass over a thousand machines queries their platform only once. A machine is queried separately if it is not in the
list, if the list reports it as gone or unclear, or if an event or a request for it is newer than the list. The jobs at
a place are polled in the same way. On a platform with a single machine, only that machine is queried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

import anyio

from gpuwarden.core.errors import BadReply, RateLimited, WardenError
from gpuwarden.core.models import Answer, Handle, Instance, InstanceState, Known, Observation, Unknown
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord
from gpuwarden.lifecycle.timeouts import in_time
from gpuwarden.providers.base import list_in_hand

FRESH_S: Final = 60.0
"""Seconds for which a shared answer is valid. A pass over many slow machines may take longer and query again."""
_UNTOLD: Final = frozenset({InstanceState.GONE, InstanceState.UNCLEAR})


@dataclass
class _List:
    """One platform's list. `seq` is the number of the ledger's last event before the request."""

    answer: Answer[tuple[Instance, ...]]
    seq: int
    at: float
    machines: dict[str, Instance | None] = field(default_factory=dict)
    """Machines by id, as listed or as returned by a later query for the id; None if the machine is gone."""
    there: set[str] = field(default_factory=set)
    limited: bool = False
    silent: bool | None = None
    """Whether a query for a single machine failed after the list request failed; None if no query was sent."""


@dataclass
class _Poll:
    """One poll of the jobs at a place. Each job's observation is used only once."""

    seq: int
    at: float
    asked: set[str]
    seen: dict[str, Observation] = field(default_factory=dict)
    error: WardenError | None = None


class SharedAnswers:
    """The answers from one pass over the given jobs and leases."""

    def __init__(self, ctx: Context, jobs: Iterable[JobRecord], leases: Iterable[LeaseRecord]) -> None:
        self.ctx = ctx
        self.hurried: set[str] = set()
        """Platforms that rate-limited a request to create a machine in this pass."""
        self._settled: dict[str, int] = {}
        self._machines = Counter(lease.platform for lease in leases)
        self._lists: dict[str, _List] = {}
        self._jobs: dict[str, dict[str, Handle]] = {}
        self._polls: dict[str, _Poll] = {}
        for handle in (job.handle for job in jobs if job.handle is not None and job.lease is None):
            self._jobs.setdefault(_where(handle), {})[handle.token] = handle

    def forget(self, platform: str, ident: str) -> None:
        """Remove a machine from its platform's list, because a newer request may have changed it."""
        if (known := self._lists.get(platform)) is not None:
            known.machines.pop(ident, None)

    async def machine(self, lease: LeaseRecord, ident: str) -> Answer[Instance | None]:
        """Return a lease's machine from its platform's list, or query the machine by its id if the list is not
        sufficient.
        """
        provider, many = self.ctx.provider(lease.platform), self._machines[lease.platform] > 1
        known = await self._list(lease.platform, ask=many)
        if isinstance(known.answer, Unknown):
            if known.limited or known.silent:
                return known.answer
            known.silent = True  # set to False below if this query succeeds
            answer = await provider.get(ident)
            known.silent = isinstance(answer, Unknown)
            return answer
        asked_before = self._last_seq(lease.subject) <= max(known.seq, self._settled.get(lease.subject, 0))
        if asked_before and ident in known.machines:
            return Known(known.machines[ident])
        known.machines.pop(ident, None)
        with list_in_hand(known.answer if many and asked_before and ident not in known.there else None):
            answer = await provider.get(ident)
        if isinstance(answer, Known):
            known.machines[ident] = answer.value
        return answer

    async def carrying(self, lease: LeaseRecord, token: str) -> Answer[tuple[Instance, ...]]:
        """Return the machines with a token, from their platform's list or by a query."""
        if self._machines[lease.platform] > 1:
            known = await self._list(lease.platform)
            if self._last_seq(lease.subject) <= max(known.seq, self._settled.get(lease.subject, 0)):
                if isinstance(known.answer, Unknown):
                    return known.answer
                return Known(tuple(i for i in known.answer.value if i.token == token))
        return await self.ctx.provider(lease.platform).find(token)

    def settled(self, subject: str) -> None:
        """Mark the answers about a lease as still valid, because the lease's newest events only record those."""
        self._settled[subject] = self._last_seq(subject)

    async def observation(self, job: JobRecord, handle: Handle) -> Observation | None:
        """Return the backend's observation of a job from one poll of all jobs at its place. Raises the poll's error."""
        where = _where(handle)
        there = self._jobs.get(where, {})
        known = self._polls.get(where)
        if known is not None and anyio.current_time() - known.at > FRESH_S:
            known = None
        if known is None and there.get(handle.token) == handle and len(there) > 1:
            known = self._polls[where] = _Poll(self.ctx.ledger.last_seq(), anyio.current_time(), set(there))
            try:
                known.seen = await self.ctx.backend(handle.backend).poll(list(there.values()))
            except WardenError as error:  # after BadReply, jobs are polled separately
                known.error = error
        there.pop(handle.token, None)
        if known is not None and handle.token in known.asked and self._last_seq(job.subject) <= known.seq:
            known.asked.remove(handle.token)
            if known.error is None:
                return known.seen.get(handle.token)
            if not isinstance(known.error, BadReply):
                raise known.error
        return (await self.ctx.backend(handle.backend).poll([handle])).get(handle.token)

    def _last_seq(self, subject: str) -> int:
        return self.ctx.ledger.history(subject)[-1].seq

    async def _list(self, platform: str, *, ask: bool = True) -> _List:
        known = self._lists.get(platform)
        if known is not None and anyio.current_time() - known.at <= FRESH_S:
            return known
        if not ask:
            known = self._lists[platform] = _List(Known(()), self.ctx.ledger.last_seq(), anyio.current_time())
        else:
            unread = Unknown(f"{platform} has not responded to the request for its list of machines")
            known = self._lists[platform] = _List(unread, self.ctx.ledger.last_seq(), anyio.current_time())
            try:
                known.answer = await in_time(platform, self.ctx.provider(platform).list())
            except WardenError as error:
                known.answer, known.limited = Unknown(error.message), isinstance(error, RateLimited)
            if isinstance(known.answer, Known):
                known.there = {i.id for i in known.answer.value if i.state is not InstanceState.GONE}
                # Query a running machine without a place separately, because AutoDL's list lacks addresses and prices.
                known.machines = {
                    i.id: i
                    for i in known.answer.value
                    if i.state not in _UNTOLD and (i.place is not None or i.state is not InstanceState.RUNNING)
                }
        return known


_WALK: ContextVar[SharedAnswers | None] = ContextVar("shared_answers", default=None)


def _where(handle: Handle) -> str:
    return f"{handle.backend} {handle.place.model_dump_json()}"


def shared_answers(ctx: Context) -> SharedAnswers | None:
    """Return the shared answers of the current pass over this context's jobs; None outside a pass."""
    walk = _WALK.get()
    return walk if walk is not None and walk.ctx is ctx else None


@contextmanager
def sharing(ctx: Context, jobs: Iterable[JobRecord], leases: Iterable[LeaseRecord]) -> Iterator[SharedAnswers]:
    """Share the answers about the given jobs and leases within this task."""
    walk = SharedAnswers(ctx, jobs, leases)
    token = _WALK.set(walk)
    try:
        yield walk
    finally:
        _WALK.reset(token)


@contextmanager
def sharing_nothing() -> Iterator[None]:
    """Disable sharing within this task. An approval needs current facts, so each machine and job is queried again."""
    token = _WALK.set(None)
    try:
        yield
    finally:
        _WALK.reset(token)
