"""Record a server's instructions and tools, as the running server lists them."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evals.errors import EvalError
from evals.harness.mcp_client import McpClient


@dataclass(frozen=True)
class Shown:
    """The instructions, and the tools as returned by `tools/list`."""

    instructions: str
    tools: list[dict[str, Any]]


_KNOWN: Final[dict[tuple[str, ...], Shown]] = {}


def shown(command: list[str], env: dict[str, str]) -> Shown:
    """Start a server, list its tools and stop it. Raises JsonProcessError if it does not answer.

    The result is cached by command, because the tools do not depend on the scenario.
    """
    key = tuple(command)
    if key not in _KNOWN:
        with tempfile.TemporaryDirectory(prefix="evals-") as folder:
            client = McpClient(command, env, Path(folder))
            try:
                _KNOWN[key] = Shown(str(client.greeting.get("instructions") or ""), client.tools())
            finally:
                client.close()
    return _KNOWN[key]


# ------------------------------------------------------------------------------------------------------ tools.json

_WORDS: Final = frozenset({"description", "default", "title"})
_RULES: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "items", "enum"}
    | {"maxLength", "maxItems", "minimum", "maximum"}
)


def schemas(offer: Shown) -> dict[str, Any]:
    """Return the content of `tools.json`: for each tool the schema of its arguments, without descriptions and defaults.

    Raises EvalError for a schema keyword that `surface.faults` does not check.
    """
    return {tool["name"]: _rules(tool["inputSchema"], tool["name"]) for tool in offer.tools}


def _rules(schema: Any, where: str) -> Any:
    if not isinstance(schema, dict):
        return schema
    rules = {key: value for key, value in schema.items() if key not in _WORDS}
    for key in sorted(rules.keys() - _RULES):
        raise EvalError(f"{where} has the keyword {key!r}, which is not checked", "Add it to evals/scoring/surface.py")
    for key in ("items", "additionalProperties"):
        if key in rules:
            rules[key] = _rules(rules[key], f"{where}.{key}")
    if "properties" in rules:
        rules["properties"] = {k: _rules(v, f"{where}.{k}") for k, v in rules["properties"].items()}
    return rules


def as_text(rules: dict[str, Any]) -> str:
    """Return the text of `tools.json`."""
    return json.dumps(rules, indent=1, sort_keys=True) + "\n"
