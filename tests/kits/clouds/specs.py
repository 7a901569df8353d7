"""Check the emulators' replies against the APIs' published descriptions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from clouds.base import Reply, Request


class Spec:
    """One OpenAPI document. `prefix` is added to the emulator's paths to get the document's paths."""

    def __init__(self, file: Path, prefix: str = "") -> None:
        self.document = load(file)
        self.prefix = prefix
        resource = Resource(contents=self.document, specification=DRAFT202012)
        self.registry: Registry[Any] = Registry().with_resource("urn:spec", resource)

    def faults(self, request: Request, reply: Reply) -> list[str]:
        """Return a reply's faults; a route that the document lacks is a fault too."""
        found = self._operation(request)
        if found is None:
            return [f"{request.line}: no such route"]
        path, operation = found
        responses = operation["responses"]
        status = str(reply.status) if str(reply.status) in responses else "default"
        if status not in responses:
            return [f"{request.line}: status {reply.status} is not described"]
        pointer = f"#/paths/{escape(path)}/{request.method.lower()}/responses/{status}"
        response = responses[status]
        if "$ref" in response:
            pointer = response["$ref"]
            response = self.at(pointer)
        content = response.get("content", {})
        if not content:
            return (
                [] if reply.body is None or reply.status >= 400 else [f"{request.line}: a body where none is described"]
            )
        kind = reply.type if reply.type in content else next(iter(content))
        return list(self._compare(request, reply, f"urn:spec{pointer}/content/{escape(kind)}/schema"))

    def _compare(self, request: Request, reply: Reply, ref: str) -> Iterator[str]:
        for error in Draft202012Validator({"$ref": ref}, registry=self.registry).iter_errors(reply.body):
            yield f"{request.line} -> {reply.status}: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"

    def _operation(self, request: Request) -> tuple[str, dict[str, Any]] | None:
        whole = (self.prefix + request.path).rstrip("/")
        for path, methods in sorted(self.document["paths"].items(), key=lambda p: p[0].count("{")):
            pattern = re.sub(r"\{\w+\}", "[^/]+", path.rstrip("/"))
            if request.method.lower() in methods and re.fullmatch(pattern, whole):
                return path, methods[request.method.lower()]
        return None

    def at(self, pointer: str) -> Any:
        value: Any = self.document
        for part in pointer.removeprefix("#/").split("/"):
            value = value[part.replace("~1", "/").replace("~0", "~")]
        return value


def escape(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1").replace("{", "%7B").replace("}", "%7D")


@cache
def load(file: Path) -> Any:
    text = file.read_text("utf-8")
    return modern(json.loads(text) if file.suffix == ".json" else yaml.safe_load(text))


def modern(schema: Any) -> Any:
    """Convert OpenAPI 3.0's `nullable` to its 3.1 form."""
    if isinstance(schema, dict):
        schema = {k: modern(v) for k, v in schema.items()}
        if schema.pop("nullable", None) is True and isinstance(schema.get("type"), str):
            schema["type"] = [schema["type"], "null"]
        return schema
    return [modern(item) for item in schema] if isinstance(schema, list) else schema
