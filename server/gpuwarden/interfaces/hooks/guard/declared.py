"""Merge the providers' declarations with those in `clouds.toml`.

This module imports every provider, so the guard's process never imports it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from gpuwarden.core.shell_guard import ShellGuard, merged
from gpuwarden.providers.base import PROVIDERS

CLOUDS = Path(__file__).with_name("clouds.toml")
FAR = "far"


def table() -> dict[str, Any]:
    """Return every declaration as plain values for `patterns.Patterns.of`."""
    clouds: dict[str, ShellGuard] = {}
    for cloud, section in tomllib.loads(CLOUDS.read_text("utf-8")).items():
        values: dict[str, Any] = dict(section)
        for name in ("ends", "remote"):
            values[name] = {program: tuple(texts) for program, texts in values.get(name, {}).items()}
        for name in ("hosts", "paths", "requests", "code", "servers"):
            values[name] = tuple(values.get(name, ()))
        clouds[cloud] = ShellGuard(**values)
    far = clouds.pop(FAR)
    everything = merged([*declared().values(), *clouds.values()])
    aliases = {**everything.aliases, **far.aliases}
    keys = dict.fromkeys(key for name in PROVIDERS.names() for key in PROVIDERS.load(name).ACCOUNT_KEYS)
    return {**everything.table(), "aliases": aliases, "far": dict(far.ends), "key_variables": tuple(keys)}


def declared() -> dict[str, ShellGuard]:
    """Return each provider's declaration.

    Raises NotSupported if a provider can't be loaded, because its patterns would be missing.
    """
    return {name: PROVIDERS.load(name).SHELL_GUARD for name in PROVIDERS.names()}
