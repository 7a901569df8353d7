"""Where gpuwarden keeps its things, and what the user allows.

One TOML file holds the policy. Every value can be overridden by an environment variable whose name is the path in
capitals: `caps.per_job_usd` is `GPUWARDEN_CAPS_PER_JOB_USD`. No variable reaches `[local]`. Each effective value
remembers where it came from.

| variable | meaning |
|---|---|
| `GPUWARDEN_HOME` | folder of the ledger, the run records and pulled artifacts |
| `GPUWARDEN_POLICY` | the policy file |
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import platformdirs
from pydantic import BaseModel, ValidationError

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.inputs import in_words
from gpuwarden.core.policy import Policy

PREFIX = "GPUWARDEN_"
NOTES = "notes.toml"
FILE_ONLY = "local."
"""Settings that no variable reaches: what a job on this machine may do is decided by a person, in the file."""


@dataclass(frozen=True)
class Setting:
    """One effective value and where it came from: `default`, `file` or the name of a variable."""

    path: str
    value: object
    origin: str


@dataclass(frozen=True)
class Config:
    """The effective configuration."""

    home: Path
    policy_file: Path
    policy: Policy
    settings: tuple[Setting, ...]

    @property
    def notes_file(self) -> Path:
        """What the user told about their own setup; it lies beside the policy."""
        return self.policy_file.parent / NOTES


def load_config(env: Mapping[str, str] | None = None) -> Config:
    """Read the policy file and the environment. Raises BadRequest that names the file or variable at fault."""
    env = os.environ if env is None else env
    home = Path(env.get(f"{PREFIX}HOME") or platformdirs.user_data_dir("gpuwarden", appauthor=False)).expanduser()
    default = Path(platformdirs.user_config_dir("gpuwarden", appauthor=False)) / "policy.toml"
    file = Path(env.get(f"{PREFIX}POLICY") or default).expanduser()
    table = _read(file, required=f"{PREFIX}POLICY" in env)
    origins = dict.fromkeys(_paths_in(table), "file")
    for path, kind in _fields(Policy):
        name = PREFIX + path.upper().replace(".", "_")
        if name in env and not path.startswith(FILE_ONLY):
            _put(table, path, _parse(name, env[name], kind))
            origins[path] = name
    try:
        policy = Policy.model_validate(table)
    except ValidationError as error:
        raise BadRequest(*_explain(error, origins, file)) from error
    settings = tuple(Setting(p, _get(policy, p), origins.get(p, "default")) for p, _ in _fields(Policy))
    return Config(home, file, policy, settings)


def _read(file: Path, *, required: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        if required:
            raise BadRequest(
                f"the policy file {file} does not exist", f"Create it, or unset {PREFIX}POLICY to use the defaults."
            ) from None
        return {}
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the policy file {file} is no TOML: {error}", "Mend that line.") from error
    except OSError as error:
        raise BadRequest(f"the policy file {file} can't be read: {error.strerror}", "Check its permissions.") from error


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _fields(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def _paths_in(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _paths_in(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _parse(name: str, text: str, kind: Any) -> Any:
    """A variable's text in the shape the field wants; lists are separated by commas."""
    if get_origin(kind) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind is int or float in (kind, *get_args(kind)):
        try:
            return float(text) if kind is not int else int(text)
        except ValueError:
            raise BadRequest(f"{name} is {text!r}, which is no number", "Set it to a number.") from None
    return text


def _put(table: dict[str, Any], path: str, value: object) -> None:
    *folders, leaf = path.split(".")
    for folder in folders:
        inner = table.setdefault(folder, {})
        if not isinstance(inner, dict):
            raise BadRequest(f"the policy's {folder} is no table", f"Write it as [{folder}].")
        table = inner
    table[leaf] = value


def _get(model: BaseModel, path: str) -> object:
    value: Any = model
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _explain(error: ValidationError, origins: Mapping[str, str], file: Path) -> tuple[str, str]:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    origin = origins.get(path.rstrip(".0123456789"), "file")
    where = str(file) if origin == "file" else origin
    if first["type"] == "extra_forbidden":
        return f"{where} sets {path}, which is no setting", "gpuwarden doctor lists every setting."
    told = in_words(first["type"], first["msg"])
    return f"{where} sets {path} wrongly: {told}", "gpuwarden doctor lists every setting with its default."
