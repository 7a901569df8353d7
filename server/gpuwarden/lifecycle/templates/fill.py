"""Fill a template from the Hub's metadata: choose a bundled trainer's arguments so that they pass the submit gate.

The trainer's file is not changed. Everything that depends on the dataset and the model becomes a setting: the config,
the split, the column names, the chat template's source, and the reward column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Final

import anyio

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadRequest, NotFound, Unreachable
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.profile import Profile
from gpuwarden.core.repos import Config, Repo, RepoType
from gpuwarden.core.sanitize import line, named
from gpuwarden.hub import viewer
from gpuwarden.hub.client import HubClient, HubConfig
from gpuwarden.hub.details import read_repo
from gpuwarden.lifecycle.templates.rows import rows_of, types_of
from gpuwarden.static_analysis.ecosystem_tables import SYNONYMS
from gpuwarden.static_analysis.row_layouts import Fit, fit, reads
from gpuwarden.static_analysis.shipped_trainers import ALIASES, Trainer, trainer
from gpuwarden.static_analysis.static_eval import flags
from gpuwarden.static_analysis.typed_settings import pairs

TOKEN: Final = "HF_TOKEN"  # noqa: S105  (the name of a variable)
_PURPOSE: Final = {
    "sft": "sft", "cpt": "sft", "dpo": "prefs", "orpo": "prefs", "reward": "prefs", "kto": "prefs",
    "grpo": "gen", "rloo": "gen", "distill": "gen",
}  # fmt: skip
"""Suffixes of split names that are specific to a training method, such as `prefs` in train_prefs."""
LISTED: Final = 12
"""Maximum number of names from a Hub repo in one sentence."""
_HELD_OUT: Final = ("validation", "valid", "val", "dev")
_TALKING: Final = ("-Instruct", "-instruct", "-Chat", "-chat", "-it")
"""Suffixes in the names of models trained on conversations."""


@dataclass(frozen=True)
class TemplateRequest:
    """A request for a template. `settings` contains the trainer's settings; `push` is the Hub repo for the results."""

    template: str
    model: str = ""
    dataset: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    push: str = ""


@dataclass(frozen=True)
class FilledTemplate:
    """A template with its settings. `missing` lists the required settings without a value.

    `alias` is a note if the template was requested by another name.
    """

    trainer: Trainer
    settings: Mapping[str, str]
    alias: str = ""
    model: Repo | None = None
    dataset: Repo | None = None
    fit: Fit | None = None
    missing: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    durable_storage: bool = False

    @property
    def args(self) -> tuple[str, ...]:
        """Return the command-line arguments for the trainer's script."""
        pairs = ((self.trainer.options[name], value) for name, value in self.settings.items())
        return tuple(
            chain.from_iterable(
                ((o.flag if value == "true" else f"--no-{o.flag[2:]}"),) if o.kind == "bool" else (o.flag, value)
                for o, value in pairs
            )
        )


async def fill(
    request: TemplateRequest,
    config: HubConfig,
    *,
    clock: Clock | None = None,
    profile: Profile | None = None,
    here: Path | None = None,
) -> FilledTemplate:
    """Return a template filled for a model, a dataset and a platform. File paths are relative to `here`, if given.

    Raises:
        NotFound: the template, model or dataset does not exist.
        BadRequest: a setting is invalid, a repo can't be read, or the dataset doesn't match the template; the hint
        suggests a fix.

    """
    found = trainer(request.template)
    word = request.template.strip().lower()
    settings = {"model": request.model, "dataset": request.dataset, "hub_model_id": request.push, **request.settings}
    settings = {name: value for name, value in settings.items() if value}
    check_settings(found, settings)
    filled = FilledTemplate(found, settings, alias=ALIASES[word][1] if word in ALIASES else "")
    async with HubClient(config, clock=clock) as hub:
        if request.dataset and "dataset" in found.options:
            filled = await with_data(filled, hub, here)
        if request.model:
            filled = await with_model(filled, hub, here)
    return placed(filled, profile)


def check_settings(found: Trainer, settings: Mapping[str, str]) -> None:
    """Raise BadRequest for a setting that the trainer doesn't have or whose value it would reject."""
    unknown = next((name for name in settings if name not in found.options), None)
    if unknown is not None:
        near = found.nearest(unknown)
        fix = f"Did you mean {near}?" if near else f"Its settings: {', '.join(found.options)}."
        raise BadRequest(f"{found.name} has no setting {line(unknown, 60)!r}", fix)
    for name, value in flags([f"{found.options[n].flag}={v}" for n, v in settings.items()]).items():
        if fix := found.options[name].correction(value):
            raise BadRequest(f"{name} is {line(repr(value), 80)}", fix)


# ------------------------------------------------------------------------------------------------------------- data


async def with_data(filled: FilledTemplate, hub: HubClient, here: Path | None) -> FilledTemplate:
    """Read the dataset's metadata, and set the config, splits, column renames and reward that match its columns."""
    source = filled.settings["dataset"]
    if here is not None and (file := here / source).exists():
        types = await anyio.to_thread.run_sync(lambda: types_of(rows_of(file)))
        fits = _fitted(filled, source, types)
        return replace(_rewarded(filled, fits, types, source), inputs=(source,), fit=fits)
    repo = await _readable(hub, source, "dataset", filled)
    chosen = config_to_read(filled, repo)
    need_a_name(repo, "config", chosen.name)
    columns = {c.name: c.type for c in chosen.columns}
    settings = dict(filled.settings)
    if chosen.name != "default" and len(repo.structure.configs if repo.structure else ()) > 1:
        settings["dataset_config"] = chosen.name
    settings |= splits_to_read(filled, repo, chosen)
    filled = replace(filled, settings=settings, dataset=repo)
    if not columns:
        return filled  # the viewer does not know the columns; the trainer reads them itself
    fits = _fitted(filled, source, columns)
    kinds = {fits.renames.get(n, n): kind for n, kind in _renamed(filled, columns).items()}
    for name in fits.reads:
        if reads(name, kinds[name], fits.reads) is False:
            message = f"{source}: the column {line(name, 60)} has the type {kinds[name]}, which {filled.trainer.name}"
            raise BadRequest(f"{message} can't read", "Convert it before training, or choose another dataset.")
    return replace(_rewarded(filled, fits, columns, source), fit=fits)


def config_to_read(filled: FilledTemplate, repo: Repo) -> Config:
    """Return the config to read: the requested one, the only one, `default`, or the only one with matching columns."""
    structure, wanted = repo.structure, filled.settings.get("dataset_config")
    if structure is None or not structure.known:
        raise BadRequest(
            f"the contents of {repo.id} are unknown: {structure.why if structure else 'they were not requested'}",
            "Try again later, or download the dataset and pass the file.",
        )
    configs = {c.name: c for c in structure.configs}
    if wanted:
        if wanted not in configs:
            raise BadRequest(f"{repo.id} has no config {line(wanted, 60)!r}", f"It has {listed(configs)}.")
        return configs[wanted]
    if len(configs) == 1 or "default" in configs:
        return configs.get("default") or structure.configs[0]
    fitting = [
        c.name
        for c in structure.configs
        if not fit(_renamed(filled, {x.name: x.type for x in c.columns}), filled.trainer.wanted).missing
    ]
    if len(fitting) == 1:
        return configs[fitting[0]]
    raise BadRequest(
        f"{repo.id} has {len(configs)} configs, but none was chosen",
        f"Set dataset_config to one of them: {listed(fitting or configs)}.",
    )


def splits_to_read(filled: FilledTemplate, repo: Repo, config: Config) -> dict[str, str]:
    """Return the settings for the split to train on and, if the dataset has one, the split to evaluate on."""
    names = [s.name for s in config.splits]
    made_for = _PURPOSE.get(filled.trainer.name, "")
    asked = filled.settings.get("split", "")
    starts = [n for n in names if n.startswith("train")]
    candidates = [asked] if asked else [n for n in ("train", f"train_{made_for}") if n in names] or starts or names
    if asked.partition("[")[0] not in ("", *names) or (not asked and len(candidates) != 1 and "train" not in names):
        missing = f"no split {asked!r}" if asked else f"{len(candidates)} splits to train on"
        raise BadRequest(f"{repo.id} has {line(missing, 80)}", f"Set split to one of {listed(names)}.")
    need_a_name(repo, "split", candidates[0].partition("[")[0])
    found = {} if candidates[0] == "train" else {"split": candidates[0]}
    judged = next((n for n in (f"test_{made_for}", *_HELD_OUT) if n in names and n != candidates[0]), None)
    if judged and not {"eval_split", "eval_dataset", "eval_fraction"} & filled.settings.keys():
        found["eval_split"] = judged
    return found


def listed(names: Iterable[str]) -> str:
    """Return at most `LISTED` names from a Hub repo as text: truncated, and quoted if they are not plain."""
    found = list(names)
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return ", ".join(named(name, 60) for name in found[:LISTED]) + more


def need_a_name(repo: Repo, kind: str, name: str) -> None:
    """Raise BadRequest if the name of a config or split has unusual characters, because it becomes an argument."""
    if named(name) != name:
        raise BadRequest(
            f"{repo.id} has a {kind} with an unsupported name: {named(name)}",
            "Choose another dataset, or download this one and pass the file.",
        )


def requested_renames(text: str) -> dict[str, str]:
    """Parse the `columns` setting, in the form `old=new,old=new`. Raises BadRequest if it is malformed."""
    renames = pairs(text)
    if len(renames) < len([part for part in text.split(",") if part.strip()]) or not all((*renames, *renames.values())):
        raise BadRequest(f"columns is {line(text, 60)!r}", "Write old=new,old=new, with each column once.")
    return renames


def _renamed(filled: FilledTemplate, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the columns after the requested renames. Raises BadRequest if a renamed column does not exist."""
    renames = requested_renames(filled.settings.get("columns", ""))
    if absent := renames.keys() - columns.keys():
        raise BadRequest(
            f"the columns setting renames the column {line(min(absent), 60)}, which does not exist",
            f"The dataset has the columns {listed(columns)}.",
        )
    return {renames.get(name, name): kind for name, kind in columns.items()}


def _fitted(filled: FilledTemplate, source: str, columns: Mapping[str, str]) -> Fit:
    """Match the columns, after the requested renames, with the template. Raises BadRequest if a needed column is
    missing.
    """
    fits = fit(_renamed(filled, columns), filled.trainer.wanted)
    if fits.missing:
        needs = " or ".join(" + ".join(names) for names in filled.trainer.wanted)
        lacks = f"No column can be used as {', '.join(fits.missing)}."
        raise BadRequest(
            f"{source} has the columns {listed(columns)}; {filled.trainer.name} needs {needs}",
            (
                lacks,
                do(Action.CONVERT_ROWS, "if its rows are in another format", name=filled.trainer.name, path=source),
                "Or rename columns with the columns setting (old=new), or choose another dataset.",
            ),
        )
    return fits


def _rewarded(filled: FilledTemplate, fits: Fit, columns: Mapping[str, str], source: str) -> FilledTemplate:
    """Return the template with its renames and, if it needs a reward, with a reward that fits the columns."""
    renames = {**requested_renames(filled.settings.get("columns", "")), **fits.renames}
    settings = dict(filled.settings)
    if "reward" in filled.trainer.required and settings.get("reward", "answer") in {"answer", "boxed"}:
        now = _renamed(filled, columns)
        other = next((o for o in SYNONYMS["answer"] if now.get(o) == "string" and o not in fits.renames), None)
        if "answer" not in now or "answer" in fits.renames:
            if other is None:
                raise BadRequest(
                    f"{source} has no column with reference answers",
                    "Set reward to file.py:function or to a reward model, or rename a column with columns=old=answer.",
                )
            renames[other] = "answer"
        settings.setdefault("reward", "answer")
    if renames:
        settings["columns"] = replace(fits, renames=renames).option
    return replace(filled, settings=settings)


# ------------------------------------------------------------------------------------------------------ model, place


async def with_model(filled: FilledTemplate, hub: HubClient, here: Path | None) -> FilledTemplate:
    """Read the model's metadata, and find a chat template if the rows need one and the model has none."""
    name = filled.settings["model"]
    if here is not None and (here / name).is_dir():
        return replace(filled, inputs=(*filled.inputs, name))
    repo = await _readable(hub, name, "model", filled)
    filled = replace(filled, model=repo)
    talks = filled.fit is not None and filled.fit.talks
    if not talks or repo.chat_template is not False or "chat_template_from" not in filled.trainer.options:
        return filled
    if "chat_template_from" in filled.settings:
        return filled
    for ending in _TALKING:
        other = await read_repo(hub, f"{repo.id_now or repo.id}{ending}", "model")
        if other.exists and other.chat_template and other.readable:
            return replace(filled, settings={**filled.settings, "chat_template_from": other.id})
    raise BadRequest(
        f"the rows are conversations, but {repo.id} has no chat template",
        "Use the instruct model, or set chat_template_from to a model of the same family that has one.",
    )


async def _readable(hub: HubClient, name: str, kind: RepoType, filled: FilledTemplate) -> Repo:
    """Return a repo with its structure. Raises a WardenError if the repo does not exist or can't be read."""
    repo = await read_repo(hub, name, kind)
    if repo.status == "error" and not repo.exists:
        raise Unreachable(f"{kind} {line(name, 120)}: {repo.why}", "Check the name, or try again.")
    if repo.status == "disabled":
        raise BadRequest(f"{kind} {line(name, 120)}: {repo.why}", f"Choose another {kind}, or use a copy of it.")
    if not repo.exists:
        near = f"Did you mean {listed(repo.did_you_mean[:3])}?" if repo.did_you_mean else "Check the name."
        raise NotFound(f"{kind} {line(name, 120)}: {repo.why}", near)
    if repo.access is not True:
        page = f"{hub.config.endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo.id}"
        raise BadRequest(
            f"{kind} {repo.id} is {repo.why or 'gated'}",
            f"Accept its terms on {page} with the account that owns {TOKEN}, or choose a {kind} that is not gated.",
        )
    if kind == "dataset":
        repo = repo.model_copy(update={"structure": await viewer.structure(hub, repo.id_now or repo.id)})
    return repo


def placed(filled: FilledTemplate, profile: Profile | None) -> FilledTemplate:
    """Return the template with its outputs and secrets. Raises BadRequest if the results would be lost."""
    push = filled.settings.get("hub_model_id")
    if profile is not None and not profile.runner and not push:
        raise BadRequest(
            f"{profile.id} deletes a job's files when it ends", "Set push to a Hub repo for the results: owner/name."
        )
    closed = any(repo is not None and (repo.gated or repo.private) for repo in (filled.model, filled.dataset))
    on_hub = profile is not None and not profile.runner
    out = f"/hub/models/{push}" if on_hub else filled.settings.get("out", str(filled.trainer.options["out"].default))
    missing = tuple(name for name in filled.trainer.required if name not in filled.settings)
    # If only on_request storage outlives the machine, the results must be written to it.
    durable = profile is not None and not profile.survives(profile.place_of(out), "terminate")
    durable = durable and profile is not None and profile.survives(profile.place_of(out), "terminate", requested=True)
    secrets = (TOKEN,) if push or closed else ()
    return replace(filled, outputs=(out,), secrets=secrets, missing=missing, durable_storage=durable)
