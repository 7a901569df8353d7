"""Commands that maintain the references and the user's notes."""

from __future__ import annotations

from typing import Any

import click

from gpuwarden.core.errors import BadRequest
from gpuwarden.interfaces.cli.base import JSON, answer, cli, open_context, runs_async


@cli.group()
def knowledge() -> None:
    """Maintain the references: check them, or propose an entry."""


@knowledge.command(name="check")
@click.option(
    "--months",
    type=click.IntRange(0),
    default=6,
    show_default=True,
    help="Age in months at which a fact counts as outdated.",
)
@JSON
def knowledge_check(months: int, as_json: bool) -> int:
    """Find outdated facts, broken references and missing sources.

    Facts about teardown and billing come first. The exit code is 1 if any issue is found.
    """
    from datetime import UTC, datetime

    from gpuwarden.interfaces.cli.knowledge_maintenance import check_references

    return answer(check_references(datetime.now(UTC).date(), months), as_json, "issues")


@knowledge.command()
@click.option("--job", "job_id", help="A failed job; its log and a later job that succeeded are the evidence.")
@click.option("--succeeded", help="The later job that succeeded; default: the next one with the same name or script.")
@click.option("--page", help="Page for the entry, such as training/oom-memory.md; optional with --job.")
@click.option("--title", default="", help="The failure in a few words.")
@click.option("--symptom", default="", help="The visible symptom.")
@click.option("--cause", default="", help="The cause that was found.")
@click.option("--fix", default="", help="The change that fixed it.")
@click.option("--scope", multiple=True, help="Library, such as torch; can be repeated.")
@click.option("--source", multiple=True, help="https URL of a source; can be repeated.")
@click.option("--line", "lines", multiple=True, help="A log line from the failure; can be repeated.")
@click.option("--root-caused", is_flag=True, help="The cause is proven, not guessed.")
@click.option("--reproduced", is_flag=True, help="The failure was reproduced.")
@click.option("--mechanistic", is_flag=True, help="Not reproduced, but a mechanism explains it.")
@click.option("--general", is_flag=True, help="Other users would encounter it too.")
@JSON
@runs_async
async def propose(job_id: str | None, succeeded: str | None, page: str | None, as_json: bool, **given: Any) -> int:
    """Draft an entry from a failed run.

    The draft is checked against the criteria on the self-improvement page and printed; no file is changed. With
    --job, the evidence is collected from the job; without it, pass all fields and --line.
    """
    from datetime import UTC, datetime

    from gpuwarden.interfaces.cli import knowledge_maintenance
    from gpuwarden.knowledge.proposal import LessonClaims

    claims = LessonClaims(**{name: given.pop(name) for name in ("root_caused", "reproduced", "mechanistic", "general")})
    title, lines = given.pop("title"), given.pop("lines")
    fields = {**given, "scope": list(given["scope"]), "source": list(given["source"])}
    fields["verified"] = f"{datetime.now(UTC):%Y-%m}"
    if job_id is None:
        unsaid = [f"--{name}" for name, value in {"page": page, "title": title, **fields}.items() if not value]
        if unsaid or succeeded:
            message = f"{', '.join(unsaid)} must be passed" if unsaid else "--succeeded can't be used"
            raise BadRequest(f"without --job, {message}", "Or pass a failed job with --job.")
        return answer(knowledge_maintenance.propose(str(page), title, fields, lines, claims), as_json, "draft")
    from gpuwarden.lifecycle.monitoring.postmortem import gather

    if lines:
        raise BadRequest("--line can't be combined with --job", "Omit --line, because the log contains the lines.")
    found = await gather(open_context(), job_id, succeeded)
    return answer(knowledge_maintenance.propose_from(found, page, title, fields, claims), as_json, "lesson")


@cli.group(invoke_without_command=True)
@click.pass_context
@JSON
def notes(context: click.Context, as_json: bool) -> int:
    """Show and set notes about your own setup, without secrets.

    Examples: your machines' hosts and folders, the tracker, and the location of a key.
    """
    from gpuwarden.interfaces.cli.notes_service import show

    return 0 if context.invoked_subcommand else answer(show(open_context()), as_json, "notes")


@notes.command(name="path")
def notes_path() -> int:
    """Print the notes file's path."""
    from gpuwarden.config import load_config

    click.echo(load_config().notes_file)
    return 0


@notes.command(name="set")
@click.argument("key")
@click.argument("value")
@JSON
def notes_set(key: str, value: str, as_json: bool) -> int:
    """Set the note KEY, such as platforms.box.host, to VALUE. For a secret key, store its location: $NAME or a path."""
    from gpuwarden.interfaces.cli.notes_service import note

    return answer(note(open_context(), key, value), as_json, "notes")


@notes.command(name="unset")
@click.argument("key")
@JSON
def notes_unset(key: str, as_json: bool) -> int:
    """Remove the note KEY."""
    from gpuwarden.interfaces.cli.notes_service import note

    return answer(note(open_context(), key, None), as_json, "notes")
