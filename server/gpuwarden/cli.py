"""The command line: the same words as the tools, for people and scripts. Heavy imports happen inside the commands.

With `--json` every command prints exactly one JSON object; an error is `{"ok": false, "code", "message", "hint"}` and
a non-zero exit. Exit codes: 0 done or proven, 1 refused, refuted or failed, 2 wrong usage or could not tell.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gpuwarden import __version__
from gpuwarden.core.errors import BadRequest, DiskError, Internal, WardenError

if TYPE_CHECKING:
    from gpuwarden.lifecycle.warden import Warden
    from gpuwarden.lifecycle.watch import Round
    from gpuwarden.serve.replies import Reply

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
VERBS = click.Choice(["stop", "terminate"])
LEVELS = click.Choice(["structure", "content", "load", "resume"])
EXITS = {"unknown": 2, "bad_request": 2}


def run(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        code = cli.main(argv, standalone_mode=False, prog_name="gpuwarden")
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return 1
    except Exception as error:
        return _fail(_in_our_words(error), _wants_json(argv))
    except KeyboardInterrupt as error:
        return _fail(_in_our_words(error), _wants_json(argv))


def _in_our_words(error: BaseException) -> WardenError:
    """Every failure as one of ours. What was not foreseen is a mistake of ours and can be looked at."""
    if isinstance(error, WardenError):
        return error
    if isinstance(error, click.exceptions.Abort | KeyboardInterrupt):
        return BadRequest("interrupted", "Run it again: it goes on where it was.")
    if isinstance(error, click.ClickException):
        return BadRequest(error.format_message(), "See gpuwarden --help.")
    if os.environ.get("GPUWARDEN_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    return DiskError.of(error) if isinstance(error, OSError) else Internal()


def _wants_json(argv: list[str] | None) -> bool:
    """Whether `--json` is among our own words; those after `--` belong to the job."""
    words = sys.argv[1:] if argv is None else argv
    return "--json" in words[: words.index("--") if "--" in words else None]


def _fail(error: WardenError, as_json: bool) -> int:
    if as_json:
        _emit(error.as_dict())
    else:
        from gpuwarden.serve.terminal import show_error

        show_error(error)
    return EXITS.get(error.code, 1)


def _emit(body: dict[str, Any]) -> None:
    """Print one JSON object. Names may hold what a terminal's encoding can't show, so it is plain ASCII."""
    from gpuwarden.core.fence import scrubbed, secret_values

    click.echo(json.dumps(scrubbed(body, secret_values(os.environ))))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="%(version)s")
def cli() -> None:
    """The safety layer between coding agents and metered GPUs."""


def _warden(actor: str = "cli") -> Warden:
    from gpuwarden.app import open_warden

    return open_warden(actor)


def _async(command: Callable[..., Coroutine[Any, Any, int]]) -> Callable[..., int]:
    @wraps(command)
    def run_it(*args: Any, **kwargs: Any) -> int:
        import anyio

        return anyio.run(lambda: command(*args, **kwargs))

    return run_it


def _print(reply: Reply, as_json: bool, show: str) -> int:
    """Print a reply and return its exit code."""
    if as_json:
        _emit(reply.model_dump(mode="json"))
    else:
        from gpuwarden.serve import terminal

        getattr(terminal, show)(reply)
    return 0 if reply.ok else EXITS.get(reply.code, 1)


# -------------------------------------------------------------------------------------------------------- jobs


@cli.command()
@click.argument("what", nargs=-1, required=True)
@click.option("--platform", required=True, help="Profile name, or rehearsal/<name>.")
@click.option("--name", default=None, help="Short name; by default the script's.")
@click.option("--env", "envs", multiple=True, metavar="NAME=VALUE", help="A plain variable, never a secret.")
@click.option(
    "--secret", "secrets", multiple=True, metavar="NAME", help="A variable of this shell to pass as a secret."
)
@click.option(
    "--output", "outputs", multiple=True, metavar="PATH", help="What to keep, relative to the working folder."
)
@click.option("--timeout", "timeout_s", type=int, metavar="SECONDS", help="Hard limit.")
@click.option("--estimate", "estimate_s", type=int, metavar="SECONDS", help="Expected run time.")
@click.option("--max-cost", "max_cost_usd", type=float, metavar="USD", help="Stop the job at this cost.")
@click.option("--gpu", default=None, help="GPU name.")
@click.option("--gpus", "gpu_count", type=int, default=1, show_default=True, help="How many.")
@click.option("--disk", "disk_gb", type=int, default=None, metavar="GB")
@click.option("--interruptible", is_flag=True, help="Cheaper; resumes from its last checkpoint.")
@click.option("--durable-storage", is_flag=True, help="Ask for the tier that survives teardown.")
@click.option("--teardown", type=VERBS, default="terminate", show_default=True, help="How the machine will end.")
@click.option("--max-restarts", type=int, default=3, show_default=True)
@click.option("--dry-run", is_flag=True, help="Only check.")
@click.option("--receipt", default=None, help="From a checking call, to launch exactly these arguments.")
@JSON
@_async
async def submit(what: tuple[str, ...], as_json: bool, dry_run: bool, receipt: str | None, **given: Any) -> int:
    """Check a job and launch it: WHAT is a script.py with its arguments, or a command after `--`.

    On a rented platform the first call prints a receipt; the same call with --receipt launches.
    """
    from gpuwarden.core.inputs import build
    from gpuwarden.core.models import JobSpec
    from gpuwarden.lifecycle.submit import submit as use_case
    from gpuwarden.serve import replies

    given["env"] = _pairs(given.pop("envs"))
    spec = build(JobSpec, {**{k: v for k, v in given.items() if v is not None}, **_what(what, given["name"])})
    return _print(
        replies.submitted(await use_case(_warden(), spec, dry_run=dry_run, receipt=receipt)), as_json, "submitted"
    )


def _what(what: tuple[str, ...], name: str | None) -> dict[str, Any]:
    """A script with its arguments, or a command."""
    first, *rest = what
    if not first.endswith(".py"):
        return {"command": what, "name": name or Path(first).name[:40] or "job"}
    return {"script": read_script_file(Path(first)), "args": rest, "name": name or Path(first).stem[:40]}


def read_script_file(path: Path) -> str:
    """A script's text, bounded. Raises BadRequest that says what is wrong with the file."""
    from gpuwarden.core.models import MAX_SCRIPT_BYTES

    try:
        with path.open("rb") as file:
            content = file.read(MAX_SCRIPT_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"the script {path} can't be read: {error.strerror}", "Check the path.") from error
    if len(content) > MAX_SCRIPT_BYTES:
        raise BadRequest(
            f"the script {path} is larger than {MAX_SCRIPT_BYTES:,} bytes", "Ship data as data, not as script."
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the script {path} is not UTF-8 (byte {error.start})", "Save it as UTF-8.") from error


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    if any(not mark for _, mark, _ in pairs):
        raise BadRequest("--env takes NAME=VALUE", "Use --secret NAME for a secret.")
    return {name: value for name, _, value in pairs}


@cli.command()
@click.argument("job_id")
@click.option("--cursor", type=int, default=None, help="Read the log from this byte.")
@click.option("--log-bytes", type=click.IntRange(0, 1_000_000), default=2_000, show_default=True)
@click.option("--follow", is_flag=True, help="Look again every two seconds until the job ends.")
@JSON
@_async
async def check(job_id: str, cursor: int | None, log_bytes: int, follow: bool, as_json: bool) -> int:
    """State, step, metrics, meter and log of a job."""
    from gpuwarden.core.fence import secret_values
    from gpuwarden.core.states import TERMINAL_JOBS
    from gpuwarden.lifecycle.check import check as use_case
    from gpuwarden.serve import replies

    w = _warden()
    while True:
        result = await use_case(w, job_id, cursor=cursor, limit=log_bytes)
        ended = not follow or result.job.state in TERMINAL_JOBS
        if ended or not as_json:  # one JSON object, so only the last look
            reply = replies.checked(result, secret_values(w.env, result.job.spec.secrets))
            code = _print(reply, as_json, "checked")
        if ended:
            return code
        cursor = result.log.next if result.log else cursor
        await w.clock.sleep(2)


@cli.command()
@click.argument("job_id")
@JSON
@_async
async def cancel(job_id: str, as_json: bool) -> int:
    """End a job's process, with a signal first. Its machine stays and bills on."""
    from gpuwarden.lifecycle.check import cancel as use_case
    from gpuwarden.lifecycle.records import read_lease
    from gpuwarden.serve import replies

    w = _warden()
    job = await use_case(w, job_id)
    return _print(replies.canceled(job, read_lease(w.ledger, job.lease) if job.lease else None), as_json, "checked")


@cli.command()
@click.argument("job_id")
@click.option("--dest", type=click.Path(path_type=Path, file_okay=False), default=None, help="Folder to copy into.")
@JSON
@_async
async def pull(job_id: str, dest: Path | None, as_json: bool) -> int:
    """Copy a job's outputs and log here and compare digests. Run again to resume."""
    from gpuwarden.lifecycle.pull import pull as use_case
    from gpuwarden.serve import replies, terminal

    with terminal.transfer_bar(as_json) as progress:
        result = await use_case(_warden(), job_id, dest, progress=progress)
    return _print(replies.pulled(result), as_json, "pulled")


@cli.command()
@click.argument("what")
@click.option("--level", type=LEVELS, default="load", show_default=True, help="How deep.")
@JSON
@_async
async def verify(what: str, level: str, as_json: bool) -> int:
    """Prove a checkpoint: WHAT is a job id, whose pulled copy is meant, or a path.

    Exit code 0: proven, 1: refuted, 2: could not tell.
    """
    from gpuwarden.core.models import Level
    from gpuwarden.lifecycle.records import job_ids
    from gpuwarden.lifecycle.verify import verify_file, verify_job
    from gpuwarden.serve import replies

    w = _warden()
    is_job = what in job_ids(w.ledger)
    report = await (verify_job(w, what, Level(level)) if is_job else verify_file(Path(what), Level(level)))
    return _print(replies.verified(report), as_json, "verified")


# ------------------------------------------------------------------------------------------------------ teardown


@cli.command()
@click.argument("job_id")
@click.option("--verb", type=VERBS, default="terminate", show_default=True)
@click.option("--withdraw", is_flag=True, help="Take an open request back.")
@JSON
@_async
async def teardown(job_id: str, verb: str, withdraw: bool, as_json: bool) -> int:
    """Ask for a job's machine to be ended. A person then runs `gpuwarden approve TICKET`."""
    from gpuwarden.lifecycle import teardown as use_case
    from gpuwarden.serve import replies

    w = _warden()
    view = await use_case.request(w, job_id, verb)  # type: ignore[arg-type]  # click.Choice checked it
    if withdraw:
        await use_case.withdraw(w, view.record.id, "withdrawn on the command line")
        view = await use_case.proceed(w, view.record.id)
    return _print(replies.torn_down(view), as_json, "torn_down")


@cli.command()
@click.argument("ticket", required=False)
@click.option("--set-pin", is_flag=True, help="Choose a PIN that every approval on a terminal asks for.")
@click.option("--without-proof", is_flag=True, help="Give up what is not proven. You will have to type its name.")
@JSON
@_async
async def approve(ticket: str | None, set_pin: bool, without_proof: bool, as_json: bool) -> int:
    """Say yes, as a person at a terminal: to a teardown (t...) or to a spending (r...)."""
    from gpuwarden.serve import approval

    if set_pin:
        return _print(await approval.choose_pin(_warden()), as_json, "message")
    if not ticket:
        raise BadRequest("which ticket?", "teardown and submit print it.")
    return _print(await approval.on_terminal(_warden(), ticket, without_proof=without_proof), as_json, "message")


@cli.command()
@JSON
@_async
async def instances(as_json: bool) -> int:
    """Every rented machine, ours or not: state, billing, cost, job."""
    from gpuwarden.lifecycle.instances import list_instances
    from gpuwarden.serve import replies

    return _print(replies.listed(await list_instances(_warden())), as_json, "listed")


@cli.command()
@click.option("--once", is_flag=True, help="One round; exit code 1 while an alert stands.")
@click.option("--every", "every_s", type=click.FloatRange(1, 3600), default=15, show_default=True, metavar="SECONDS")
@JSON
@_async
async def watch(once: bool, every_s: float, as_json: bool) -> int:
    """Move every job on and say what needs a person: idle, stalled, failed, finished but billing, over a cap.

    It asks and parks; it never ends a machine. Alerts go to the ledger and where the policy's [watch] says.
    """
    from gpuwarden.lifecycle.watch import Watcher
    from gpuwarden.serve import replies, terminal

    if as_json and not once:
        raise BadRequest("--json prints one object, and a watch has no end", "Use --once --json, or leave --json out.")
    watcher = Watcher(_warden("watch"), every_s)
    if once:
        return _print(replies.watched(await watcher.round()), as_json, "standing")
    first = replies.watched(await watcher.round())
    terminal.standing(first)
    said = first.unknown

    def tell(done: Round) -> None:
        nonlocal said
        reply = replies.watched(done)
        said, reply.unknown = reply.unknown, {k: v for k, v in reply.unknown.items() if said.get(k) != v}
        terminal.watched(reply)

    await watcher.run(tell)
    return 0


# --------------------------------------------------------------------------------------------------- knowledge


@cli.command()
@click.argument("subject", required=False)
@JSON
def history(subject: str | None, as_json: bool) -> int:
    """The ledger's events, of one job (its leases and teardowns too) or of all."""
    from gpuwarden.lifecycle.records import story
    from gpuwarden.serve import terminal

    rows = [e.as_dict() for e in story(_warden().ledger, subject)]
    if as_json:
        _emit({"ok": True, "code": "ok", "events": rows})
    else:
        terminal.history(rows)
    return 0


@cli.command()
@click.argument("query", nargs=-1, required=True)
@click.option("--limit", type=click.IntRange(1, 10), default=5, show_default=True)
@JSON
def search(query: tuple[str, ...], limit: int, as_json: bool) -> int:
    """Look QUERY up in the references: a symptom in any words, an entry's id, or a line of a log."""
    from gpuwarden.serve.references import look_up

    return _print(look_up(" ".join(query), limit), as_json, "found")


@cli.group()
def knowledge() -> None:
    """Keep the references true."""


@knowledge.command(name="check")
@click.option("--months", type=click.IntRange(0), default=6, show_default=True, help="Older than this is old.")
@JSON
def knowledge_check(months: int, as_json: bool) -> int:
    """Old facts, teardown and billing first; dead references; missing sources. Exit code 1 when there is any."""
    from datetime import UTC, datetime

    from gpuwarden.serve.upkeep import look_over

    return _print(look_over(datetime.now(UTC).date(), months), as_json, "issues")


@knowledge.command()
@click.option("--page", required=True, help="Page it belongs to, such as training/oom-memory.md.")
@click.option("--title", required=True)
@click.option("--symptom", required=True, help="What one sees.")
@click.option("--cause", required=True, help="What was found to be behind it.")
@click.option("--fix", required=True, help="What ended it.")
@click.option("--scope", multiple=True, required=True, help="Such as torch; may be given again.")
@click.option("--source", multiple=True, required=True, help="https address; may be given again.")
@click.option("--line", "lines", multiple=True, help="A log line that showed it; may be given again.")
@click.option("--root-caused", is_flag=True, help="The cause is established, not guessed.")
@click.option("--reproduced", is_flag=True, help="It was made to happen again.")
@click.option("--mechanistic", is_flag=True, help="Or a mechanism explains it.")
@click.option("--general", is_flag=True, help="Others would meet it too.")
@JSON
def propose(page: str, title: str, lines: tuple[str, ...], as_json: bool, **given: Any) -> int:
    """Draft an entry from what a run taught, against the bar of self-improvement. Shows it; changes no file."""
    from datetime import UTC, datetime

    from gpuwarden.knowledge.proposal import Bar
    from gpuwarden.serve import upkeep

    bar = Bar(**{name: given.pop(name) for name in ("root_caused", "reproduced", "mechanistic", "general")})
    fields = {**given, "scope": list(given["scope"]), "source": list(given["source"])}
    fields["verified"] = f"{datetime.now(UTC):%Y-%m}"
    return _print(upkeep.propose(page, title, fields, lines, bar), as_json, "draft")


def _written(changed: int, as_json: bool) -> int:
    _emit({"ok": True, "code": "ok", "changed": changed}) if as_json else click.echo(f"{changed} file(s) changed")
    return 0


@cli.command()
@click.argument("rule_id", required=False)
@click.option("--write", is_flag=True, hidden=True, help="Write the page of the rules anew.")
@JSON
def rules(rule_id: str | None, write: bool, as_json: bool) -> int:
    """The rules of both gates, or one of them with its reason."""
    from gpuwarden.core.errors import NotFound
    from gpuwarden.rules.catalog import all_rules
    from gpuwarden.rules.page import write_page
    from gpuwarden.serve import terminal

    if write:
        return _written(write_page(), as_json)
    found = [r for r in all_rules() if rule_id in (None, r.id)]
    if not found:
        raise NotFound(f"there is no rule {rule_id!r}", "gpuwarden rules lists them.")
    rows = [
        {"id": r.id, "gate": r.gate, "severity": r.severity, "title": r.title, "why": r.why, "fix": r.fix}
        for r in found
    ]
    if as_json:
        _emit({"ok": True, "code": "ok", "rules": rows})
    else:
        terminal.rules(rows, full=rule_id is not None)
    return 0


@cli.command()
@click.argument("name", required=False)
@click.option("--write", is_flag=True, hidden=True, help="Write the generated blocks of the profiles anew.")
@JSON
def profiles(name: str | None, write: bool, as_json: bool) -> int:
    """The platforms that can be named, or one of them: what survives what, what bills, what happens by itself."""
    from gpuwarden.profiles import rewrite_blocks
    from gpuwarden.serve import terminal

    if write:
        return _written(rewrite_blocks(), as_json)
    w = _warden()
    if name is None:
        titles = {p: w.profile(p).title for p in w.platforms()}
        _emit({"ok": True, "code": "ok", "platforms": titles}) if as_json else terminal.platforms(titles)
        return 0
    profile = w.profile(name)
    if as_json:
        _emit({"ok": True, "code": "ok", "profile": profile.model_dump(mode="json")})
    else:
        terminal.profile(name)
    return 0


@cli.command()
@JSON
@_async
async def doctor(as_json: bool) -> int:
    """The effective settings and where each came from, and whether this machine can work with them."""
    from gpuwarden.serve.doctor import examine

    return _print(await examine(), as_json, "doctor")


@cli.command()
@click.argument("action", type=click.Choice(["install", "uninstall", "status"]))
@click.option(
    "--client", "names", multiple=True, type=click.Choice(["claude", "codex", "cursor"]), help="Only this one."
)
@JSON
def hooks(action: str, names: tuple[str, ...], as_json: bool) -> int:
    """Stop an agent's shell from going around gpuwarden: `vastai destroy`, `sky down`, `rm -rf` of a live run."""
    from gpuwarden.config import load_config
    from gpuwarden.serve.hooks import hooks as use_case

    return _print(use_case(action, names, load_config(), os.environ), as_json, "hooks")


@cli.command()
def mcp() -> NoReturn:
    """Serve the tools to an MCP client over standard input and output."""
    import anyio

    from gpuwarden.serve.mcp_server import run_stdio

    anyio.run(run_stdio, _warden("mcp"))
    raise SystemExit(0)


@cli.command()
@click.option("--yes", is_flag=True, help="Answer the demo's one question with yes; recorded as such.")
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), default=None, help="Keep everything in this folder."
)
@JSON
@_async
async def demo(yes: bool, keep: Path | None, as_json: bool) -> int:
    """Walk one training job through its whole life, for real, at no cost."""
    from gpuwarden.serve.demo import play

    return await play(yes=yes, as_json=as_json, keep=keep)


@cli.command("rehearse-hub")
@click.option(
    "--root", type=click.Path(path_type=Path, file_okay=False), help="Where its repos live; a fresh folder if omitted."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="A free one if omitted.")
def rehearse_hub(root: Path | None, port: int) -> int:
    """Serve a Hugging Face Hub of pretend repos on loopback, for practice without a network."""
    import tempfile

    from gpuwarden.rehearsal.hub_server import serve

    with tempfile.TemporaryDirectory(prefix="gpuwarden-hub-") as fresh:
        serve(root or Path(fresh), port, click.echo)
    return 0


@cli.command("rehearse-world", hidden=True)
def rehearse_world() -> int:
    """Play the other side of a pretend world for an evaluation: orders as JSON lines, answers the same way."""
    from gpuwarden.lifecycle.records import story
    from gpuwarden.providers.rehearsal import RehearsalProvider
    from gpuwarden.rehearsal.cloud import Cloud
    from gpuwarden.rehearsal.console import Console

    w = _warden("world")

    def cloud(platform: str) -> Cloud:
        provider = w.provider(platform)
        if not isinstance(provider, RehearsalProvider):
            raise BadRequest(f"{platform} is no rehearsal", "Name a rehearsal/ platform.")
        return provider.cloud

    for answer in Console(cloud, lambda: [e.as_dict() for e in story(w.ledger, None)]).serve(sys.stdin):
        click.echo(answer)
    return 0
