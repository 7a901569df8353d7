"""Rehearse a script's first step on the local machine, if the user has allowed exactly this script to run there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import platformdirs
from anyio import to_thread

from gpuwarden.core.errors import BadRequest, NotFound, Refused
from gpuwarden.core.guidance import Action, approval, do
from gpuwarden.core.models import JobSpec, digest
from gpuwarden.core.sanitize import line, redact
from gpuwarden.hub.client import HubConfig
from gpuwarden.ledger.events import RehearsalAllowed, RehearsalRequested, ScriptRehearsed
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.submission.inputs import Inputs, list_inputs
from gpuwarden.lifecycle.team import check_approver
from gpuwarden.private import private_folder, write_private
from gpuwarden.rules.facts import RehearsalOutcome
from gpuwarden.static_analysis.newer_grammar import described
from gpuwarden.static_analysis.script import ScriptFacts, read_script, with_grammar

if TYPE_CHECKING:
    from gpuwarden.remote.first_step.outcome import Outcome

SHOWN: Final = 12
"""Maximum number of script lines shown in the question to the user."""
QUESTIONS: Final = "questions"
"""Name of the folder for scripts waiting for approval, so that the user can read them. Only the newest are kept."""
MOST_KEPT: Final = 40
MOST_SHOWN: Final = 40
"""Maximum number of arguments, packages, files or variables that the question shows."""


@dataclass(frozen=True)
class Rehearsal:
    """The outcome of a rehearsal, and the script's packages that are not installed locally."""

    digest: str
    outcome: Outcome
    lacking: tuple[str, ...] = ()


class NeedsConsent(Refused):
    """The user has not allowed this script to run on the local machine."""

    code = "approval_required"

    def __init__(self, ticket: str) -> None:
        super().__init__(
            "a rehearsal runs the script on this machine, and the user has not allowed that yet; nothing was run",
            (approval(ticket), do(Action.RETRY)),
        )
        self.ticket = ticket


@dataclass(frozen=True)
class PermittedScript:
    """A script that may run locally: its facts, its inputs, and the question that the user approved."""

    script: ScriptFacts
    inputs: Inputs
    asked: RehearsalRequested


async def permit(ctx: Context, spec: JobSpec) -> PermittedScript:
    """Return the script of a job that may be rehearsed.

    Raises BadRequest if the job has no readable script, and NeedsConsent if the user has not allowed the script.
    """
    if spec.script is None:
        raise BadRequest("only a script can be rehearsed, but the job has a command", "Submit the script itself.")
    script = await to_thread.run_sync(read_script, spec.script, spec.env, spec.args, spec.inputs)
    if script.error:
        raise BadRequest(f"the script can't be read: {script.error}", "Fix the script.")
    inputs = await to_thread.run_sync(lambda: list_inputs(ctx.cwd or Path.cwd(), spec.inputs, {}, ctx.protected_paths))
    asked = _question(spec, inputs, script.header.dependencies if script.header else ())
    if ctx.policy.local.rehearse != "allow" and not allowed(ctx, asked.digest):
        ticket = ticket_of(asked.digest)
        await to_thread.run_sync(_store_script, ctx.home / QUESTIONS, ticket, spec.script)
        ctx.ledger.add(f"script/{ticket}", asked)
        raise NeedsConsent(ticket)
    return PermittedScript(script, inputs, asked)


async def rehearse_script(ctx: Context, spec: JobSpec) -> Rehearsal:
    """Rehearse a job's script, and record the outcome. A script that has been rehearsed before is run again.

    Raises the same errors as `permit`, and NoSandbox if no sandbox is available.
    """
    # imported here, because every check imports this module, but few checks run a rehearsal
    from gpuwarden.hub.first_step_supplies import bring
    from gpuwarden.remote.first_step.environment import INSTALL_S, environment_for
    from gpuwarden.remote.first_step.outcome import Outcome
    from gpuwarden.remote.first_step.start import Order, rehearse

    found = await permit(ctx, spec)
    assert spec.script is not None
    script, inputs, asked = found.script, found.inputs, found.asked
    folder = Path(platformdirs.user_cache_dir("gpuwarden", appauthor=False)) / "environments"
    # Run only one rehearsal at a time, because an environment may take gigabytes and may replace an existing one.
    async with ctx.lock("rehearsal", INSTALL_S):
        place = await to_thread.run_sync(environment_for, with_grammar(script.header, script.grammar), folder, ctx.env)
        if script.grammar and not place.own and sys.version_info[:2] < script.grammar.version:
            raise BadRequest(
                f"{described(script.grammar)}, which is not installed here, and uv could not install it",
                "Install uv or that Python version, then try again.",
            )
        if place.fault:
            outcome = Outcome(outcome="fault", certain=True, message=place.fault)
        else:
            supplies = await bring(script.uses.repos, HubConfig.from_env(ctx.env), clock=ctx.clock)
            order = Order(
                spec.script,
                spec.args,
                spec.env,
                spec.secrets,
                supplies.models,
                supplies.datasets,
                {f.path: (ctx.cwd or Path.cwd()) / f.path for f in inputs.files},
                {f.path: f.sha256 for f in inputs.files},
                place.own,
            )
            hidden = tuple(str(path) for path in (ctx.home, *([ctx.notes_file.parent] if ctx.notes_file else [])))
            outcome = await to_thread.run_sync(rehearse, order, place.python, hidden)
    ctx.ledger.add(f"script/{ticket_of(asked.digest)}", _recorded(ctx, asked.digest, place.packages, outcome))
    return Rehearsal(asked.digest, outcome, place.lacking)


def _question(spec: JobSpec, inputs: Inputs, packages: tuple[str, ...]) -> RehearsalRequested:
    assert spec.script is not None
    files = {file.path: file.sha256 for file in inputs.files}
    return RehearsalRequested(
        digest=rehearsal_digest(spec, files),
        name=line(spec.name, 80),
        args=_some(spec.args),
        packages=_some(packages),
        inputs=_some(sorted(files)),
        variables=_some([redact(f"{name}={value}") for name, value in sorted(spec.env.items())]),
        script_bytes=len(spec.script.encode("utf-8", "surrogatepass")),
        script_digest=digest(spec.script),
        start="\n".join(line(text, 120) for text in spec.script.splitlines()[:SHOWN]),
    )


def _some(words: Sequence[str]) -> tuple[str, ...]:
    """Return the entries of a list that the question shows, and the number of omitted entries."""
    shown = tuple(line(word, 200) for word in words[:MOST_SHOWN])
    return (*shown, f"and {len(words) - MOST_SHOWN} more") if len(words) > MOST_SHOWN else shown


def rehearsal_digest(spec: JobSpec, files: dict[str, str]) -> str:
    """Return the digest of a rehearsal, computed over the script, its arguments, variables, secret names and inputs."""
    return digest([spec.script, list(spec.args), dict(spec.env), sorted(spec.secrets), files])


def ticket_of(whole: str) -> str:
    """Return the ticket that the user approves to allow the script with this digest."""
    return f"s{whole.rpartition(':')[2][:16]}"


def allowed(ctx: Context, whole: str) -> bool:
    """Return whether the user allowed the script with this digest to run locally."""
    granted = ctx.ledger.last(f"script/{ticket_of(whole)}", RehearsalAllowed)
    return granted is not None and granted.data.digest == whole


def question_for(ctx: Context, ticket: str) -> RehearsalRequested:
    """Return the question for a ticket. Raises NotFound."""
    found = ctx.ledger.last(f"script/{ticket}", RehearsalRequested)
    if found is None:
        raise NotFound(f"this ledger has no rehearsal request {line(ticket, 40)!r}", do(Action.REHEARSE))
    return found.data


def question_script(ctx: Context, asked: RehearsalRequested) -> str | None:
    """Return the script that a question is about; None if the stored copy is missing or has been changed."""
    try:
        text = (ctx.home / QUESTIONS / ticket_of(asked.digest)).read_bytes().decode("utf-8", "surrogatepass")
    except (OSError, ValueError):
        return None
    return text if digest(text) == asked.script_digest else None


def _store_script(folder: Path, ticket: str, script: str) -> None:
    write_private(private_folder(folder) / ticket, script.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(FileNotFoundError):  # another process may have removed a file
        for old in sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime)[:-MOST_KEPT]:
            old.unlink()


def allow(ctx: Context, asked: RehearsalRequested, channel: str, by: str) -> None:
    """Record that the user approved a question. Raises Refused if the policy lists approvers and this user is not
    listed.
    """
    check_approver(ctx)
    ctx.ledger.add(f"script/{ticket_of(asked.digest)}", RehearsalAllowed(digest=asked.digest, channel=channel, by=by))


def rehearsed(ctx: Context, spec: JobSpec, files: dict[str, str]) -> RehearsalOutcome | None:
    """Return the outcome of the last rehearsal of exactly this script; None if it has not been rehearsed."""
    whole = rehearsal_digest(spec, files)
    found = ctx.ledger.last(f"script/{ticket_of(whole)}", ScriptRehearsed)
    if found is None or found.data.digest != whole:
        return None
    return RehearsalOutcome(found.data.outcome, found.data.certain, found.data.message, found.data.line)


def _recorded(ctx: Context, whole: str, packages: str, outcome: Outcome) -> ScriptRehearsed:
    values = ctx.hidden(outcome.model_dump(mode="json"))
    return ScriptRehearsed(
        digest=whole,
        packages=packages,
        outcome=outcome.outcome,
        certain=outcome.certain,
        message=line(redact(outcome.message, values), 600),
        line=outcome.line,
        source=line(redact(outcome.text, values), 200),
        stopped_by=line(redact(outcome.why, values), 600),
        reached=outcome.reached,
        substitutes={line(what, 200): line(by, 200) for what, by in outcome.substitutes.items()},
        steps=outcome.steps,
        resumed=outcome.resumed,
        saved=tuple(line(Path(name).name, 120) for name in outcome.files[:SHOWN]),
        pushed=tuple(line(name, 120) for name in outcome.pushed),
        seconds=outcome.seconds,
        cpu_s=outcome.cpu_s,
        peak_mb=outcome.peak_mb,
    )
