"""The tools that agents see, as data (`tools.json`), and a small strict check of arguments against it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
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
    """What is wrong with the arguments of one call, in words; nothing when they are valid."""
    schema = TOOLS.get(tool)
    if schema is None:
        yield f"there is no tool {tool}"
        return
    if not isinstance(args, dict):
        yield f"the arguments of {tool} are no object"
        return
    for name in schema["required"]:
        if name not in args:
            yield f"{tool} needs {name}"
    for name, value in args.items():
        rule = schema["properties"].get(name)
        yield from _value_faults(f"{tool}.{name}", rule, value) if rule else (f"{tool} takes no {name}",)


def _value_faults(name: str, rule: dict[str, Any], value: Any) -> Iterator[str]:
    kind = rule["type"]
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield f"{name} should be of type {kind}, not {type(value).__name__}"
    elif "enum" in rule and value not in rule["enum"]:
        yield f"{name} should be one of {', '.join(rule['enum'])}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name} is no finite number"
    elif isinstance(value, (int, float)) and not rule.get("minimum", value) <= value <= rule.get("maximum", value):
        yield f"{name} is outside {rule.get('minimum', '-inf')} to {rule.get('maximum', 'inf')}"
