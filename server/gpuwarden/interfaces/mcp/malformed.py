"""Answer lines that are not JSON-RPC messages, so that no client has to wait for its timeout.

The codes are those of JSON-RPC 2.0: text that is not JSON is a parse error; a message of another shape is an invalid
request; a message with unreadable contents has invalid parameters. The id is also found in broken text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gpuwarden.interfaces.mcp.stdio_lines import MAX_LINE, Line

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
INVALID_PARAMS: Final = -32602
MAX_DIGITS: Final = 300
UNREADABLE: Final = "the message contains a lone surrogate, contains a number that is too long, or is nested too deeply"
RequestId: TypeAlias = int | str

# A string, complete or truncated; a run of brackets of one kind; or other text between them. No part backtracks.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*"?|[\[{]++|[\]}]++|[:,]|[^\s"\[\]{}:,]++', re.DOTALL)
_ID_AT_END = re.compile(r'"id"\s*:\s*(-?\d{1,300}|"(?:[^"\\]|\\.){0,300}")\s*\}\s*$')


@dataclass(frozen=True)
class Fault:
    """The fault of a line. `response` marks a client's own answer, which gets no reply."""

    code: int
    message: str
    id: RequestId | None = None
    response: bool = False

    @property
    def reply(self) -> bytes:
        """Return the JSON-RPC error as a line."""
        return error_line(self.id, self.code, self.message)


BATCH: Final = Fault(INVALID_REQUEST, "a batch of messages is not supported; send one message per line")


def error_line(request_id: RequestId | None, code: int, message: str) -> bytes:
    """Return a JSON-RPC error as a line."""
    body = {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}}
    return json.dumps(body, separators=(",", ":")).encode()


def fault_of(line: Line) -> Fault | None:
    """Return the fault of a line that the SDK can't read, or that it read as a notification with an id.

    Returns None for a notification, to which JSON-RPC allows no answer.
    """
    if not line.whole:
        # Only both ends of the line were kept; clients put the id first or last.
        ends = line.content.decode("utf-8", "replace")
        at_end = _ID_AT_END.search(ends)
        request_id = _as_id(at_end[1]) if at_end else id_in(ends)
        return Fault(INVALID_REQUEST, f"a message can have at most {MAX_LINE:,} bytes", request_id)
    try:
        text = line.content.decode("utf-8")
    except UnicodeDecodeError:
        return Fault(PARSE_ERROR, "the message is not UTF-8", id_in(line.content.decode("utf-8", "replace")))
    try:
        message = json.loads(text, parse_int=_number)
    except RecursionError:
        return BATCH if text.lstrip()[0] == "[" else Fault(INVALID_PARAMS, UNREADABLE, id_in(text))
    except ValueError:
        return Fault(PARSE_ERROR, "the message is not JSON", id_in(text))
    if isinstance(message, list):
        return BATCH
    if not isinstance(message, dict):
        return Fault(INVALID_REQUEST, "a message must be a JSON object")
    request_id, method = message.get("id"), message.get("method")
    if "id" in message and not is_id(request_id):
        return Fault(INVALID_REQUEST, "an id must be a string or an integer", response=_is_response(message))
    if _is_response(message):
        return Fault(INVALID_PARAMS, UNREADABLE, request_id, response=True)
    if "id" not in message and isinstance(method, str):
        return None
    if message.get("jsonrpc") != "2.0" or not isinstance(method, str):
        return Fault(INVALID_REQUEST, 'a request needs "jsonrpc": "2.0", an id and a method', request_id)
    if not isinstance(message.get("params", {}), dict):
        return Fault(INVALID_PARAMS, "params must be an object", request_id)
    return Fault(INVALID_PARAMS, UNREADABLE, request_id)


def _is_response(message: dict[str, Any]) -> bool:
    return "method" not in message and ("result" in message or "error" in message)


def _number(digits: str) -> int | float:
    """Return an integer, or infinity if it has more than MAX_DIGITS digits."""
    return int(digits) if len(digits) <= MAX_DIGITS else float("inf")


def is_id(value: object) -> bool:
    """Return whether a value is a valid request id that can be written back."""
    if isinstance(value, str):
        return not any("\ud800" <= char <= "\udfff" for char in value)
    return isinstance(value, int) and not isinstance(value, bool)


def id_in(text: str) -> RequestId | None:
    """Return the id of the outermost object in text that is not JSON or is nested too deeply; None if not found."""
    depth, key, before = 0, "", ""
    for match in _TOKEN.finditer(text):
        part = match[0]
        if depth == 1 and before == ":" and key == '"id"':
            return _as_id(part)
        if part[0] in "[{":
            depth += len(part)
        elif part[0] in "]}":
            depth -= len(part)
        elif part == ":":
            key = before
        before = part
    return None


def _as_id(part: str) -> RequestId | None:
    try:
        value = json.loads(part, parse_int=_number)
    except (ValueError, RecursionError):
        return None
    return value if is_id(value) else None
