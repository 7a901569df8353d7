"""Read what the policy says about a team: who may approve, and what each person and each project may spend."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpuwarden.core.errors import Conflict, Refused
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import JobSpec
from gpuwarden.core.policy import Allowance
from gpuwarden.core.sanitize import line
from gpuwarden.ledger.events import ReceiptIssued
from gpuwarden.ledger.fold import JobRecord
from gpuwarden.lifecycle.context import Context
from gpuwarden.people import person_of


def person_here(ctx: Context) -> str:
    """Return on whose behalf the present call is made."""
    return person_of(ctx.ledger.acting)


def check_approver(ctx: Context) -> None:
    """Raise Refused where the policy lists who may approve and the present call is made for somebody else."""
    listed, person = ctx.policy.team.approvers, person_here(ctx)
    if listed and person not in listed:
        raise Refused(
            f"{line(person, 80) or 'whoever asks'} may not approve",
            f"By the policy these may: {', '.join(listed)}.",
        )


def check_name(ctx: Context, person: str) -> None:
    """Raise Refused where somebody else than an approver makes what acts in another person's name.

    A passkey approves as its person, and a token spends as its person: either would get round the policy's lists.
    """
    listed, maker = ctx.policy.team.approvers, person_here(ctx)
    if listed and maker not in {*listed, person}:
        raise Refused(
            f"{line(maker, 80) or 'whoever asks'} may not make a token or a passkey of {line(person, 80)}",
            f"Let that person make it, or one who may approve by the policy: {', '.join(listed)}.",
        )


def check_receipt(ctx: Context, receipt: str) -> None:
    """Raise Conflict where people have caps and a receipt is of another person: so is the yes to its spending."""
    issued = ctx.ledger.last(f"receipt/{receipt}", ReceiptIssued)
    asked = person_of(issued.actor) if issued else ""
    if ctx.policy.team.people and asked != person_here(ctx):
        raise Conflict(
            f"the receipt is of {line(asked, 80) or 'somebody else'}, and so is the approval of its spending",
            do(Action.SUBMIT, "for a receipt of your own", receipt=""),
        )


def unlisted(ctx: Context, spec: JobSpec, person: str) -> str:
    """Return why a person is asked about a job of nobody, or of no project, that the policy has a cap for."""
    team = ctx.policy.team
    if team.people and person not in team.people:
        return f"the policy has no cap for the person {line(person, 80) or '(unknown)'}"
    if team.projects and spec.project not in team.projects:
        return f"the policy has no cap for the project {line(spec.project, 80) or '(none)'}"
    return ""


def allowances(
    ctx: Context, spec: JobSpec, person: str
) -> Iterator[tuple[str, Allowance, Callable[[JobRecord], bool]]]:
    """Yield the caps of a job's person and of its project, with which jobs count towards them."""
    team = ctx.policy.team
    if person in team.people:
        yield f"team.people.{person}", team.people[person], lambda job: job.person == person
    if spec.project in team.projects:
        yield f"team.projects.{spec.project}", team.projects[spec.project], lambda job: job.spec.project == spec.project
