"""Find a training program's repos, columns, settings, pushes, variables and subprocesses without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuwarden.static_analysis.column_references import column_reads, columns_of, reads_of_some_rows, row_functions
from gpuwarden.static_analysis.command_line import CommandLine, command_line
from gpuwarden.static_analysis.declared_options import flags
from gpuwarden.static_analysis.ecosystem_tables import CONFIGS, HEADS, TRAINERS
from gpuwarden.static_analysis.env_and_shell import EnvRead, Shell, env_reads, shells_of
from gpuwarden.static_analysis.hub_references import HF_URL, RepoUse, is_repo_id, repos_of, text_or_none
from gpuwarden.static_analysis.mentions import Mention, mentions
from gpuwarden.static_analysis.package_usage import PackageUse, package_use
from gpuwarden.static_analysis.static_eval import UNKNOWN, Call, Program
from gpuwarden.static_analysis.streams import trains_on_stream
from gpuwarden.static_analysis.survey import idle_lines
from gpuwarden.static_analysis.three_valued import same
from gpuwarden.static_analysis.typed_settings import TypedSettings, pairs, settings_repos, typed_settings
from gpuwarden.static_analysis.writes import (
    LIGHTNING,
    Write,
    opened_folders,
    trains,
    unseen_savers,
    unseen_writers,
    writes_of,
)

_ARGUMENTS = re.compile(r"\w*TrainingArguments|\w+Config")
_NOT_ARGUMENTS = frozenset(
    {"LoraConfig", "BitsAndBytesConfig", "PeftConfig", "AutoConfig", "GenerationConfig", "ModelConfig"}
)


@dataclass(frozen=True)
class Setting:
    """One argument in a training configuration; its value may be UNKNOWN."""

    value: Any
    line: int
    owner: str


@dataclass(frozen=True)
class Push:
    """A write to the Hub. `target` is None if the program does not specify a repo, and `?` if the repo is unknown.

    `maybe` is true if the write depends on an unknown condition or setting, and `tried` if the program continues when
    the write fails.
    """

    line: int
    via: str
    target: str | None = None
    maybe: bool = False
    tried: bool = False


@dataclass(frozen=True)
class Uses:
    """The facts that `analyse` finds in a program."""

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
    some_reads: tuple[tuple[str, int, frozenset[str]], ...] = ()
    """Columns that are read only from rows with certain values, each with the columns that the condition reads."""
    row_functions: int = 0
    """Number of different functions applied to rows. The first one is called with the dataset's columns."""
    makes: frozenset[str] = frozenset()
    reshaped: bool = False
    assigned: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()
    typed: TypedSettings | None = None
    package_use: PackageUse = field(default_factory=PackageUse)
    command_line: CommandLine | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    trains: bool = False
    empty: bool = False
    """The program has no calls and no imports, so it does nothing."""
    writes: tuple[Write, ...] = ()
    unseen: tuple[str, ...] = ()
    """Descriptions of code that was not read and may write any file."""
    savers: tuple[str, ...] = ()
    """Descriptions of code that was not read and may save the model."""
    streams: bool | None = False
    """Whether a trainer is given a streamed dataset to train on; None if unknown."""
    configured: bool = False
    """Any setting may come from a file or from arguments that the program itself sets."""
    opened: tuple[Call, ...] = ()
    """Calls that load a model or a dataset from a relative folder that the program does not create."""

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting's value; `default` if it is not given."""
        found = self.settings.get(name)
        return default if found is None else found.value

    def line_of(self, name: str) -> int:
        """Return a setting's line; 0 if it comes from the command line."""
        found = self.settings.get(name)
        return found.line if found else 0

    def called(self, *last: str) -> Call | None:
        """Return the first call whose function or method has one of these names."""
        return next((c for c in self.calls if c.last in last), None)


def analyse(program: Program, here: Iterable[str] = ()) -> Uses:
    """Analyze a program. `here` lists the relative paths that its working folder will contain."""
    here = frozenset(here)
    targets = [t for node, _ in program.nodes if isinstance(node, ast.Assign) for t in node.targets]
    own = {n.name for n in program.classes.values() if any(program.dotted(b).endswith("Trainer") for b in n.bases)}
    trainers = tuple(
        c for c in program.calls if (c.last.endswith("Trainer") and not c.name.startswith(".")) or c.name in own
    )
    trainers = tuple(replace(c, open=True) if _chooses(program, c.name) else c for c in trainers)
    renamed = [*renamed_trainers(program)]
    if renamed:  # they may be given any arguments
        trainers = tuple(replace(call, open=True) for call in trainers)
    settings = dict(settings_of(program, trainers))
    local = frozenset((*_local_names(program, settings), *here))
    renames, makes, reshaped = columns_of(program)
    typed = typed_settings(program)
    shells = tuple(shells_of(program))
    idle = idle_lines(program.tree)
    repos = [*repos_of(program, trainers, local)]
    if typed is not None:
        settings |= _named_settings(typed)
        renames = {**renames, **typed.renames}
        repos += [use for use in settings_repos(typed) if is_repo_id(use.id, here)]
    writes = [*writes_of(program, trainers, {name: found.value for name, found in settings.items()})]
    pushes = [*pushes_of(program, settings, trainers), *(p for w in writes for p in _pushed_file(w))]
    written = {(p.target, p.line) for w in writes for p in _pushed_file(w)}
    return Uses(
        imports=tuple(_imports(program, required=True)),
        optional=tuple(sorted({n for n, _ in _imports(program, required=False)})),
        calls=program.calls,
        repos=tuple(dict.fromkeys(use for use in repos if (use.id, use.line) not in written)),
        methods=methods_of(program, trainers),
        settings=settings,
        trainers=trainers,
        pushes=tuple(
            replace(p, maybe=p.maybe or p.line in idle) for p in pushes if p.line not in _unasked_pushes(program, typed)
        ),
        env=tuple(env_reads(program)),
        shells=shells,
        renames=renames,
        reads=tuple(column_reads(program)),
        some_reads=tuple(reads_of_some_rows(program)),
        row_functions=len({f.id if isinstance(f, ast.Name) else id(c) for c, f in row_functions(program)}),
        makes=frozenset(makes),
        reshaped=reshaped,
        assigned=frozenset(t.attr for t in targets if isinstance(t, ast.Attribute)),
        local=local,
        typed=typed,
        package_use=package_use(program),
        command_line=command_line(program) if program.given else None,
        flags=program.given,
        trains=trains(program, trainers),
        empty=not program.calls and not any(isinstance(n, ast.Import | ast.ImportFrom) for n, _ in program.nodes),
        writes=tuple(
            replace(w, maybe=w.maybe or w.line in idle)
            for w in (*writes, *(Write(mention.line, mention.last, None, maybe=True) for mention in renamed))
        ),
        unseen=tuple(dict.fromkeys(unseen_writers(program, shells, local))),
        savers=tuple(dict.fromkeys(unseen_savers(program, shells, trainers, local))),
        streams=trains_on_stream(program, trainers),
        configured="**" in settings and not settings["**"].line,
        opened=tuple(opened_folders(program, local)),
    )


# ------------------------------------------------------------------------------------------------------- imports


def _imports(program: Program, *, required: bool) -> Iterator[tuple[str, int]]:
    """Yield the dotted names and lines of the required imports, or of the optional ones if `required` is false."""
    for node, _ in program.nodes:
        if (id(node) in program.optional or id(node) in program.maybe) is required:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


# ------------------------------------------------------------------------------------------------------ settings


def settings_of(program: Program, trainers: Iterable[Call]) -> Iterator[tuple[str, Setting]]:
    """Yield the settings from a program's configurations, from later assignments, and from its command line.

    The settings are UNKNOWN if a trainer's configuration is a parameter or has an unknown class.
    """
    holders = set(_assigned_from(program, _ARGUMENTS.pattern))
    configs = [_with_folder(c) for c in program.calls if is_configuration(c)]
    parsed = any(c.last in {"HfArgumentParser", "TrlParser"} for c in program.calls)
    for call in () if configs or parsed else trainers:
        if not call.name.startswith(LIGHTNING) and call.get("args", 1) is not None:
            for name in ("**", "push_to_hub", "hub_model_id"):
                yield name, Setting(UNKNOWN, call.line, call.last)
    yield from _configured(configs)
    for node, scope in program.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            target = node.targets[0]
            if isinstance(target.value, ast.Name) and target.value.id in holders | {"training_args"}:
                value = UNKNOWN if id(node) in program.maybe else program.value(node.value, scope)
                yield target.attr, Setting(value, node.lineno, target.value.id)
    for changed, line in _changed(program, configs, holders | {"training_args"}):
        every = ("**", "push_to_hub", "hub_model_id", *(name for call in configs for name in call.kwargs))
        for name in every if changed == "**" else (changed,):
            yield name, Setting(UNKNOWN, line, "the script")
    if parsed:
        yield from ((name, Setting(value, 0, "the command line")) for name, value in program.flags.items())
        if program.configured:
            source = "the script's own arguments" if program.rewrites else "a settings file"
            yield "**", Setting(UNKNOWN, 0, source)


def _configured(configs: Sequence[Call]) -> Iterator[tuple[str, Setting]]:
    """Yield the settings in all configurations, in linear time."""
    given: dict[str, list[Call]] = {}
    for call in configs:
        for name in call.kwargs:
            given.setdefault(name, []).append(call)
    opened, values = sum(c.open for c in configs), dict[str, Any]()
    for name, calls in given.items():
        # If there are several configurations, it is unknown which one the run uses.
        hidden = opened > sum(c.open for c in calls)
        others = [UNKNOWN if hidden else None] if len(calls) < len(configs) else []
        values[name] = same([c.kwargs[name] for c in calls] + others)
    for call in configs:
        for name in call.kwargs:
            yield name, Setting(values[name], call.line, call.last)
        if call.open:
            yield "**", Setting(UNKNOWN, call.line, call.last)


def _with_folder(call: Call) -> Call:
    """Name a configuration's positional argument: `SFTConfig("out")`. Other positional arguments are unknown."""
    known = len(call.args) == 1 and (call.last in CONFIGS or "TrainingArguments" in call.last)
    named = {"output_dir": call.args[0]} if known else {}
    return replace(call, kwargs={**named, **call.kwargs}, open=call.open or (bool(call.args) and not known))


def is_configuration(call: Call) -> bool:
    """Return true if a call creates a training configuration."""
    named = _ARGUMENTS.fullmatch(call.last) and call.last not in _NOT_ARGUMENTS
    return bool(named) and (call.last in CONFIGS or "TrainingArguments" in call.last or call.name.startswith("trl."))


# Maps a bundled trainer's setting to its name in a training configuration.
_SAME = {"out": "output_dir", "steps": "max_steps", "micro_batch": "per_device_train_batch_size"}


def _named_settings(typed: TypedSettings) -> dict[str, Setting]:
    """Return the settings given to a bundled trainer, under their names in a training configuration."""
    # If the batch size is 0, the trainer chooses it, and halves it when memory runs out.
    values = {"out": typed.declared["out"].default} if "out" in typed.declared else {}
    values |= {"micro_batch": 0} if "micro_batch" in typed.declared else {}
    values |= typed.given
    given = {_SAME[name]: value for name, value in values.items() if name in _SAME and value is not None}
    given |= flags([f"--{name}={value}" for name, value in pairs(typed.text("extra")).items()])
    return {name: Setting(value, 0, "the command line") for name, value in given.items()}


def _chooses(program: Program, name: str) -> bool:
    """Return true if a script's own trainer class may pass its base class arguments that its caller does not pass."""
    own = program.classes.get(name)
    for node in ast.walk(own) if own else ():
        match node:
            case ast.Name(id="eval_dataset") | ast.Constant(value="eval_dataset") | ast.keyword(arg="eval_dataset"):
                return True
            case ast.Call(func=ast.Attribute(attr="__init__"), args=args, keywords=keywords):
                if not all(isinstance(a, ast.Starred) for a in args) or any(k.arg for k in keywords):
                    return True
    return False


def _changed(program: Program, configs: Sequence[Call], holders: set[str]) -> Iterator[tuple[str, int]]:
    """Yield the settings that a program may change in its configurations, each with its line; `**` for all settings."""
    made = {id(call.node) for call in configs}
    setters = {
        scope.name
        for n, scope in program.nodes
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
        if (isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
        or getattr(n, "id", "") in {"setattr", "vars"}
    }

    def is_config(node: ast.AST) -> bool:
        return id(node) in made or (isinstance(node, ast.Name) and node.id in holders)

    for call in program.calls:
        match call.node:
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr.startswith("set_") and is_config(value):
                yield "**", call.line
            case ast.Call(args=[first, *_]) if is_config(first):
                if call.name == "setattr":
                    name = call.get("name", 1)
                    yield name if isinstance(name, str) else "**", call.line
                elif call.name in {"vars", "dataclasses.replace"} | setters:
                    yield "**", call.line


def renamed_trainers(program: Program) -> Iterator[Mention]:
    """Yield the trainer classes that a program passes on or renames: `T = SFTTrainer`."""
    yield from (m for m in mentions(program) if m.imported and m.last.endswith("Trainer"))


def methods_of(program: Program, trainers: Iterable[Call]) -> frozenset[str]:
    """Return the training methods: those of trl trainers, or, for a plain Trainer, the method for the model's head."""
    found = {TRAINERS[t.last.removeprefix("Unsloth")] for t in trainers if t.last.removeprefix("Unsloth") in TRAINERS}
    if not found and any(t.last in {"Trainer", "Seq2SeqTrainer"} for t in trainers):
        names = {n.rpartition(".")[2] for n, _ in _imports(program, required=True)}
        found = {method for name in names for head, method in HEADS.items() if name.endswith(head)}
    return frozenset(found)


def _local_names(program: Program, settings: Mapping[str, Setting]) -> Iterator[str]:
    """Yield the paths that the program writes. A string that equals one of them is not a repo id."""
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

_UPLOADS = frozenset(
    {"upload_folder", "upload_file", "upload_large_folder", "create_commit", "sync_bucket", "CommitScheduler"}
)


def pushes_of(program: Program, settings: Mapping[str, Setting], trainers: Iterable[Call]) -> Iterator[Push]:
    """Yield a program's writes to the Hub."""
    asked = settings.get("push_to_hub")
    named = settings.get("hub_model_id")
    target = text_or_none(named.value) if named else None
    unknown = named is not None and named.value is UNKNOWN
    if asked is not None and asked.value in (True, UNKNOWN):
        yield Push(asked.line, "push_to_hub=True", target or ("?" if unknown else None), asked.value is UNKNOWN)
    made = {id(call.node) for call in trainers}
    trained = (n.targets for n, _ in program.nodes if isinstance(n, ast.Assign) and id(n.value) in made)
    holders = {t.id for targets in trained for t in targets if isinstance(t, ast.Name)}
    for call in program.calls:
        if call.last.startswith("push_to_hub"):
            own = call.owner in holders or call.owner.endswith("trainer")
            repo = call.get("repo_id", 0)
            repo = call.get("hub_model_id") if repo is None else repo
            yield Push(
                call.line,
                f"{call.base or 'a'}.{call.last}()",
                (target or ("?" if unknown else None)) if own else text_or_none(repo) or "?",
                call.maybe,
                call.tried,
            )
        elif call.last in _UPLOADS:
            yield Push(call.line, f"{call.last}()", text_or_none(call.get("repo_id")) or "?", call.maybe, call.tried)
    for mention in mentions(program):
        if mention.last in _UPLOADS or mention.last.startswith("push_to_hub"):
            yield Push(mention.line, mention.last, "?", maybe=True)


def _pushed_file(write: Write) -> Iterator[Push]:
    """Yield a push for a file that is written to the Hub's file system."""
    if write.path is not None and write.path.startswith("hf://"):
        found = HF_URL.match(write.path)
        yield Push(write.line, write.via, found[2] if found else "?", write.maybe, write.tried)


def _unasked_pushes(program: Program, typed: TypedSettings | None) -> set[int]:
    """Return the lines in which a bundled trainer would push to `hub_model_id`, if that setting is not given."""
    if typed is None or typed.text("hub_model_id"):
        return set()
    named = ((c.line, [*c.node.args, *(k.value for k in c.node.keywords)]) for c in program.calls if c.node)
    return {at for at, args in named if any(isinstance(a, ast.Attribute) and a.attr == "hub_model_id" for a in args)}


def _assigned_from(program: Program, pattern: str) -> Iterator[str]:
    """Yield the variables that are assigned the result of a call to a function whose name matches a pattern."""
    for node, _ in program.nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name), *_], value=ast.Call(func=func)) if re.fullmatch(
                pattern, program.dotted(func).rpartition(".")[2]
            ):
                yield name
