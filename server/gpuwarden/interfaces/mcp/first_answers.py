"""Answer a client's first requests from a stored snapshot while the protocol's SDK loads.

`first_answers.json` contains the server's results for `initialize`, `server/discover` and the constant lists, by
protocol version. `gpuwarden mcp --write-answers` writes it, and a test compares it with the real server. It is used
only with the SDK version that it was made with, and only for requests whose answer is certain from their shape; every
other line waits for the server. The opening request is replayed to the server under a reserved id, so that the server
opens the same session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from gpuwarden.interfaces.mcp.malformed import is_id

FILE: Final = Path(__file__).with_suffix(".json")
REPLAYED: Final = "gpuwarden/replayed-opening"
"""The id of the replayed opening request. The server's answer to it is dropped."""
MODERN: Final = "2026-07-28"
META: Final = "io.modelcontextprotocol/"
LISTS: Final = ("tools/list", "prompts/list", "resources/templates/list")
MAX_REQUEST: Final = 16_384
Answers: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Results by protocol version and method."""

Shape: TypeAlias = Mapping[str, Any]
"""By key: a type, a tuple of allowed types, a nested shape, or MAP for objects under arbitrary names."""
MAP: Final = object()
_INFO: Shape = {"name": str, "version": str, "title": str, "description": str, "websiteUrl": str}
_CAPABILITIES: Shape = {
    "roots": {"listChanged": bool},
    "sampling": {"tools": {}, "context": {}},
    "elicitation": {"form": {"applyDefaults": bool}, "url": {}},
    "experimental": MAP,
    "extensions": MAP,
    "tasks": {
        "list": {},
        "cancel": {},
        "requests": {"sampling": {"createMessage": {}}, "elicitation": {"create": {}}},
    },
}


def load_answers(file: Path = FILE) -> Answers:
    """Return the snapshot; empty if there is none for the installed SDK."""
    from importlib.util import find_spec

    try:
        stored = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    # Importing the SDK or reading its metadata would take as long as the snapshot saves.
    spec = find_spec("mcp")
    folders = (spec.submodule_search_locations or []) if spec else []
    if not any((Path(folder).parent / f"mcp-{stored['mcp']}.dist-info").is_dir() for folder in folders):
        return {}
    results = stored["results"]
    return {
        version: {method: results[n] for method, n in methods.items()} for version, methods in stored["answers"].items()
    }


def dump_answers(answers: Answers, mcp_version: str) -> str:
    """Return the file's text. Each result is stored once, since the versions share most of them."""
    results: list[Any] = []
    numbered: dict[str, dict[str, int]] = {}
    for version, methods in answers.items():
        for method, result in methods.items():
            if result not in results:
                results.append(result)
            numbered.setdefault(version, {})[method] = results.index(result)
    body = {"mcp": mcp_version, "answers": numbered, "results": results}
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


class FirstAnswers:
    """Answer the first requests of one connection, in the protocol version that its opening request selects."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._version = ""
        self._cards = False
        self._closed = not answers

    def __call__(self, content: bytes) -> tuple[bytes | None, bytes | None]:
        """Return the reply to a line, if the snapshot has one, and the line that the server still has to read."""
        message = None if self._closed else plain_request(content)
        if message is None or "id" not in message:
            # An opening that can't be parsed here selects an unknown protocol version.
            self._closed = self._closed or (message is None and not self._version)
            return None, content
        if self._version:
            return (self._reply(message), None) if self._fits(message) else (None, content)
        self._version = opening_version(message)
        self._cards = bool(self._version) and shows_cards(message)
        if not self._fits(message, opening=True):
            self._closed = True
            return None, content
        return self._reply(message), _line({**message, "id": REPLAYED})

    def _fits(self, message: dict[str, Any], *, opening: bool = False) -> bool:
        """Return whether the snapshot has the answer to this request."""
        method, params = message["method"], message.get("params", {})
        if method not in self._answers.get(self._version, {}):
            return False
        if method == "initialize":
            return opening
        if self._version == MODERN:
            plain = is_envelope(params)
        else:
            plain = not opening and (params == {} or _is_shaped(params, {"_meta": {"progressToken": (int, str)}}))
        # The snapshot's list of tools has no cards.
        return plain and not (method == "tools/list" and (self._cards or shows_cards(message)))

    def _reply(self, message: dict[str, Any]) -> bytes:
        result = self._answers[self._version][message["method"]]
        return _line({"jsonrpc": "2.0", "id": message["id"], "result": result})


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


def plain_request(content: bytes) -> dict[str, Any] | None:
    """Return a request or notification that all JSON parsers read in the same way, or None for any other line."""
    if len(content) > MAX_REQUEST or b"\\u" in content:
        return None
    try:
        message = json.loads(content.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0" or not isinstance(message.get("method"), str):
        return None
    if not message.keys() <= {"jsonrpc", "id", "method", "params"} or not isinstance(message.get("params", {}), dict):
        return None
    if "id" not in message:
        return message
    name = message["id"]
    # Some parsers change integers above 2**53.
    plain = is_id(name) and name != REPLAYED and (isinstance(name, str) or abs(int(str(name))) < 1 << 53)
    return message if plain else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def opening_version(message: dict[str, Any]) -> str:
    """Return the protocol version that an opening request selects; empty if this is not certain."""
    params = message.get("params", {})
    if message["method"] != "initialize":
        return MODERN if is_envelope(params) else ""
    shape = {"protocolVersion": str, "capabilities": _CAPABILITIES, "clientInfo": _INFO}
    whole = _is_shaped(params, shape) and params.keys() == shape.keys()
    return params["protocolVersion"] if whole and {"name", "version"} <= params["clientInfo"].keys() else ""


def shows_cards(message: dict[str, Any]) -> bool:
    """Return whether a request declares the extension for cards. The shape of its parameters was checked before."""
    params = message.get("params", {})
    said = params.get("capabilities") or (params.get("_meta") or {}).get(f"{META}clientCapabilities") or {}
    return f"{META}ui" in (said.get("extensions") or {})


def is_envelope(params: dict[str, Any]) -> bool:
    """Return whether the parameters are only the envelope of a 2026-07-28 request."""
    meta = params.get("_meta")
    if params.keys() != {"_meta"} or not isinstance(meta, dict) or meta.get(f"{META}protocolVersion") != MODERN:
        return False
    shape = {
        f"{META}protocolVersion": str,
        f"{META}clientInfo": _INFO,
        f"{META}clientCapabilities": _CAPABILITIES,
        "progressToken": (int, str),
    }
    if not _is_shaped(meta, shape) or f"{META}clientCapabilities" not in meta:
        return False
    return bool(meta.get(f"{META}clientInfo", {}).keys() >= {"name", "version"})


def _is_shaped(value: Any, shape: Any) -> bool:
    """Return whether a value has only keys of the shape, with values of the types that the shape names."""
    if shape is MAP:
        return isinstance(value, dict) and all(isinstance(inner, dict) for inner in value.values())
    if not isinstance(shape, Mapping):
        return isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
    return (
        isinstance(value, dict)
        and value.keys() <= shape.keys()
        and all(_is_shaped(value[key], shape[key]) for key in value)
    )
