"""Configuration: the folders that gpuwarden uses, and the user's policy.

The policy is one TOML file. Each setting has an environment variable with the setting's path in capitals
(`GPUWARDEN_CAPS_PER_JOB_USD` for `caps.per_job_usd`). The variable can make the value stricter if the
setting allows this. A variable that would loosen a value is ignored and reported in a notice. The origin of each
effective value is recorded.

| variable | meaning |
|---|---|
| `GPUWARDEN_HOME` | folder for the ledger, the run records and the pulled artifacts |
| `GPUWARDEN_POLICY` | the policy file; a file other than the recorded one is used only after the user accepts it |
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import platformdirs
from pydantic import BaseModel, ValidationError

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.inputs import describe_error
from gpuwarden.core.policy import Policy, policy_fields
from gpuwarden.policy_record import ActivePolicy, Notice, PolicyStatus, Record, decide, digest_of, read_record

PREFIX = "GPUWARDEN_"
NOTES = "notes.toml"
MAX_POLICY = 1 << 20


@dataclass(frozen=True)
class Setting:
    """One effective value with its origin: `default`, `file` or the name of a variable."""

    path: str
    value: object
    origin: str


@dataclass(frozen=True)
class Config:
    """The effective configuration."""

    home: Path
    policy: Policy
    settings: tuple[Setting, ...]
    digest: str
    """SHA-256 of the policy file's text."""
    standing: PolicyStatus
    notices: tuple[Notice, ...] = ()

    @property
    def policy_file(self) -> Path:
        """Return the active policy file."""
        return self.standing.file

    @property
    def recorded(self) -> Record | None:
        """Return this ledger's own record of the active policy; None if it has no record."""
        return self.standing.own

    @property
    def active_policy(self) -> ActivePolicy:
        """Return the active policy."""
        return ActivePolicy(self.policy, self.digest, self.notices, self.policy_file)

    @property
    def notes_file(self) -> Path:
        """Return the path of the user's notes on their own setup, next to the policy file."""
        return self.policy_file.parent / NOTES


def load_config(env: Mapping[str, str] | None = None, before: Config | None = None) -> Config:
    """Read the policy file and the environment.

    `before` is the configuration that this process read last; it is returned if the record and the file are unchanged.

    Raises:
        BadRequest: a file or variable is invalid, or a file has become empty since `before`; the message names it.
        LedgerError: the record of the policy in use can't be read.

    """
    env = os.environ if env is None else env
    named = env.get(f"{PREFIX}POLICY")
    if before is not None and before.recorded is not None and before.recorded == read_record(before.home):
        home, standing = before.home, before.standing
    else:
        home = Path(env.get(f"{PREFIX}HOME") or platformdirs.user_data_dir("gpuwarden", appauthor=False)).expanduser()
        default = Path(platformdirs.user_config_dir("gpuwarden", appauthor=False)) / "policy.toml"
        standing = decide(home, Path(named) if named else None, default)
    content = _read(standing.file, required=bool(named) and not any(n.question for n in standing.notices))
    digest = digest_of(content)
    if before is not None and before.standing == standing and before.digest == digest:
        return before
    if before is not None and before.policy_file == standing.file and before.digest != digest and not content:
        raise BadRequest(
            f"the policy file {standing.file} is now empty or missing",
            "Restore it. A restarted process would use the defaults.",
        )
    table = _parsed(standing.file, content)
    origins = dict.fromkeys(_paths_in(table), "file")
    policy, ignored = _tightened(_validated(table, origins, standing.file), env, origins, standing.file)
    return Config(
        home=home,
        policy=policy,
        settings=tuple(
            Setting(
                f.path,
                value_at(policy, f.path),
                # the origin of the value itself or, for a table of names, of any of its entries
                next((origins[name] for name in origins if f"{name}.".startswith(f"{f.path}.")), "default"),
            )
            for f in policy_fields()
        ),
        digest=digest,
        standing=standing,
        notices=(*standing.notices, *ignored),
    )


def policy_reader(config: Config, env: Mapping[str, str]) -> Callable[[], ActivePolicy]:
    """Return a function that reads the active policy and raises the same errors as `load_config`."""

    def read() -> ActivePolicy:
        nonlocal config
        config = load_config(env, config)
        return config.active_policy

    return read


def read_policy(file: Path) -> tuple[Policy, str]:
    """Return a file's policy, before variables apply, and the file's digest. Raises BadRequest if it is invalid."""
    content = _read(file, required=True)
    table = _parsed(file, content)
    return _validated(table, dict.fromkeys(_paths_in(table), "file"), file), digest_of(content)


def _tightened(
    policy: Policy, env: Mapping[str, str], origins: dict[str, str], file: Path
) -> tuple[Policy, list[Notice]]:
    """Apply variables that make the file's policy stricter. Return the policy, and a notice per ignored variable."""
    ignored = []
    for field in policy_fields():
        name = PREFIX + field.path.upper().replace(".", "_")
        if not env.get(name):  # a client that passes variables by name passes unset variables as empty strings
            continue
        if field.by_variable is None:
            ignored.append(Notice("file_only", name, "", about=field.path))
            continue
        changed = policy.model_dump()
        *folders, leaf = field.path.split(".")
        table = changed
        for folder in folders:
            table = table[folder]
        table[leaf] = _parse(name, env[name], field.kind)
        asked = _validated(changed, {field.path: name}, file)
        filed = value_at(policy, field.path)
        if field.by_variable.fits(filed, value_at(asked, field.path)):
            policy, origins[field.path] = asked, name
        else:
            ignored.append(Notice("looser", name, in_short(filed), about=field.path, may=field.by_variable.may))
    return policy, ignored


def _validated(table: dict[str, Any], origins: Mapping[str, str], file: Path) -> Policy:
    try:
        return Policy.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        origin = origins.get(path.rstrip(".0123456789"), "file")
        where = str(file) if origin == "file" else origin
        if first["type"] == "extra_forbidden":
            problem, hint = f"sets {path}, which is not a setting", "to list every setting"
        else:
            problem = f"sets {path} to an invalid value: {describe_error(first['type'], first['msg'])}"
            hint = "to list every setting with its default"
        raise BadRequest(f"{where} {problem}", do(Action.DOCTOR, hint)) from error


def _read(file: Path, *, required: bool) -> bytes:
    try:
        # Opening a pipe must not block, and reading a device must end.
        with os.fdopen(
            os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb"
        ) as stream:
            info = os.fstat(stream.fileno())
            content = stream.read(MAX_POLICY + 1) if stat.S_ISREG(info.st_mode) else None
    except FileNotFoundError:
        if required:
            raise BadRequest(
                f"the policy file {file} does not exist", f"Create it, or unset {PREFIX}POLICY to use the defaults."
            ) from None
        return b""
    except OSError as error:
        raise BadRequest(f"the policy file {file} can't be read: {error.strerror}", "Check its permissions.") from error
    if content is None or len(content) > MAX_POLICY:
        raise BadRequest(
            f"the policy file {file} is not a regular file of at most {MAX_POLICY >> 10} KiB", "Replace the file."
        )
    if os.name == "posix" and info.st_mode & stat.S_IWOTH:
        raise BadRequest(
            f"the policy file {file} is writable by all users", f"Check its contents, then run: chmod o-w {file}"
        )
    return content


def _parsed(file: Path, content: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the policy file {file} is not valid TOML: {error}", "Fix that line.") from error


def _paths_in(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _paths_in(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _parse(name: str, text: str, kind: Any) -> Any:
    """Convert a variable's text to the field's type; list items are separated by commas."""
    if get_origin(kind) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind is int or float in (kind, *get_args(kind)):
        try:
            return float(text) if kind is not int else int(text)
        except ValueError:
            raise BadRequest(f"{name} is {text!r}, which is not a number", "Set it to a number.") from None
    return text


def in_short(value: object) -> str:
    """Format a policy value for display."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "not set"
    if isinstance(value, dict):
        rows = (
            f"{name} ({', '.join(f'{k} {in_short(v)}' for k, v in one if v is not None)})"
            for name, one in value.items()
        )
        return "; ".join(rows) or "not set"
    return f"{value:g}" if isinstance(value, float) else str(value)


def value_at(model: BaseModel, path: str) -> object:
    """Return the policy value at a dotted path."""
    value: Any = model
    for part in path.split("."):
        value = getattr(value, part)
    return value
