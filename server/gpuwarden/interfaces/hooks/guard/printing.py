"""Predict a command's output before it runs.

Unknown text is represented by `UNKNOWN` and its source text. If the text is one of several paths, `among` lists their
patterns. For example, `ls -d runs/*` prints only paths that match `runs/*`, so removing them affects no other path.
"""

from __future__ import annotations

import base64
import posixpath
import re
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from typing import Final

UNKNOWN: Final = "\ue000"
_END, _OR = "\ue001", "\ue002"
_AMONG: Final = re.compile(f"{UNKNOWN}\\(([^{UNKNOWN}{_END}]*){_END}")
_MARKS: Final = re.compile(f"[{UNKNOWN}{_END}{_OR}]")

PRINTS: Final = frozenset({"echo", "printf"})
FINDS: Final = frozenset({"which", "command", "type", "whence"})
PASSES: Final = frozenset({"cat", "tee", "envsubst", "sort", "head", "tail", "uniq", "tac", "shuf", "grep", "sponge"})
"""Programs that print lines from their standard input unchanged."""
SILENT: Final = frozenset({"", ":", "true", "false", "test", "[", "cd", "pushd", "popd", "set",
                           "export", "unset", "local", "declare", "readonly", "shift", "read",
                           "mkdir", "rm", "mv", "cp", "ln", "touch", "chmod", "sleep", "wait", "trap",
                           "umask", "break", "continue", "return", "exit", "shopt"})  # fmt: skip
"""Programs that usually print nothing."""
NAMES: Final = frozenset({"date", "whoami", "hostname", "uname", "id", "nproc", "seq", "basename", "wc", "uuidgen"})
"""Programs whose output is not a path."""

_PRINT: Final = re.compile(r"""(?:print|console\.log)\(\s*(?:"([^"\\\n]*)"|'([^'\\\n]*)')\s*\)""")
_ONLY_PRINTS: Final = re.compile(rf"\s*(?:{_PRINT.pattern}[\s;]*)+")


def name_of(word: str) -> str:
    """Return a program's name in lower case, without its folder."""
    return re.split(r"[\\/]", word)[-1].lower().removesuffix(".exe")


def among(patterns: Sequence[str]) -> str:
    """Return a marker for unknown text that is one of the paths matched by the patterns."""
    if any(UNKNOWN in pattern for pattern in patterns):
        return f"{UNKNOWN}$()"
    plain = (re.sub(r"\s", "?", pattern) for pattern in patterns[:20])
    return f"{UNKNOWN}({_OR.join(plain)}{_END}"


def alternatives(text: str) -> list[str]:
    """Return one variant of a path for each pattern that its unknown part may match."""
    found = _AMONG.search(text)
    if found is None:
        return [text]
    return [text[: found.start()] + each + text[found.end() :] for each in found[1].split(_OR)]


def as_written(text: str) -> str:
    """Return text without markers, so that it can be passed to a shell."""
    return _MARKS.sub("", _AMONG.sub("$()", text)) if UNKNOWN in text or _END in text or _OR in text else text


def printed(words: Sequence[str], stdin: Sequence[str], folder: str) -> str:
    """Return the predicted output of a command that runs in `folder`."""
    name = name_of(words[0]) if words else ""
    args = list(words[1:])
    if name == "printf" and args:
        return _formatted(args[1:] if args[0] == "--" else args)
    if name in PRINTS:
        return " ".join(args)
    if name in FINDS and args:
        return args[-1]
    if (output := output_of_code(name, args)) is not None:
        return output
    if name == "base64" and stdin and any(re.fullmatch(r"-\w*[dD]\w*|--d\w*", a) for a in args):
        try:
            return base64.b64decode("".join(stdin).strip() + "==").decode("utf-8", "replace")  # padding is optional
        except ValueError:
            return f"{UNKNOWN}$()"
    if name in PASSES and stdin:
        return "\n".join(stdin)
    if name in SILENT:
        return ""
    plain = [a for a in args if not a.startswith("-")]
    if name in _PATHS:
        return _PATHS[name](args, plain, folder)
    return among(["*"]) if name in NAMES else f"{UNKNOWN}$()"


def output_of_code(name: str, args: Sequence[str]) -> str | None:
    """Return the output of an interpreter whose code only prints literal text; None for other arguments.

    In other languages, such as Ruby and Perl, a string can contain code.
    """
    if not name.startswith(("python", "pypy", "node")):
        return None
    if len(args) != 2 or args[0] not in {"-c", "-e"} or not _ONLY_PRINTS.fullmatch(args[1]):
        return None
    return "\n".join(a or b for a, b in _PRINT.findall(args[1]))


def _formatted(args: Sequence[str]) -> str:
    """Return the output of `printf`: its format, repeated until all arguments are used."""
    text = args[0].replace("\\n", "\n").replace("\\t", "\t")
    between = re.split(r"%[-+ #0-9.]*[sdbqiuxf]", text)
    places = len(between) - 1
    if not places:
        return " ".join([text, *args[1:]])
    rounds = [args[at : at + places] for at in range(1, max(len(args), 2), places)]
    return "".join(w + t for words in rounds for w, t in zip_longest(["", *words], between, fillvalue=""))


def _find(args: Sequence[str], plain: Sequence[str], folder: str) -> str:
    names = [args[i + 1] for i, a in enumerate(args[:-1]) if a in {"-name", "-iname"}] or [""]
    return among([f"{root}/**/{name}".rstrip("/") for root in roots(args) for name in names])


def roots(args: Sequence[str]) -> list[str]:
    """Return the folders that `find` searches."""
    end = next((i for i, a in enumerate(args) if a.startswith("-") or a in {"(", "!", "\\("}), len(args))
    return list(args[:end]) or ["."]


def _temporary(args: Sequence[str], plain: Sequence[str], folder: str) -> str:
    given = next((a for a in plain if "XX" in a), "tmp.x")
    parent = next((b for a, b in pairwise(args) if a in {"-p", "--tmpdir"}), "")
    return given if "/" in given else f"{parent or '/tmp'}/{given}"  # noqa: S108 - the name only


_PATHS: Final[dict[str, Callable[[Sequence[str], Sequence[str], str], str]]] = {
    "ls": lambda args, plain, _folder: among(
        (plain or ["."]) if any(re.fullmatch(r"-\w*d\w*|--directory", a) for a in args) else [*plain, "*"]
    ),
    "find": _find,
    "fd": lambda _args, plain, _folder: among([f"{root}/**" for root in plain[1:] or ["."]]),
    "git": lambda _args, _plain, _folder: among(["./**"]),
    "grep": lambda _args, plain, _folder: among([f"{root}/**" for root in plain[1:] or ["."]]),
    "rg": lambda _args, plain, _folder: among([f"{root}/**" for root in plain[1:] or ["."]]),
    "mktemp": _temporary,
    "pwd": lambda _args, _plain, folder: folder,
    "realpath": lambda _args, plain, _folder: plain[-1] if plain else f"{UNKNOWN}$()",
    "readlink": lambda _args, plain, _folder: plain[-1] if plain else f"{UNKNOWN}$()",
    "dirname": lambda _args, plain, _folder: (
        posixpath.dirname(plain[-1]) or "." if plain and UNKNOWN not in plain[-1] else f"{UNKNOWN}$()"
    ),
}
