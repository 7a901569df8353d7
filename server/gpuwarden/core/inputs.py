"""Build models from unvalidated arguments, and report each problem in one clear sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.sanitize import line

M = TypeVar("M", bound=BaseModel)


def build(model: type[M], values: Mapping[str, Any]) -> M:
    """Build a model from unvalidated values. Raises BadRequest with the names of invalid fields, not their values."""
    check_texts(values)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise bad_arguments(error) from error


def check_texts(values: Mapping[str, Any], most: float = math.inf) -> None:
    """Raise BadRequest if text can't be encoded as UTF-8, or if all values together exceed `most` bytes."""
    left = most
    for name, value in values.items():
        # Long text is rejected by its length alone, because serializing it to JSON is slow.
        size = len(name) + (len(value) if isinstance(value, str) else 0)
        try:
            if size <= left:
                size = len(name) + len(json.dumps(value, ensure_ascii=False, default=str).encode())
        except UnicodeEncodeError:
            raise BadRequest(
                f"{line(name, 80)} has an unpaired surrogate, which can't be encoded as UTF-8", "Remove it and retry."
            ) from None
        if size > left:
            message = f"{line(name, 80)} has {size - len(name):,} bytes; the limit for all arguments is {most:,}"
            raise BadRequest(f"{message}; nothing was done", "Shorten it; for a log, pass only its end.")
        left -= size


def bad_arguments(error: ValidationError) -> BadRequest:
    """Return a validation error as one sentence, without the values, since they may be secrets."""
    parts, fixes = [], []
    for found in error.errors(include_url=False, include_context=False, include_input=False)[:5]:
        name = ".".join(str(p) for p in found["loc"]) or "the arguments"
        parts.append(f"{line(name, 80)}: {line(describe_error(found['type'], found['msg']))}")
        if found["type"] == "extra_forbidden":
            fixes.append(do(Action.LEAVE_OUT_ARGUMENT, name=line(found["loc"][0], 80)))
        elif found["loc"]:
            fixes.append(do(Action.SET_ARGUMENT, "to a valid value", name=line(found["loc"][0], 80)))
    return BadRequest("; ".join(parts), ("Nothing was done.", *fixes, do(Action.RETRY)))


def describe_error(kind: str, message: str) -> str:
    """Return a pydantic error in plain language."""
    words = {"extra_forbidden": "unknown field", "missing": "it is missing"}
    return words.get(kind, message.removeprefix("Value error, "))
