"""Read typed settings from defaults, one file, the environment and flags; later sources take precedence."""

import argparse
import dataclasses
import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

from gputrain.outcome import Exit, Stop, say

ENVIRONMENT = "TRAIN_"
NEEDED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
TRUE, FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def option(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    several: bool = False,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Return a dataclass field with its help and its limits. `several` allows several choices, separated by commas."""
    limits = {"choices": choices, "several": several, "least": least, "most": most}
    return dataclasses.field(default=default, metadata={"help": text, **limits})


@dataclass
class Common:
    """Settings that every script has. Each field is created with `option`."""

    smoke: bool = option(False, "use a tiny random model and made-up inputs, to test the script and the machine")
    model: str = option("", "model to use: Hub id or folder")
    out: str = option("out", "output folder")
    hub_model_id: str = option("", "Hub repo to push to, owner/name; needs HF_TOKEN")
    hub_public: bool = option(False, "create a public repo")

    def check(self) -> None:
        """Raise Stop if a required setting is missing or settings contradict each other."""
        if not self.model:
            raise Stop(Exit.CONFIG, "model is not set", "pass --model ID_OR_FOLDER")
        if self.hub_model_id and self.hub_model_id.count("/") != 1:
            raise Stop(Exit.CONFIG, f"hub_model_id {self.hub_model_id!r} is not owner/name", "pass owner/name")


@dataclass
class Settings(Common):
    """Settings of every trainer."""

    revision: str = option("main", "revision of the model")
    dataset: str = option("", "training data: jsonl, json, csv or parquet file, URL, folder, or Hub id")
    dataset_config: str = option("", "configuration of a Hub dataset")
    split: str = option("train", "split to train on")
    eval_dataset: str = option("", "separate data for evaluation")
    eval_split: str = option("", "split to evaluate on; if empty, eval_fraction is split off")
    eval_fraction: float = option(0.05, "share of rows held out for evaluation; 0: none", least=0, most=0.5)
    eval_rows: int = option(500, "maximum number of rows to evaluate on", least=1)
    columns: str = option("", "renames, such as question=prompt,answer=completion")
    max_rows: int = option(0, "maximum number of rows to train on; 0: all", least=0)
    steps: int = option(0, "number of optimizer steps; 0: use epochs instead", least=0)
    epochs: float = option(1.0, "number of passes over the data; used if steps is 0", least=0)
    batch_size: int = option(16, "effective batch: rows per optimizer step over all GPUs", least=1)
    micro_batch: int = option(0, "rows on one GPU at a time; 0: depends on the GPU's memory", least=0)
    learning_rate: float = option(2e-5, "peak learning rate", least=0, most=1)
    scheduler: str = option("cosine", "learning-rate schedule", choices=("cosine", "linear", "constant"))
    warmup: float = option(0.03, "share of steps used for warm-up", least=0, most=0.5)
    weight_decay: float = option(0.0, "weight decay", least=0, most=1)
    max_grad_norm: float = option(1.0, "maximum gradient norm; larger gradients are clipped", least=0)
    seed: int = option(42, "random seed, also for the data order", least=0)
    save_steps: int = option(100, "steps between checkpoints", least=1)
    eval_steps: int = option(0, "steps between evaluations; 0: at each checkpoint", least=0)
    logging_steps: int = option(10, "steps between lines of metrics", least=1)
    keep: int = option(2, "number of checkpoints to keep; the best and the newest are always kept", least=1)
    precision: str = option("auto", "numeric precision of training", choices=("auto", "bf16", "fp16", "fp32"))
    fast: bool = option(False, "use optimizations that are known to work on this GPU")
    cpu: bool = option(False, "train without a GPU")
    expect_gpu: str = option("", "part of the required GPU's name, such as H100; on any other GPU, the run ends")
    processes: int = option(0, "processes to start; 0: one for each GPU", least=0)
    sharding: str = option("none", "how several GPUs share the model", choices=("none", "fsdp2", "deepspeed"))
    workers: int = option(0, "data loader workers per process", least=0, most=4)
    report: str = option("none", "trackers, comma-separated", choices=("none", "tensorboard", "trackio"), several=True)
    callback: str = option("", "your own callbacks, comma-separated: file.py:Class")
    extra: str = option("", "further arguments of the method's config class, such as neftune_noise_alpha=5")
    objective: str = option("eval_loss", "metric for ranking checkpoints, also written to result.json")
    greater_is_better: bool = option(False, "a higher objective is better")

    def check(self) -> None:
        """Raise Stop if a required setting is missing or settings contradict each other."""
        super().check()
        if not self.dataset:
            raise Stop(Exit.CONFIG, "dataset is not set", "pass --dataset FILE_URL_OR_ID")
        pairs("extra", self.extra)
        if not self.steps and not self.epochs:
            raise Stop(Exit.CONFIG, "steps and epochs are both 0", "pass --steps or --epochs")
        if self.micro_batch and self.batch_size % self.micro_batch:
            message = f"batch_size {self.batch_size} is not a multiple of micro_batch {self.micro_batch}"
            raise Stop(Exit.CONFIG, message, "choose a micro_batch that divides batch_size")


S = TypeVar("S", bound=Common)


class Parser(argparse.ArgumentParser):
    """A parser that raises Stop for errors."""

    def error(self, message: str) -> NoReturn:
        """Raise Stop with the parser's message."""
        raise Stop(Exit.CONFIG, message, "see --help")


def values_given(kind: type, words: list[str]) -> dict[str, Any]:
    """Return the values from `--config FILE`, environment variables TRAIN_NAME and flags, as they were written.

    Raises:
        Stop: a name is unknown.

    """
    fields = {f.name: f for f in dataclasses.fields(kind)}
    types = get_type_hints(kind)
    parser = Parser(description=kind.__doc__, allow_abbrev=False)
    parser.add_argument("--config", default="", help="YAML or JSON file with settings")
    for name, field in fields.items():
        flag = f"--{name.replace('_', '-')}"
        text = f"{field.metadata['help']} (default: {field.default!r})".replace("%", "%%")
        if types[name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(flag, default=None, help=text)
    parsed, others = parser.parse_known_args(words)
    flags = vars(parsed)
    file = flags.pop("config")
    unknown = [word.partition("=")[0].lstrip("-").replace("-", "_") for word in others]
    values: dict[str, Any] = read_file(Path(file)) if file else {}
    for name in fields:
        values.update({name: os.environ[v]} if (v := ENVIRONMENT + name.upper()) in os.environ else {})
    values.update({name: value for name, value in flags.items() if value is not None})
    for name in (*unknown, *values):
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            raise Stop(Exit.CONFIG, f"{name} is not a setting", f"did you mean {near[0]}?" if near else "see --help")
    mention_near_misses(fields)
    return values


def mention_near_misses(fields: Mapping[str, Any]) -> None:
    """Warn about variables that resemble a setting. Other variables with this prefix may belong to another program."""
    for variable in sorted(v for v in os.environ if v.startswith(ENVIRONMENT)):
        name = variable.removeprefix(ENVIRONMENT).lower()
        near = difflib.get_close_matches(name, fields, 1, 0.8)
        if near and name not in fields:
            say(f"{variable} is not a setting and is ignored; did you mean {ENVIRONMENT}{near[0].upper()}?")


def read_settings(kind: type[S], words: list[str]) -> S:
    """Return checked settings from `--config FILE`, environment variables TRAIN_NAME and flags.

    Raises:
        Stop: a name is unknown, a value is out of its limits, or settings contradict each other.

    """
    types = get_type_hints(kind)
    made = kind(**{name: convert(name, types[name], value) for name, value in values_given(kind, words).items()})
    for field in dataclasses.fields(kind):
        check_limits(field.name, getattr(made, field.name), field.metadata)
    made.check()
    return made


def read_file(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file, in the format of flags and variables.

    A setting without a value keeps its default. A list becomes a comma-separated string, and a mapping becomes
    `old=new` pairs.
    """
    fix = "write one `name: value` line for each setting; --help lists the settings"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        fix = "correct --config; paths are relative to the working folder"
        raise Stop(Exit.CONFIG, f"config {path} can't be read: {error.strerror}", fix) from None
    except UnicodeDecodeError:
        raise Stop(Exit.CONFIG, f"config {path} is not UTF-8 text", fix) from None
    try:
        if path.suffix == ".json":
            values = json.loads(text)
        else:
            import yaml

            values = yaml.safe_load(text)
    except Exception as error:
        raise Stop(Exit.CONFIG, f"config {path} is not valid: {' '.join(str(error).split())}", fix) from None
    if not isinstance(values, dict):
        raise Stop(Exit.CONFIG, f"config {path} is not a mapping of settings", fix)
    return {str(name): joined(value) for name, value in values.items() if value is not None}


def pairs(name: str, text: str) -> dict[str, str]:
    """Parse `old=new,old=new`, the value of the setting `name`, into a mapping."""
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    found = {old.strip(): new.strip() for old, _, new in parts}
    if not all(found) or not all(found.values()) or len(found) < len(parts):
        raise Stop(Exit.CONFIG, f"{name} is {text!r}", "write name=value,name=value")
    return found


def joined(value: Any) -> Any:
    """Return a list or a mapping in the format of a flag."""
    if isinstance(value, dict):
        value = [f"{old}={new}" for old, new in value.items()]
    return ",".join(str(part) for part in value) if isinstance(value, list) else value


def convert(name: str, kind: type, value: Any) -> Any:
    """Return a value converted to the field's type.

    Raises:
        Stop: the value does not have this type.

    """
    try:
        if kind is bool:
            word = str(value).lower()
            if word not in TRUE | FALSE:
                raise ValueError
            return word in TRUE
        if kind is int and isinstance(value, (bool, float)):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        raise Stop(Exit.CONFIG, f"{name} is {value!r}, which is not {kind.__name__}", f"pass {NEEDED[kind]}") from None


def check_limits(name: str, value: Any, limits: Any) -> None:
    """Raise Stop if a value is not among the choices or is out of its limits."""
    choices, least, most = limits["choices"], limits["least"], limits["most"]
    words = [word.strip() for word in value.split(",")] if limits["several"] else [value]
    if choices and (unknown := next((word for word in words if word not in choices), None)) is not None:
        raise Stop(Exit.CONFIG, f"{name} is {unknown!r}", f"choose from {', '.join(choices)}")
    if (least is not None and not value >= least) or (most is not None and not value <= most):
        allowed = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
        raise Stop(Exit.CONFIG, f"{name} is {value:g}", f"choose a value {allowed}")
