"""Replies to `gpuwarden template`, and the page that describes a template to a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, Field

from gpuwarden.core.models import JobSpec
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import fence, line, named, quoted
from gpuwarden.interfaces.mcp.resources import TEMPLATE_URI
from gpuwarden.interfaces.results.base import Result
from gpuwarden.static_analysis.bundle import FOLDER
from gpuwarden.static_analysis.shipped_trainers import ALIASES, Trainer, trainer, trainer_names

if TYPE_CHECKING:
    from gpuwarden.core.repos import Repo
    from gpuwarden.lifecycle.templates.convert import Conversion
    from gpuwarden.lifecycle.templates.fill import FilledTemplate

ROW: Final = 600


class TemplateReply(BaseModel):
    """One template: its title, the columns that it reads, and its required settings."""

    name: str
    title: str
    rows: list[str]
    required: list[str]
    also_called: list[str]
    sha256: str
    uri: str


class TemplatesReply(Result):
    """All templates."""

    templates: list[TemplateReply] = Field(default_factory=list)


class SettingReply(BaseModel):
    """One setting of a template."""

    name: str
    flag: str
    type: str
    default: Any
    about: str
    choices: list[str]


class TemplateWholeReply(Result):
    """One template with its settings."""

    template: TemplateReply
    about: str
    settings: list[SettingReply]


class RepoReply(BaseModel):
    """Facts about a Hub repo. Its names are untrusted text."""

    id: str
    license: str
    access: str
    chat_template: bool | None = None
    columns: dict[str, str] = Field(default_factory=dict)


class FilledReply(Result):
    """A template with the arguments for a model, a dataset and a platform.

    `submit` contains the arguments for submit_job. `file` is the written script's path. `sha256` is the digest of
    the script as it is submitted, including the package gputrain; the submit gate recognizes this digest.
    """

    template: str
    explained: str = ""
    file: str = ""
    sha256: str
    reads: list[str] = Field(default_factory=list)
    model: RepoReply | None = None
    dataset: RepoReply | None = None
    missing: list[str] = Field(default_factory=list)
    submit: dict[str, Any] = Field(default_factory=dict)


class ConvertedReply(Result):
    """The numbers of rows that a conversion read, wrote and left out, with fenced example rows."""

    template: str
    file: str = ""
    read: int = 0
    written: int = 0
    forms: dict[str, int] = Field(default_factory=dict)
    left_out: dict[str, int] = Field(default_factory=dict)
    problems: list[str] = Field(default_factory=list)
    before: list[str] = Field(default_factory=list)
    after: list[str] = Field(default_factory=list)


def template_reply(found: Trainer) -> TemplateReply:
    """Return a template's short form."""
    return TemplateReply(
        name=found.name,
        title=found.title,
        rows=[" + ".join(names) for names in found.wanted],
        required=list(found.required),
        also_called=[word for word, (name, _) in ALIASES.items() if name == found.name],
        sha256=found.sha256,
        uri=TEMPLATE_URI.format(name=found.name),
    )


def templates_listed() -> TemplatesReply:
    """Return all templates."""
    return TemplatesReply(templates=[template_reply(trainer(name)) for name in trainer_names()])


def template_shown(found: Trainer) -> TemplateWholeReply:
    """Return one template with its settings."""
    settings = [
        SettingReply(name=o.name, flag=o.flag, type=o.kind, default=o.default, about=o.about, choices=list(o.choices))
        for o in found.options.values()
    ]
    return TemplateWholeReply(template=template_reply(found), about=found.about, settings=settings)


def filled_reply(
    filled: FilledTemplate, platform: str, file: str = "", more: dict[str, Any] | None = None
) -> FilledReply:
    """Return a filled template. `more` has additional job arguments, such as the GPU."""
    spec = JobSpec.model_fields
    submit = {
        "platform": platform,
        "script": TEMPLATE_URI.format(name=filled.trainer.name),
        "args": list(filled.args),
        "inputs": list(filled.inputs),
        "outputs": list(filled.outputs),
        "secrets": list(filled.secrets),
        "durable_storage": filled.durable_storage,
        **{name: value for name, value in (more or {}).items() if name in spec and value is not None},
    }
    still = [f"{filled.trainer.options[name].flag} ({filled.trainer.options[name].about})" for name in filled.missing]
    return FilledReply(
        message=f"Missing arguments: {', '.join(still)}." if still else "",
        template=filled.trainer.name,
        explained=filled.alias,
        file=file,
        sha256=filled.trainer.sha256,
        reads=list(filled.fit.reads) if filled.fit else [],
        model=_repo(filled.model) if filled.model else None,
        dataset=_repo(filled.dataset, filled.settings.get("dataset_config", "")) if filled.dataset else None,
        missing=list(filled.missing),
        submit={name: value for name, value in submit.items() if value},
    )


def _repo(repo: Repo, config: str = "") -> RepoReply:
    configs = {c.name: c for c in repo.structure.configs} if repo.structure else {}
    chosen = configs.get(config or "default") or next(iter(configs.values()), None)
    return RepoReply(
        id=named(repo.id_now or repo.id),
        license=named(repo.license) if repo.license else "not stated; ask the owner before you publish a model",
        access="gated" if repo.gated else "private" if repo.private else "open",
        chat_template=repo.chat_template,
        columns={named(c.name): named(c.type, 160) for c in chosen.columns[:20]} if chosen else {},
    )


def converted_reply(done: Conversion, found: Trainer, file: str = "") -> ConvertedReply:
    """Return the outcome of a conversion. Because rows are untrusted text, they are fenced, shortened and redacted."""
    left = sum(done.left_out.values())
    where = f" to {file}" if file else "; nothing was written"
    skipped = f", {counted(left, 'row')} left out" if left else ""
    return ConvertedReply(
        message=f"{counted(done.read, 'row')} read, {done.written} converted{where}{skipped}.",
        template=found.name,
        file=file,
        read=done.read,
        written=done.written,
        forms=dict(done.forms),
        left_out={quoted(reason): count for reason, count in done.left_out.most_common(5)},
        problems=[quoted(problem) for problem in done.named],
        before=[fence(_one_line(row), "a row before", limit=ROW, keep="start") for row, _ in done.shown],
        after=[
            fence("\n".join(map(_one_line, made)), "a row after", limit=ROW, keep="start") for _, made in done.shown
        ],
    )


def _one_line(row: dict[str, Any]) -> str:
    return line(json.dumps(row, ensure_ascii=False, default=str), ROW)


def template_page(found: Trainer) -> str:
    """Return a template as a page: description, required settings, submission, and all settings."""
    rows = " or ".join(" + ".join(names) for names in found.wanted) or "none"
    settings = [f"| {o.name} | {o.default!r} | {o.about} |" for o in found.options.values()]
    given = " ".join(f"{found.options[name].flag} ..." for name in found.required)
    uri = TEMPLATE_URI.format(name=found.name)
    also = [f"Also known as {word}: {why}." for word, (name, why) in ALIASES.items() if name == found.name]
    submit = (
        f"Submit it unchanged: submit_job with script `{uri}` and args `{given}`. To get the arguments for a model and "
        f"a dataset on the Hub, read `{uri}?model=OWNER/NAME&dataset=OWNER/NAME&platform=NAME`."
    )
    whole = (
        f"To change it, edit skill://{FOLDER}/{found.name}.py, and pass the text as `script`. "
        "The package gputrain is added automatically."
    )
    head = [f"# Template {found.name}", found.about, f"Rows: {rows}. Required: {', '.join(found.required)}.", *also]
    table = "\n".join(["| setting | default | |", "|---|---|---|", *settings])
    return "\n\n".join([*head, submit, whole, table]) + "\n"


def filled_page(reply: FilledReply) -> str:
    """Return a filled template as a page: the arguments for submit_job, and facts about the repos."""
    lines = [f"# Template {reply.template}, filled", reply.explained, reply.message]
    body = json.dumps(reply.short(), ensure_ascii=False, indent=1)
    return "\n\n".join(
        [
            *filter(None, lines),
            f"Call submit_job with the arguments in `submit`, first with dry_run.\n\n```json\n{body}\n```",
        ]
    )
