"""List the signatures that match generic messages of a language runtime, a shell, the C library or pip.

    python tools/build_runtime_wording.py > server/gpuwarden/knowledge/runtime_wording.txt

The messages are collected on this machine: the strings in the interpreter and the shells, the C library's descriptions
of errors and signals, and the exceptions of Python's standard library and pip. A signature is listed if one such
message contains all its fixed parts. Shells compose their messages, so for a shell each part may come from a different
message.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pip

from gpuwarden.knowledge import shipped
from gpuwarden.knowledge.signatures import parts

HEADER = "# Signatures of a runtime's own wording: see tools/build_runtime_wording.py."
SHELLS = ("/bin/bash", "/bin/sh")
LEAST = 6  # minimum number of characters in a message, and of letters in a signature
HALF = 5  # minimum number of letters in each half of a part that a shell composes
_TEXT = re.compile(rb"[\x20-\x7e]{%d,}" % LEAST)
_PREFIX = re.compile(r"^(?:(?:\w+\.)*\w*(?:Error|Exception): ?|\[Errno \d+\] ?)+")
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages"}
_LOGGERS = {"error", "warning", "critical", "info"}


def binary(path: Path) -> set[str]:
    """Return the printable strings in a compiled file."""
    return {match.group().decode() for match in _TEXT.finditer(path.read_bytes())} if path.is_file() else set()


def template(node: ast.expr) -> str:
    """Return the text that an expression builds, with {} for inserted values; empty if it does not build text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return template(node.func.value)
    return ""


def raised(root: Path) -> Iterator[str]:
    """Yield the templates of messages that the modules below a folder raise or log."""
    for path in root.rglob("*.py"):
        if _SKIPPED & {*path.relative_to(root).parts}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            call = node.exc if isinstance(node, ast.Raise) else node
            logged = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _LOGGERS
            if isinstance(call, ast.Call) and (logged or isinstance(node, ast.Raise)):
                yield from (template(given) for given in (*call.args, *(word.value for word in call.keywords)))
            elif isinstance(node, ast.Assign):
                yield template(node.value)


def harvest() -> dict[str, list[str]]:
    """Return the messages of each program, in lower case."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    library = Path(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or "")
    modules = (library, Path(sys.executable).resolve(), *(stdlib / "lib-dynload").glob("*.so"))
    libc = {os.strerror(code) for code in range(1, 134)}
    libc |= {signal.strsignal(number) or "" for number in signal.valid_signals()}
    found = {
        "python": {text for path in modules for text in binary(path)} | {*raised(stdlib)},
        "libc": libc,
        "pip": {*raised(Path(pip.__file__).parent / "_internal")},
        **{shell: binary(Path(shell).resolve()) | libc for shell in SHELLS},
    }
    return {name: [text.lower() for text in texts if len(text) >= LEAST] for name, texts in found.items()}


def covers(messages: dict[str, list[str]], whole: dict[str, str], fixed: list[str], choices: list[str]) -> bool:
    """Return whether one program prints all fixed parts of a signature, and each alternative is printed by some
    program. `whole` contains the messages of each program as one text.
    """
    may = [texts for name, texts in messages.items() if all(part in whole[name] for part in fixed)]
    one = any(all(part in text for part in fixed) for texts in may for text in texts)
    composed = any(all(_composed(part, whole[shell]) for part in fixed) for shell in SHELLS)
    return (one or composed) and all(any(choice in text for text in whole.values()) for choice in choices)


def _composed(part: str, messages: str) -> bool:
    if part in messages:
        return True
    words = part.split(" ")
    pairs = ((" ".join(words[:at]), " ".join(words[at:])) for at in range(1, len(words)))
    return any(min(len(a), len(b)) >= HALF and a in messages and b in messages for a, b in pairs)


def main() -> int:
    """Print the list."""
    messages = harvest()
    whole = {name: "\n".join(texts) for name, texts in messages.items()}
    print(HEADER)
    for gotcha in shipped().gotchas.values():
        for pattern in gotcha.signatures:
            fixed, choices = parts(pattern)
            fixed = [_PREFIX.sub("", part.lstrip()).strip(" '\":,.()").lower() for part in fixed]
            fixed = [part for part in fixed if sum(map(str.isalpha, part)) >= 3]
            choices = [part.strip().lower() for part in choices if sum(map(str.isalpha, part)) >= 3]
            if sum(map(str.isalpha, "".join(fixed))) >= LEAST and covers(messages, whole, fixed, choices):
                print(gotcha.id, pattern)
    return 0


if __name__ == "__main__":
    sys.exit(main())
