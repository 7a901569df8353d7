"""Check whether an HTTP request to a platform, or code in another language, stops or deletes a resource."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from gpuwarden.interfaces.hooks.guard.patterns import Patterns
from gpuwarden.interfaces.hooks.guard.printing import UNKNOWN

HTTP: Final = frozenset({"curl", "wget", "http", "https", "xh", "xhs", "curlie", "httpie", "hurl", "aria2c"})
METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_DATA: Final = re.compile(
    r"-(?:d|F|T)|--(?:data|json|form|upload-file|post-data|post-file|body-data|raw|url-query)(?:-\w+)*(?:=.*)?",
    re.DOTALL,
)
_ITEM: Final = re.compile(r"[\w\[\].-]+(?::?=)(?!=)[\s\S]*")
_METHOD_IN_CODE: Final = re.compile(r"(?i)\bdelete\b|\bpost\b|\bput\b|\bpatch\b|data\s*=|json\s*=|body\s*:")


_STRING: Final = re.compile(
    r"\"{3}(.{0,2000}?)\"{3}|'{3}(.{0,2000}?)'{3}|`([^`]{0,1000})`"
    r"|\"((?:[^\"\\\n]|\\.){0,1000})\"|'((?:[^'\\\n]|\\.){0,1000})'",
    re.DOTALL,
)
_LIST: Final = re.compile(r"\[\s*((?:(?:\"[^\"\n]{0,300}\"|'[^'\n]{0,300}')\s{0,20},?\s{0,20}){2,50})\]")
_ELSEWHERE: Final = re.compile(r"\bexec_command\s*\(|\bConnection\s*\(|\bSSHClient\b")
_REMOVES: Final = re.compile(
    r"(?:\b(rmtree|removedirs|rimraf)|\b(?:os|fs|fsp|promises|File|FileUtils|shutil)\s*\.\s*"
    r"(remove|unlink(?:Sync)?|rmdir(?:Sync)?|rm(?:Sync)?|rm_rf|rm_r|delete)|\.(unlink|unlinkSync|rmdir|rmdirSync|rmSync))"
    r"\s*\(\s*(?:[rf]?[\"'`]([^\"'`\n]{1,300})[\"'`](?!\s*[+%.]))?"
    r"|\bFileUtils\.rm\w*\s+\S|\bunlink\s+(?:glob|[$@<])"
    r"|\bPath\(\s*[rf]?[\"']([^\"'\n]{1,300})[\"']\s*\)\.(?:unlink|rmdir)"
)
RUNS_IN_CODE: Final = re.compile(r"system|subprocess|popen|exec|spawn|check_|\brun\b|\bsh\b|`")
MOST_STRINGS: Final = 100


def commands_in_code(text: str) -> Iterator[tuple[str, bool]]:
    """Yield strings in code that may be commands, each with a flag that is true if it may run on another machine."""
    far = _ELSEWHERE.search(text) is not None
    for found in islice(_LIST.finditer(text), MOST_STRINGS):
        yield " ".join(shlex.quote(word[1:-1]) for word in re.findall(r"\"[^\"]*\"|'[^']*'", found[1])), far
    for found in islice(_STRING.finditer(text), MOST_STRINGS):
        yield re.sub(r"\\(.)", r"\1", next(filter(None, found.groups()), "")), far


def removed_by_code(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the paths that code removes, each with a flag that is true for a recursive removal.

    The path is empty if it is computed at run time.
    """
    for found in islice(_REMOVES.finditer(text), MOST_STRINGS):
        path = found[4] or found[5] or ""
        yield re.sub(r"\$?\{[^{}]*\}", UNKNOWN, path), bool(found[1]) or (found[2] or found[3] or "").startswith("rm")


def called(name: str, args: Sequence[str], patterns: Patterns) -> str | None:
    """Return the reason to block a command that runs an HTTP client, such as curl."""
    method = _method(name, args)
    text = " ".join(args)
    if method in READS or not (patterns.host.search(text) or patterns.key.search(text)):
        return None
    if method == "DELETE" or patterns.request.search(text):
        return f"the `{name}` command asks a platform to stop or delete a resource"
    return None


def _method(name: str, args: Sequence[str]) -> str:
    """Return the HTTP method that the program would use."""
    for i, word in enumerate(args):
        if re.fullmatch(r"-[a-zA-Z]*X|--request|--method", word) and i + 1 < len(args):
            return args[i + 1].upper()
        if found := re.fullmatch(r"(?:-[a-z]*X|--request=|--method=)(\w+)", word):
            return found[1].upper()
    if name not in {"curl", "wget"}:
        words = [a for a in args if not a.startswith("-")]
        if words and words[0].upper() in METHODS:
            return words[0].upper()
        return "POST" if any(_ITEM.fullmatch(w) and "://" not in w.partition("=")[0] for w in words[1:]) else "GET"
    if any(re.fullmatch(r"-[a-zA-Z]*[GI]|--get|--head", a) for a in args):
        return "GET"
    return "POST" if any(_DATA.fullmatch(a) or re.match(r"-d\S", a) for a in args) else "GET"


def spoken(text: str, patterns: Patterns) -> str | None:
    """Return the reason to block code in another language, or text that is not a complete command."""
    if not text:
        return None
    found = patterns.library.search(text) if patterns.code else None
    command = found[0] if found else patterns.command_in_code(text)
    if not command and patterns.host.search(text) and _METHOD_IN_CODE.search(text):
        found = patterns.request.search(text)
        command = found[0] if found else None
    return f"the code contains `{' '.join(command.split())[:60]}`" if command else None
