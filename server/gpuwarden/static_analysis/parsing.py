"""Parse a script with the grammar of any known Python release."""

from __future__ import annotations

import ast
import sys
import threading
import warnings

from gpuwarden.core.errors import BadRequest
from gpuwarden.static_analysis.grammar_rewriting import Construct
from gpuwarden.static_analysis.newer_grammar import newer_constructs, parse_newer

_ONE_AT_A_TIME = threading.RLock()
"""In Python 3.11, parsing in two threads at once can fail, because the threads share one depth counter."""


def parse(text: str) -> tuple[ast.Module, tuple[Construct, ...]]:
    """Parse a script with the grammar of any known Python release.

    Return the syntax tree, and the constructs that Python 3.11 does not support. Raises BadRequest for text that Python
    can't parse, or that nests too deeply.
    """
    text = text.removeprefix("\ufeff")  # Python ignores a byte order mark in a file
    try:
        with _ONE_AT_A_TIME, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes cause warnings
            try:
                tree = ast.parse(text)
            except SyntaxError:
                return parse_newer(text)
            return tree, newer_constructs(text) if sys.version_info >= (3, 12) else ()
    except SyntaxError as error:
        raise BadRequest(
            f"the script is not valid Python: {error.msg} (line {error.lineno})",
            "Fix the syntax error in that line.",
        ) from error
    except (RecursionError, MemoryError, ValueError) as error:
        raise BadRequest(
            "the script can't be parsed: it nests too deeply or contains characters that Python does not allow",
            "Simplify it; a training script does not need such deep nesting.",
        ) from error
