"""Check which hooks the user has trusted in Codex. Codex runs no other hooks.

Codex stores a digest of each trusted hook in its `config.toml`. The digest's key consists of the hook's file and
position, preceded by the plugin's name if a plugin installs the hook.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

EVENT: Final = "pre_tool_use"


def trusted(config: Path, keys: Iterable[str], group: Mapping[str, Any], hook: Mapping[str, Any]) -> bool:
    """Return whether Codex would run `hook`. Its digest may be stored under any of `keys`.

    Codex runs a hook if the user has trusted its current form and has not disabled it. For a plugin's hook, the
    stored value is the hook's digest followed by the plugin's digest.
    """
    kept = [state for key, state in _states(config).items() if key in set(keys)]
    identity = {"event_name": EVENT, "matcher": group.get("matcher"), "hooks": [{"async": False, **hook}]}
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    return any(
        isinstance(k, dict) and str(k.get("trusted_hash")).partition("/")[0] == digest and k.get("enabled") is not False
        for k in kept
    )


def plugin_trusted(config: Path, plugin: Path, name: str) -> bool:
    """Return whether Codex would run the first `PreToolUse` hook of the plugin in the folder `plugin`."""
    file = "clients/codex-hooks.json"
    try:
        group = json.loads((plugin / file).read_text("utf-8"))["hooks"]["PreToolUse"][0]
        hook = group["hooks"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    end = f":{file}:{EVENT}:0:0"
    keys = (key for key in _states(config) if key.startswith(f"{name}@") and key.endswith(end))
    return trusted(config, keys, group, hook)


def _states(config: Path) -> dict[str, Any]:
    try:
        states = tomllib.loads(config.read_text("utf-8"))["hooks"]["state"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return states if isinstance(states, dict) else {}
