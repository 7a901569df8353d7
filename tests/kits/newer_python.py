"""A Python newer than 3.11 that parses programs for a test, in a separate process that serves many requests."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

VERSIONS = ("3.14", "3.13", "3.12")


def plain(node: Any) -> Any:
    """Return a syntax tree as data, with the line numbers that rules report, but without unused type parameters."""
    if isinstance(node, ast.AST):
        skipped = ("type_params", "type_comment", "type_ignores", "kind")
        fields = {name: plain(value) for name, value in ast.iter_fields(node) if name not in skipped}
        name = type(node).__name__
        if name == "TypeAlias":
            name, fields = "Assign", {"targets": [fields["name"]], "value": fields["value"]}
        return [name, node.lineno if isinstance(node, ast.stmt | ast.Name | ast.Attribute | ast.Call) else 0, fields]
    if isinstance(node, list):
        return [plain(part) for part in node]
    return ascii(node)


@cache
def newer_python() -> str | None:
    """Return the path of the newest installed Python after 3.11; None if only older ones are installed."""
    pyenv = Path.home() / ".pyenv/versions"
    for version in VERSIONS:
        kept = sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
        for program in (f"python{version}", *map(str, kept)):
            try:
                if subprocess.run([program, "-c", ""], capture_output=True, timeout=60, check=False).returncode == 0:
                    return program
            except OSError:
                continue
    return None


class NewerPython:
    """The process. `tree` returns a program's syntax tree, or None if the program can't be parsed."""

    def __init__(self, program: str) -> None:
        own = [program, "-I", __file__]
        self._process = subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tree(self, source: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(source) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    """Read one program per line, as JSON, and print its syntax tree."""
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        try:
            answer = plain(ast.parse(json.loads(line)))
        except (SyntaxError, ValueError, RecursionError):
            answer = None
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
