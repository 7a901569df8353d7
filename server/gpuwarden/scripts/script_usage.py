"""Find a training program's repos, columns, settings, pushes, variables and subprocesses without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuwarden.scripts.column_references import ROW_FUNCTIONS, column_reads, columns_of
from gpuwarden.scripts.ecosystem_tables import CONFIGS, HEADS, TRAINERS
from gpuwarden.scripts.env_and_shell import EnvRead, Shell, env_reads, shells_of
from gpuwarden.scripts.hub_references import RepoUse, is_repo_id, repos_of, text_or_none
from gpuwarden.scripts.static_eval import UNKNOWN, Call, Program
from gpuwarden.scripts.typed_settings import TypedSettings, settings_repos, typed_settings

_ARGUMENTS = re.compile(r"(Seq2Seq)?TrainingArguments|\w+Config")
_NOT_ARGUMENTS = frozenset(
    {"LoraConfig", "BitsAndBytesConfig", "PeftConfig", "AutoConfig", "GenerationConfig", "ModelConfig"}
)


@dataclass(frozen=True)
class Setting:
    """One argument of a training configuration; its value may be UNKNOWN."""

    value: Any
    line: int
    owner: str


@dataclass(frozen=True)
class Push:
    """A place where the program writes to the Hub; `target` None when it does not name a repo."""

    line: int
    via: str
    target: str | None = None


@dataclass(frozen=True)
class Uses:
    """The result of `analyse`."""

    imports: tuple[tuple[str, int], ...] = ()
    optional: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    repos: tuple[RepoUse, ...] = ()
    methods: frozenset[str] = frozenset()
    settings: Mapping[str, Setting] = field(default_factory=dict)
    trainers: tuple[Call, ...] = ()
    pushes: tuple[Push, ...] = ()
    env: tuple[EnvRead, ...] = ()
    shells: tuple[Shell, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    reads: tuple[tuple[str, int], ...] = ()
    row_functions: int = 0
    makes: frozenset[str] = frozenset()
    reshaped: bool = False
    assigned: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()
    typed: TypedSettings | None = None

    def setting(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting; `default` when it is not given."""
        found = self.settings.get(name)
        return default if found is None else found.value

    def line_of(self, name: str) -> int:
        """Return the line of a setting; 0 when it comes from the command line."""
        found = self.settings.get(name)
        return found.line if found else 0

    def called(self, *last: str) -> Call | None:
        """Return the first call whose name ends in one of these."""
        return next((c for c in self.calls if c.last in last), None)


def analyse(program: Program, here: Iterable[str] = ()) -> Uses:
    """Read a program. `here` are the relative paths that will be in its working folder."""
    here, settings = frozenset(here), dict(settings_of(program))
    targets = [t for node, _ in program.nodes if isinstance(node, ast.Assign) for t in node.targets]
    trainers = tuple(c for c in program.calls if c.last.endswith("Trainer") and not c.name.startswith("."))
    local = frozenset((*_local_names(program, settings), *here))
    renames, makes, reshaped = columns_of(program)
    typed = typed_settings(program)
    repos = [*repos_of(program, trainers, local)]
    if typed is not None:
        settings |= _named_settings(typed)
        renames = {**renames, **typed.renames}
        repos += [use for use in settings_repos(typed) if is_repo_id(use.id, here)]
    return Uses(
        imports=tuple(_imports(program, required=True)),
        optional=tuple(sorted({n for n, _ in _imports(program, required=False)})),
        calls=program.calls,
        repos=tuple(dict.fromkeys(repos)),
        methods=methods_of(program, trainers),
        settings=settings,
        trainers=trainers,
        pushes=tuple(p for p in pushes_of(program, settings) if p.line not in _unasked_pushes(program, typed)),
        env=tuple(env_reads(program)),
        shells=tuple(shells_of(program)),
        renames=renames,
        reads=tuple(column_reads(program)),
        row_functions=sum(c.last in ROW_FUNCTIONS and c.name.startswith(".") for c in program.calls),
        makes=frozenset(makes),
        reshaped=reshaped,
        assigned=frozenset(t.attr for t in targets if isinstance(t, ast.Attribute)),
        local=local,
        typed=typed,
    )


# ------------------------------------------------------------------------------------------------------- imports


def _imports(program: Program, *, required: bool) -> Iterator[tuple[str, int]]:
    """Yield dotted names that are imported, with lines."""
    for node, _ in program.nodes:
        if (id(node) in program.optional) is required:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


# ------------------------------------------------------------------------------------------------------ settings


def settings_of(program: Program) -> Iterator[tuple[str, Setting]]:
    """Yield the settings that a program gives in configurations, sets later, or takes from the command line."""
    holders = set(_assigned_from(program, _ARGUMENTS.pattern))
    for call in program.calls:
        named = _ARGUMENTS.fullmatch(call.last) and call.last not in _NOT_ARGUMENTS
        if named and (call.last in CONFIGS or "TrainingArguments" in call.last or call.name.startswith("trl.")):
            yield from ((name, Setting(value, call.line, call.last)) for name, value in call.kwargs.items())
            if call.open:
                yield "**", Setting(UNKNOWN, call.line, call.last)
    for node, scope in program.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            target = node.targets[0]
            if isinstance(target.value, ast.Name) and target.value.id in holders | {"training_args"}:
                yield target.attr, Setting(program.value(node.value, scope), node.lineno, target.value.id)
    if any(c.last in {"HfArgumentParser", "TrlParser"} for c in program.calls):
        yield from ((name, Setting(value, 0, "the command line")) for name, value in program.flags.items())


# What a trainer's own setting is called in a training configuration.
_SAME = {"out": "output_dir", "steps": "max_steps", "micro_batch": "per_device_train_batch_size"}


def _named_settings(typed: TypedSettings) -> dict[str, Setting]:
    """Return the given settings of a shipped trainer under the names of a training configuration."""
    values = {"out": typed.declared["out"].default if "out" in typed.declared else None, **typed.given}
    given = {_SAME[name]: value for name, value in values.items() if name in _SAME and value is not None}
    return {name: Setting(value, 0, "the command line") for name, value in given.items()}


def methods_of(program: Program, trainers: Iterable[Call]) -> frozenset[str]:
    """Return the training methods: those of trl's trainers, else of the model's head under a plain Trainer."""
    found = {TRAINERS[t.last.removeprefix("Unsloth")] for t in trainers if t.last.removeprefix("Unsloth") in TRAINERS}
    if not found and any(t.last in {"Trainer", "Seq2SeqTrainer"} for t in trainers):
        names = {n.rpartition(".")[2] for n, _ in _imports(program, required=True)}
        found = {method for name in names for head, method in HEADS.items() if name.endswith(head)}
    return frozenset(found)


def _local_names(program: Program, settings: Mapping[str, Setting]) -> Iterator[str]:
    """Yield paths that the program itself writes; an id that equals one of them is not a repo."""
    if isinstance(out := settings.get("output_dir", Setting("", 0, "")).value, str):
        yield out
    for call in program.calls:
        if call.last in {
            "save_pretrained",
            "save_model",
            "save_to_disk",
            "makedirs",
            "mkdir",
            "save_pretrained_merged",
            "Path",
            "save",
        }:
            yield from (a for a in call.args[:2] if isinstance(a, str))
        for name in ("local_dir", "output_dir", "save_directory", "output_path"):
            if isinstance(call.kwargs.get(name), str):
                yield call.kwargs[name]


# -------------------------------------------------------------------------------------------------------- pushes

_UPLOADS = frozenset({"upload_folder", "upload_file", "upload_large_folder", "create_commit", "sync_bucket"})


def pushes_of(program: Program, settings: Mapping[str, Setting]) -> Iterator[Push]:
    """Yield the places where a program writes to the Hub."""
    asked = settings.get("push_to_hub")
    named = settings.get("hub_model_id")
    target = text_or_none(named.value) if named else None
    unknown = named is not None and named.value is UNKNOWN
    if asked is not None and asked.value is True:
        yield Push(asked.line, "push_to_hub=True", target or ("?" if unknown else None))
    trainers = set(_assigned_from(program, r"\w*Trainer"))
    # Calls below `if args.push_to_hub:` don't happen while nobody sets that.
    skipped: set[int] = set()
    for node, _ in program.nodes if asked is None or asked.value is not True else ():
        match node:
            case ast.If(test=ast.Attribute(attr="push_to_hub"), body=body):
                skipped.update(id(inner) for statement in body for inner in ast.walk(statement))
    for call in program.calls:
        if id(call.node) in skipped:
            continue
        if call.last.startswith("push_to_hub"):
            own = call.base in trainers or call.base.endswith("trainer")
            repo = call.get("repo_id", 0) or call.get("hub_model_id")
            yield Push(
                call.line,
                f"{call.base or 'a'}.{call.last}()",
                (target or ("?" if unknown else None)) if own else text_or_none(repo) or "?",
            )
        elif call.last in _UPLOADS:
            yield Push(call.line, f"{call.last}()", text_or_none(call.get("repo_id")) or "?")


def _unasked_pushes(program: Program, typed: TypedSettings | None) -> set[int]:
    """Return the lines where a shipped trainer writes to the repo of a setting that is not given."""
    if typed is None or typed.text("hub_model_id"):
        return set()
    named = ((c.line, [*c.node.args, *(k.value for k in c.node.keywords)]) for c in program.calls if c.node)
    return {at for at, args in named if any(isinstance(a, ast.Attribute) and a.attr == "hub_model_id" for a in args)}


def _assigned_from(program: Program, pattern: str) -> Iterator[str]:
    """Yield the variables that take the result of a call whose name ends so."""
    for node, _ in program.nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name), *_], value=ast.Call(func=func)) if re.fullmatch(
                pattern, program.dotted(func).rpartition(".")[2]
            ):
                yield name
