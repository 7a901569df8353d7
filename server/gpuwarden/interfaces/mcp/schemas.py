"""Shorten the tool schemas to the parts that a model needs, because they cost tokens on every turn."""

from __future__ import annotations

from typing import Any


def answers(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema for a tool's result: a reply, or an error with only the required fields."""
    return {**untitled(schema), "required": ["ok", "code", "message", "hint"], "additionalProperties": True}


def inlined(schema: Any, defs: dict[str, Any] | None = None) -> Any:
    """Return a schema with each reference replaced by its definition from `$defs`."""
    if isinstance(schema, list):
        return [inlined(item, defs) for item in schema]
    if not isinstance(schema, dict):
        return schema
    defs = defs or schema.get("$defs", {})
    target = defs.get(str(schema.get("$ref", "")).rpartition("/")[2], {})
    return {k: inlined(v, defs) for k, v in {**target, **schema}.items() if k not in {"$defs", "$ref"}}


def untitled(schema: Any) -> Any:
    """Return a schema without generated titles."""
    if isinstance(schema, list):
        return [untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {k: untitled(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}


def slim(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema for a tool's arguments, without titles and with `anyOf: [x, null]` replaced by x."""
    shown: dict[str, Any] = untitled(schema)
    for field in shown.get("properties", {}).values():
        options = [o for o in field.pop("anyOf", []) if o != {"type": "null"}]
        field.update(options[0] if options else {})
        if field.get("default", ...) is None:
            field.pop("default")
    return shown
