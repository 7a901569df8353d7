"""What a training program will ask for: repos, columns, settings, pushes, variables, programs. Read, never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from gpuwarden.core.processes import EnvRead, Shell, env_reads, shells_of
from gpuwarden.core.repos import REPO_ID, RepoType
from gpuwarden.core.syntax import UNKNOWN, Call, Program
from gpuwarden.core.training import CONFIGS, HEADS, TRAINERS

# First arguments of load_dataset that name a file format and no repo.
BUILDERS = frozenset(
    ["json", "csv", "parquet", "text", "arrow", "imagefolder", "audiofolder", "videofolder", "webdataset", "pandas"]
)
_ARGUMENTS = re.compile(r"(Seq2Seq)?TrainingArguments|\w+Config")
_NOT_ARGUMENTS = frozenset(
    {"LoraConfig", "BitsAndBytesConfig", "PeftConfig", "AutoConfig", "GenerationConfig", "ModelConfig"}
)
_TIMM_HUB = re.compile(r"hf[-_]hub:(.+)")
_HF_URL = re.compile(r"hf://(datasets|models|spaces)?/?([\w.-]+/[\w.-]+)")


@dataclass(frozen=True)
class RepoUse:
    """One repo that the program reads. `role` is what for: data, model, adapter, or file."""

    id: str
    type: RepoType
    line: int
    role: str = "model"
    revision: str | None = None
    config: str | None = None
    split: str | None = None
    file: str | None = None
    streaming: bool = False
    trains: bool = False


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
    """Everything that `analyse` finds."""

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
    makes: frozenset[str] = frozenset()
    reshaped: bool = False
    assigned: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()

    def setting(self, name: str, default: Any = None) -> Any:
        """The value of a setting; `default` when it is not given."""
        found = self.settings.get(name)
        return default if found is None else found.value

    def line_of(self, name: str) -> int:
        """Where a setting stands; 0 when it comes from the command line."""
        found = self.settings.get(name)
        return found.line if found else 0

    def called(self, *last: str) -> Call | None:
        """The first call whose name ends in one of these."""
        return next((c for c in self.calls if c.last in last), None)


def analyse(program: Program) -> Uses:
    """Read a program."""
    settings = dict(_settings(program))
    trainers = tuple(c for c in program.calls if c.last.endswith("Trainer") and not c.name.startswith("."))
    local = frozenset(_local_names(program, settings))
    renames, makes, reshaped = _columns(program)
    return Uses(
        imports=tuple(_imports(program, required=True)),
        optional=tuple(sorted({n for n, _ in _imports(program, required=False)})),
        calls=program.calls,
        repos=tuple(dict.fromkeys(_repos(program, trainers, local))),
        methods=_methods(program, trainers),
        settings=settings,
        trainers=trainers,
        pushes=tuple(_pushes(program, settings)),
        env=tuple(env_reads(program)),
        shells=tuple(shells_of(program)),
        renames=renames,
        reads=tuple(_column_reads(program)),
        makes=frozenset(makes),
        reshaped=reshaped,
        assigned=frozenset(_assigned_attributes(program)),
        local=local,
    )


# ------------------------------------------------------------------------------------------------------- imports


def _imports(program: Program, *, required: bool) -> Iterator[tuple[str, int]]:
    """Dotted names that are imported, with lines."""
    for node, _ in program.nodes:
        if (id(node) in program.optional) is required:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


# ------------------------------------------------------------------------------------------------------ settings


def _is_arguments(call: Call) -> bool:
    return (
        call.last not in _NOT_ARGUMENTS
        and bool(_ARGUMENTS.fullmatch(call.last))
        and (call.last in CONFIGS or "TrainingArguments" in call.last or call.name.startswith("trl."))
    )


def _settings(program: Program) -> Iterator[tuple[str, Setting]]:
    holders = set(_assigned_from(program, _ARGUMENTS.pattern))
    for call in program.calls:
        if _is_arguments(call):
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


def _assigned_attributes(program: Program) -> Iterator[str]:
    for node, _ in program.nodes:
        if isinstance(node, ast.Assign):
            yield from (t.attr for t in node.targets if isinstance(t, ast.Attribute))


def _methods(program: Program, trainers: Iterable[Call]) -> frozenset[str]:
    found = {TRAINERS[t.last.removeprefix("Unsloth")] for t in trainers if t.last.removeprefix("Unsloth") in TRAINERS}
    if not found and any(t.last in {"Trainer", "Seq2SeqTrainer"} for t in trainers):
        names = {n.rpartition(".")[2] for n, _ in _imports(program, required=True)}
        found = {method for name in names for head, method in HEADS.items() if name.endswith(head)}
    return frozenset(found)


def _local_names(program: Program, settings: Mapping[str, Setting]) -> Iterator[str]:
    """Paths that the program itself writes; an id that equals one of them is no repo."""
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


# --------------------------------------------------------------------------------------------------------- repos


def _repos(program: Program, trainers: Iterable[Call], local: frozenset[str]) -> Iterator[RepoUse]:
    uses = [*_loaded(program), *_trained(trainers), *_hf_urls(program), *_flagged(program)]
    for use in uses:
        if is_repo_id(use.id, local):
            yield use


def is_repo_id(text: object, local: frozenset[str] = frozenset()) -> bool:
    """Whether a string can only be meant as a repo: the right shape, and no path that the program writes."""
    if not isinstance(text, str) or not re.fullmatch(REPO_ID, text):
        return False
    if text in local or any(text.startswith(p.rstrip("/") + "/") or p.startswith(text + "/") for p in local if p):
        return False
    return not text.endswith((".json", ".jsonl", ".csv", ".parquet", ".txt", ".pt", ".bin", ".safetensors", ".yaml"))


def _loaded(program: Program) -> Iterator[RepoUse]:
    for call in program.calls:
        if call.last in {"load_dataset", "load_dataset_builder", "get_dataset_config_names"}:
            yield from _dataset(call)
        elif call.last == "from_pretrained":
            yield from _pretrained(call)
        elif call.last in {"snapshot_download", "hf_hub_download"}:
            yield from _download(call)
        elif call.last in {"pipeline", "LLM", "SentenceTransformer", "CrossEncoder"} and not call.name.startswith("."):
            model = call.get("model", 1 if call.last == "pipeline" else 0) or call.get("model_name_or_path")
            yield from _model(model, call)
        elif call.last == "create_model" and (found := _TIMM_HUB.fullmatch(str(call.get("model_name", 0)))):
            yield from _model(found[1], call)


def _dataset(call: Call) -> Iterator[RepoUse]:
    path = call.get("path", 0)
    if not isinstance(path, str) or path in BUILDERS or path.startswith((".", "/", "~")):
        return
    yield RepoUse(
        path,
        "dataset",
        call.line,
        "data",
        revision=text_or_none(call.get("revision")),
        config=text_or_none(call.get("name", 1)),
        split=text_or_none(call.get("split")),
        file=text_or_none(call.get("data_files")),
        streaming=call.get("streaming") is True,
    )


def _pretrained(call: Call) -> Iterator[RepoUse]:
    revision = text_or_none(call.get("revision"))
    if call.name.startswith("peft.PeftModel"):
        base, adapter = call.get("model", 0), call.get("model_id", 1)
        yield from _model(base, call, revision=None)
        yield from _model(adapter, call, role="adapter", revision=revision)
        return
    role = "adapter" if re.search(r"\.(PeftConfig|AutoPeftModel\w*)\.", call.name) else "model"
    if (
        re.search(r"(Tokenizer\w*|Processor\w*|FeatureExtractor|Config)\.from_pretrained$", call.name)
        and role == "model"
    ):
        role = "tokenizer"  # an adapter's repo has one too
    name = call.get("pretrained_model_name_or_path", 0)
    yield from _model(call.kwargs.get("model_name", name), call, role=role, revision=revision)


def _download(call: Call) -> Iterator[RepoUse]:
    kind: Any = call.get("repo_type") or "model"
    name = call.get("repo_id", 0)
    if isinstance(name, str) and kind in get_args(RepoType):
        file = call.get("filename", 1) if call.last == "hf_hub_download" else None
        yield RepoUse(
            name, kind, call.line, "file", revision=text_or_none(call.get("revision")), file=text_or_none(file)
        )


def _trained(trainers: Iterable[Call]) -> Iterator[RepoUse]:
    for call in trainers:
        yield from _model(call.get("model", 0), call, trains=True)
        yield from _model(call.get("ref_model"), call)
        rewards = call.get("reward_funcs")
        for reward in rewards if isinstance(rewards, list) else [rewards]:
            yield from _model(reward, call)


def _hf_urls(program: Program) -> Iterator[RepoUse]:
    for call in program.calls:
        for value in (*call.args, *call.kwargs.values()):
            if isinstance(value, str) and (found := _HF_URL.match(value)):
                kind: RepoType = "dataset" if found[1] == "datasets" else "model"
                yield RepoUse(found[2], kind, call.line, "file")


def _flagged(program: Program) -> Iterator[RepoUse]:
    """What scripts of trl and transformers take from the command line."""
    if not any(c.last in {"HfArgumentParser", "TrlParser"} for c in program.calls):
        return
    yield from flagged_repos(program.flags)


def flagged_repos(flags: Mapping[str, Any]) -> Iterator[RepoUse]:
    """The repos that `--model_name_or_path` and `--dataset_name` name."""
    if isinstance(model := flags.get("model_name_or_path"), str):
        yield RepoUse(model, "model", 0, revision=text_or_none(flags.get("model_revision")), trains=True)
    if isinstance(data := flags.get("dataset_name"), str):
        split = text_or_none(flags.get("dataset_train_split"))
        yield RepoUse(data, "dataset", 0, "data", config=text_or_none(flags.get("dataset_config")), split=split)


def _model(
    name: Any, call: Call, role: str = "model", revision: str | None = None, trains: bool = False
) -> Iterator[RepoUse]:
    if isinstance(name, str) and not name.startswith((".", "/", "~")):
        heads = re.search(
            r"(For[A-Z]|FastLanguageModel|FastModel|FastVisionModel|SentenceTransformer|AutoModel)", call.name
        )
        yield RepoUse(name, "model", call.line, role, revision=revision, trains=trains or bool(heads))


def text_or_none(value: Any) -> str | None:
    """A text, or None for anything else, unknown values included."""
    return value if isinstance(value, str) else None


# ------------------------------------------------------------------------------------------------------- columns


_RESHAPES = frozenset(
    """map with_transform set_transform from_list from_dict from_generator from_pandas add_column extract_prompt
    unpair_preference_dataset concatenate_datasets interleave_datasets""".split()  # noqa: SIM905
)


def _columns(program: Program) -> tuple[dict[str, str], set[str], bool]:
    """Renamed columns, names of columns that are made, and whether rows are changed in ways that are not followed."""
    renames: dict[str, str] = {}
    reshaped = False
    makes: set[str] = set()
    for call in program.calls:
        if call.last == "rename_column" and len(call.args) >= 2 and all(isinstance(a, str) for a in call.args[:2]):
            renames[call.args[0]] = call.args[1]
        elif call.last in {"rename_columns", "rename_column"}:
            mapping = call.get("column_mapping", 0)
            if isinstance(mapping, dict):
                renames |= {k: v for k, v in mapping.items() if isinstance(v, str)}
            else:
                reshaped = True
        elif call.last == "add_column" and call.args and isinstance(call.args[0], str):
            makes.add(call.args[0])
        elif call.last in _RESHAPES and call.name.startswith((".", "datasets.", "trl.")):
            reshaped = True
    for node, scope in program.nodes:
        if isinstance(node, ast.Dict):
            makes.update(k for key in node.keys if isinstance(k := program.value(key, scope), str))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            if isinstance(key := program.value(node.slice, scope), str):
                makes.add(key)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
            makes.update(k.arg for k in node.keywords if k.arg)
    return renames, makes, reshaped


_ROW_FUNCTIONS = frozenset({"map", "filter", "with_transform", "set_transform"})


def _column_reads(program: Program) -> Iterator[tuple[str, int]]:
    """Columns that the functions given to `map` and `filter` read from their rows."""
    functions = {n.name: n for n, _ in program.nodes if isinstance(n, ast.FunctionDef)}
    seen: dict[int, ast.FunctionDef | ast.Lambda] = {}
    for call in program.calls:
        if call.last in _ROW_FUNCTIONS and call.name.startswith(".") and call.node is not None:
            given = call.node.args[:1] or [k.value for k in call.node.keywords if k.arg in {"function", "transform"}]
            inner: Any = given[0] if given else None
            if isinstance(inner, ast.Name):
                inner = functions.get(inner.id)
            if isinstance(inner, ast.FunctionDef | ast.Lambda) and inner.args.args:
                seen[id(inner)] = inner
    for function in seen.values():
        yield from _reads_of(function, function.args.args[0].arg)


def _reads_of(function: ast.FunctionDef | ast.Lambda, row: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(function):
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key)), ctx=ast.Load()) if (
                name == row
            ):
                yield key, node.lineno


# -------------------------------------------------------------------------------------------------------- pushes

_UPLOADS = frozenset({"upload_folder", "upload_file", "upload_large_folder", "create_commit", "sync_bucket"})


def _pushes(program: Program, settings: Mapping[str, Setting]) -> Iterator[Push]:
    asked = settings.get("push_to_hub")
    named = settings.get("hub_model_id")
    target = text_or_none(named.value) if named else None
    unknown = named is not None and named.value is UNKNOWN
    if asked is not None and asked.value is True:
        yield Push(asked.line, "push_to_hub=True", target or ("?" if unknown else None))
    trainers = set(_assigned_from(program, r"\w*Trainer"))
    for call in program.calls:
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


def _assigned_from(program: Program, pattern: str) -> Iterator[str]:
    """The variables that take the result of a call whose name ends so."""
    for node, _ in program.nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name), *_], value=ast.Call(func=func)) if re.fullmatch(
                pattern, program.dotted(func).rpartition(".")[2]
            ):
                yield name
