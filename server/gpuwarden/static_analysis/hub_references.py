"""Find the Hugging Face Hub repos that a training program refers to, and the role of each."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from gpuwarden.core.repos import REPO_ID, RepoType
from gpuwarden.static_analysis.static_eval import UNKNOWN, Call, Program

# First arguments to load_dataset that name a file format instead of a repo.
BUILDERS = frozenset(
    ["json", "csv", "parquet", "text", "arrow", "imagefolder", "audiofolder", "videofolder", "webdataset", "pandas"]
)
# Libraries whose `from_pretrained` accepts a repo id; in other libraries, the argument may have another meaning.
_LIBRARIES: Final = frozenset(
    """transformers diffusers peft trl unsloth sentence_transformers datasets huggingface_hub setfit optimum open_clip
    adapters auto_gptq awq gliner span_marker tokenizers speechbrain pyannote""".split()  # noqa: SIM905
)
_TIMM_HUB = re.compile(r"hf[-_]hub:(.+)")
HF_URL = re.compile(r"hf://(?!buckets/)(datasets|models|spaces)?/?([\w.-]+/[\w.-]+)")


@dataclass(frozen=True)
class RepoUse:
    """One repo that a program reads. `role` is data, model, adapter, tokenizer or file.

    `unknown` lists the fields whose values are unknown. `maybe` is true if the repo is read only under an unknown
    condition, and `tried` if the program continues after a failure. `inside` is the folder in the repo from which
    the program loads.
    """

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
    unknown: frozenset[str] = frozenset()
    maybe: bool = False
    tried: bool = False
    inside: str | None = None

    @property
    def certain(self) -> bool:
        """Return true if the program always reads the repo, and fails if that is impossible."""
        return not self.maybe and not self.tried


def repos_of(program: Program, trainers: Iterable[Call], local: frozenset[str]) -> Iterator[RepoUse]:
    """Yield every use of a repo in a program. `local` contains the folders that the program writes."""
    uses = [*loaded_repos(program)]
    for call in trainers:
        uses += _model(call.get("model", 0), call, trains=True)
        uses += _model(call.get("ref_model"), call)
        rewards = call.get("reward_funcs")
        for reward in rewards if isinstance(rewards, list) else [rewards]:
            uses += _model(reward, call)
    for call in program.calls:
        for value in (*call.args, *call.kwargs.values()):
            if isinstance(value, str) and (found := HF_URL.match(value)):
                uses.append(
                    RepoUse(
                        found[2],
                        "dataset" if found[1] == "datasets" else "model",
                        call.line,
                        "file",
                        maybe=call.maybe,
                        tried=call.tried,
                    )
                )
    if any(c.last in {"HfArgumentParser", "TrlParser"} for c in program.calls):
        flagged = flagged_repos(program.given, program.option)
        uses += (replace(use, maybe=program.rewrites) for use in flagged)
    yield from (use for use in uses if is_repo_id(use.id, local))


def is_repo_id(text: object, local: frozenset[str] = frozenset()) -> bool:
    """Return true if a string is a repo id: it has the right format and is not a path that the program writes."""
    if not isinstance(text, str) or not re.fullmatch(REPO_ID, text):
        return False
    if text in local or any(text.startswith(p.rstrip("/") + "/") or p.startswith(text + "/") for p in local if p):
        return False
    return not text.endswith((".json", ".jsonl", ".csv", ".parquet", ".txt", ".pt", ".bin", ".safetensors", ".yaml"))


def split_keys(program: Program) -> dict[int, list[str]]:
    """Return the splits read from each call's result, directly or through a variable, keyed by the call's id."""
    held: dict[str, ast.Call | None] = {}
    for node, _ in program.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    one = node.value if isinstance(node.value, ast.Call) and target.id not in held else None
                    held[target.id] = one
    own: set[str] = set()  # keys that the script sets, or that it tests for before use
    for node, _ in program.nodes:
        match node:
            case ast.Subscript(slice=ast.Constant(value=str(key)), ctx=ast.Store()):
                own.add(key)
            case ast.Compare(left=ast.Constant(value=str(key)), ops=[ast.In() | ast.NotIn(), *_]):
                own.add(key)
    found: dict[int, list[str]] = {}
    open_ = program.maybe | program.tried
    for node in (n for n, _ in program.nodes if id(n) not in open_):
        match node:
            case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(value=str(key)), ctx=ast.Load()):
                found.setdefault(id(call), []).append(key)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key)), ctx=ast.Load()):
                if (load := held.get(name)) is not None and key not in own:
                    found.setdefault(id(load), []).append(key)
    return found


def loaded_repos(program: Program) -> Iterator[RepoUse]:
    """Yield the repos that a program's calls load."""
    keys = split_keys(program)
    for call in program.calls:
        if call.last in {"load_dataset", "load_dataset_builder", "get_dataset_config_names"}:
            yield from dataset_uses(call, keys.get(id(call.node), ()))
        elif call.last == "from_pretrained":
            yield from pretrained_uses(call, program)
        elif call.last in {"snapshot_download", "hf_hub_download"}:
            kind: Any = call.get("repo_type", default="model") or "model"
            name = call.get("repo_id", 0)
            if isinstance(name, str) and kind in get_args(RepoType):
                revision = text_or_none(call.get("revision"))
                file = text_or_none(call.get("filename", 1)) if call.last == "hf_hub_download" else None
                hidden = _unknown(call, revision="revision", file="filename")
                yield RepoUse(
                    name,
                    kind,
                    call.line,
                    "file",
                    revision=revision,
                    file=file,
                    unknown=hidden,
                    maybe=call.maybe,
                    tried=call.tried,
                )
        elif call.last in {"pipeline", "LLM", "SentenceTransformer", "CrossEncoder"} and not call.name.startswith("."):
            model = call.get("model", 1 if call.last == "pipeline" else 0)
            model = call.get("model_name_or_path") if model is None else model
            short = call.last == "SentenceTransformer" and isinstance(model, str) and "/" not in model
            yield from _model(f"sentence-transformers/{model}" if short else model, call)
        elif call.last == "create_model" and (found := _TIMM_HUB.fullmatch(str(call.get("model_name", 0)))):
            yield from _model(found[1], call)


def dataset_uses(call: Call, keys: Iterable[str]) -> Iterator[RepoUse]:
    """Yield the repos that a `load_dataset` call reads."""
    path = call.get("path", 0)
    if not isinstance(path, str) or path in BUILDERS or path.startswith((".", "/", "~")):
        return
    split = text_or_none(call.get("split"))
    hidden = _unknown(call, revision="revision", config=("name", 1), split="split", file="data_files")
    if any(call.get(name) is not None for name in ("data_dir", "trust_remote_code")):
        hidden |= {"config", "split"}  # these arguments select files by other means
    for name in (split,) if split or "split" in call.kwargs else tuple(dict.fromkeys(keys)) or (None,):
        yield RepoUse(
            path,
            "dataset",
            call.line,
            "data",
            revision=text_or_none(call.get("revision")),
            config=text_or_none(call.get("name", 1)),
            split=name,
            file=text_or_none(call.get("data_files")),
            streaming=call.get("streaming") is True,
            unknown=hidden,
            maybe=call.maybe,
            tried=call.tried,
        )


def _unknown(call: Call, **names: str | tuple[str, int]) -> frozenset[str]:
    """Return the fields whose argument is unknown or may be passed with `*` or `**`."""
    found = {f: call.get(*(n if isinstance(n, tuple) else (n,))) for f, n in names.items()}
    return frozenset(f for f, value in found.items() if value is UNKNOWN)


def pretrained_uses(call: Call, program: Program) -> Iterator[RepoUse]:
    """Yield the repos that a `from_pretrained` call reads."""
    revision = text_or_none(call.get("revision"))
    if defines(program.classes, call.base, "from_pretrained"):
        return  # the script's own method determines the name's meaning
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
        role = "tokenizer"  # an adapter's repo also has a tokenizer
    name = call.get("pretrained_model_name_or_path", 0)
    foreign = call.name.partition(".")[0] not in _LIBRARIES
    for use in _model(call.kwargs.get("model_name", name), call, role=role, revision=revision):
        yield replace(use, maybe=use.maybe or foreign)


def defines(classes: Mapping[str, ast.ClassDef], title: str, method: str) -> bool:
    """Return true if a class in the program, or one of its base classes in the program, defines a method."""
    node = classes.get(title)
    for _ in range(len(classes)):
        if node is None:
            return False
        if any(isinstance(part, ast.FunctionDef) and part.name == method for part in node.body):
            return True
        parents = (classes[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in classes)
        node = next(parents, None)
    return False


def flagged_repos(flags: Mapping[str, Any], option: Callable[[str], Any] | None = None) -> Iterator[RepoUse]:
    """Yield the repos in `--model_name_or_path` and `--dataset_name`, which are flags of trl and transformers scripts.

    `option` returns the value given for a flag, or the default that the script declares.
    """
    option = option or flags.get
    if isinstance(model := flags.get("model_name_or_path"), str):
        yield RepoUse(model, "model", 0, revision=text_or_none(flags.get("model_revision")), trains=True)
    if isinstance(data := flags.get("dataset_name"), str):
        config, split = option("dataset_config"), option("dataset_train_split")
        hidden = frozenset(name for name, value in (("config", config), ("split", split)) if value is UNKNOWN)
        yield RepoUse(
            data, "dataset", 0, "data", config=text_or_none(config), split=text_or_none(split), unknown=hidden
        )


def _model(
    name: Any, call: Call, role: str = "model", revision: str | None = None, trains: bool = False
) -> Iterator[RepoUse]:
    if isinstance(name, str) and not name.startswith((".", "/", "~")):
        heads = re.search(
            r"(For[A-Z]|FastLanguageModel|FastModel|FastVisionModel|SentenceTransformer|AutoModel)", call.name
        )
        yield RepoUse(
            name,
            "model",
            call.line,
            role,
            revision=revision,
            trains=trains or bool(heads),
            unknown=_unknown(call, revision="revision", inside="subfolder"),
            maybe=call.maybe,
            tried=call.tried,
            inside=text_or_none(call.get("subfolder")),
        )


def text_or_none(value: Any) -> str | None:
    """Return a value if it is a string, otherwise None."""
    return value if isinstance(value, str) else None
