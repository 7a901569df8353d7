"""Apply the policy's team settings: the approvers, and the caps for each user and project."""

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
from gpuwarden.people import user_of


def acting_user(ctx: Context) -> str:
    """Return the user on whose behalf the current call is made."""
    return user_of(ctx.ledger.acting)


def check_approver(ctx: Context) -> None:
    """Raise Refused if the policy lists approvers and the current call's user is not one of them."""
    listed, person = ctx.policy.team.approvers, acting_user(ctx)
    if listed and person not in listed:
        raise Refused(
            f"{line(person, 80) or 'an unknown user'} may not approve",
            f"The policy's approvers are: {', '.join(listed)}.",
        )


def check_name(ctx: Context, person: str) -> None:
    """Raise Refused if a user who is not an approver creates a token or passkey for another user.

    An action that a passkey or a token authorizes is attributed to the owner. With another user's passkey or token, a
    user could therefore approve or spend as that user, and bypass the policy's approvers and caps.
    """
    listed, maker = ctx.policy.team.approvers, acting_user(ctx)
    if listed and maker not in {*listed, person}:
        raise Refused(
            f"{line(maker, 80) or 'an unknown user'} may not create a token or a passkey for {line(person, 80)}",
            f"Its owner or one of the policy's approvers can create it: {', '.join(listed)}.",
        )


def check_receipt(ctx: Context, receipt: str) -> None:
    """Raise Conflict if the policy has caps for users, and the receipt was issued to another user."""
    issued = ctx.ledger.last(f"receipt/{receipt}", ReceiptIssued)
    asked = user_of(issued.actor) if issued else ""
    if ctx.policy.team.people and asked != acting_user(ctx):
        raise Conflict(
            f"the receipt and its spending approval belong to {line(asked, 80) or 'another user'}",
            do(Action.SUBMIT, "to get your own receipt", receipt=""),
        )


def unlisted(ctx: Context, spec: JobSpec, person: str) -> str:
    """Return the reason why a job needs approval if the policy has caps, but none for the job's user or project.

    Return an empty string if no approval is needed for this reason.
    """
    team = ctx.policy.team
    if team.people and person not in team.people:
        return f"the policy has no cap for the user {line(person, 80) or '(unknown)'}"
    if team.projects and spec.project not in team.projects:
        return f"the policy has no cap for the project {line(spec.project, 80) or '(none)'}"
    return ""


def allowances(
    ctx: Context, spec: JobSpec, person: str
) -> Iterator[tuple[str, Allowance, Callable[[JobRecord], bool]]]:
    """Yield the names and caps of a job's user and project, each with a function that returns whether a job counts
    toward the caps.
    """
    team = ctx.policy.team
    if person in team.people:
        yield f"team.people.{person}", team.people[person], lambda job: job.person == person
    if spec.project in team.projects:
        yield f"team.projects.{spec.project}", team.projects[spec.project], lambda job: job.spec.project == spec.project
