"""The input schemas of the server's tools, from `tools.json`, and `faults`, which checks calls against them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parents[1]
TOOLS: Final[dict[str, dict[str, Any]]] = json.loads((HERE / "tools.json").read_text("utf-8"))

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}


def faults(tool: str, args: Any) -> Iterator[str]:
    """Describe the errors in one call's arguments; empty if they are valid."""
    schema = TOOLS.get(tool)
    if schema is None:
        yield f"unknown tool {tool}"
    else:
        yield from _faults(tool, schema, args)


def _faults(name: str, rule: dict[str, Any], value: Any) -> Iterator[str]:
    """Yield the errors in a value. Only the keywords of JSON Schema that the tools use are supported."""
    kind = rule["type"]
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield f"{name} should be of type {kind}, not {type(value).__name__}"
    elif "enum" in rule and value not in rule["enum"]:
        yield f"{name} should be one of {', '.join(rule['enum'])}"
    elif isinstance(value, dict):
        known, more = rule.get("properties", {}), rule.get("additionalProperties", False)
        yield from (f"{name} needs {key}" for key in rule.get("required", ()) if key not in value)
        for key, part in value.items():
            inner = known.get(key, more)
            yield from _faults(f"{name}.{key}", inner, part) if inner else (f"{name} has no {key}",)
    elif isinstance(value, list):
        yield from _size_faults(name, len(value), rule.get("maxItems"))
        for n, item in enumerate(value):
            yield from _faults(f"{name}[{n}]", rule["items"], item)
    elif isinstance(value, str):
        yield from _size_faults(name, len(value), rule.get("maxLength"))
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name} is not a finite number"
    elif not rule.get("minimum", value) <= value <= rule.get("maximum", value):
        yield f"{name} is outside {rule.get('minimum', '-inf')} to {rule.get('maximum', 'inf')}"


def _size_faults(name: str, size: int, most: int | None) -> Iterator[str]:
    if most is not None and size > most:
        yield f"{name} has a length of {size}, at most {most}"
