"""Shared protocol types: JSON objects and errors."""

from __future__ import annotations

from typing import Any, Dict

Json = Dict[str, Any]  # noqa: UP006 (evaluated at run time, including on Python 3.8)


class Problem(Exception):
    """An error with a code that the caller maps to an error class."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
