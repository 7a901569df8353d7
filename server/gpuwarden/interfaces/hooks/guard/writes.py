"""Find the files that a program writes, and the sources of their content."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gpuwarden.interfaces.hooks.guard.printing import name_of

COPIES: Final = frozenset({"cp", "rsync", "scp", "mv", "install", "ln", "copy", "copy-item"})
TEES: Final = frozenset({"tee", "sponge", "dd"})
EDITS: Final = frozenset({"chmod", "chown", "vi", "vim", "nvim", "nano", "emacs", "ed", "ex", "micro",
                          "pico", "kate", "gedit", "patch", "touch", "sqlite3", "chattr", "truncate",
                          "set-content", "add-content", "clear-content", "out-file"})  # fmt: skip
GIT_WRITES: Final = frozenset({"checkout", "restore", "rm", "mv"})
IN_PLACE: Final = frozenset({"sed", "perl", "ruby", "yq", "dasel", "awk", "gawk"})
UNPACKS: Final = frozenset({"tar", "bsdtar", "unzip", "7z", "patch", "cpio"})
OUTPUT_AT: Final = {
    "json.tool": (1, frozenset({"--indent"})),
    "xxd": (1, frozenset({"-c", "-cols", "-g", "-groupsize", "-l", "-len", "-n", "-name", "-o", "-s", "-seek"})),
    "uniq": (1, frozenset({"-f", "-s", "-w"})),
    "zip": (0, frozenset({"-b", "-n", "-t", "-x", "-i"})),
}
"""The position of the output file among the arguments, and the options with a value, which are not counted."""
READERS: Final = frozenset({"grep", "egrep", "fgrep", "rg", "ls", "find", "ps", "stat", "ssh", "scp"})
"""Programs whose `-o` does not name an output file."""
_OUT: Final = re.compile(r"--?(?:o|out|output|outfile|output-file|output-document)|-[a-zA-Z]*O|-[a-zA-Z]+o")
_IN_PLACE: Final = re.compile(r"-[a-zA-Z0-9]*i.*|--in-?place.*")
_SED_WRITES: Final = re.compile(r"(?:^|[\d$/|#,;{}!gpI])\s*[wW]\s*([^\s;}]+)")
_FOLDER: Final = re.compile(r"-C|-d|--directory|--one-top-level|-o")


@dataclass(frozen=True)
class Write:
    """A file or folder that a program writes, and the files that the program copies to it.

    `fed`: the text comes from standard input. `printed`: the text comes from the arguments.
    """

    target: str
    sources: tuple[str, ...] = ()
    fed: bool = False
    printed: bool = False
    folder: bool = False
    """Whether the target is a folder into which files with unknown names are written."""


def written_by(name: str, args: Sequence[str]) -> Iterator[Write]:
    """Yield the files that a program writes itself, apart from redirected output."""
    plain = [a for a in args if not a.startswith("-")]
    if name in COPIES:
        yield from _copied(name, args, plain)
    elif name in OUTPUT_AT:
        at, valued = OUTPUT_AT[name]
        words = [a for before, a in pairwise(["", *args]) if before not in valued and (a == "-" or a[:1] != "-")]
        yield from map(Write, words[at:][:1])
    elif name in TEES:
        yield from (Write(a.removeprefix("of="), fed=True) for a in plain if name != "dd" or a.startswith("of="))
    elif name in EDITS and not (name == "sqlite3" and "-readonly" in args):
        yield from (Write(a, printed=True) for a in args)
    elif name == "git" and GIT_WRITES & set(plain[:2]):
        yield from (Write(a) for a in plain[1:])
    elif name == "git" and "config" in plain[:2]:
        yield from (
            Write(given or b)
            for a, b in pairwise([*args, ""])
            for a, _, given in [a.partition("=")]
            if a in {"-f", "--file"}
        )
    elif name in IN_PLACE and ("inplace" in args or any(_IN_PLACE.fullmatch(a) for a in args)):
        yield from (Write(a, printed=True) for a in plain)
    elif name in {"docker", "podman"} and plain[:1] == ["cp"]:
        yield from _copied("cp", args, plain[1:])
    yield from _by_options(name, args)


def _by_options(name: str, args: Sequence[str]) -> Iterator[Write]:
    """Yield the files that a program's options, or the commands of a sed script, name as outputs."""
    if name == "sed":
        yield from (Write(target) for a in args for target in _SED_WRITES.findall(a))
    elif name == "find":
        yield from (Write(value) for option, value in pairwise(args) if option.startswith(("-fprint", "-fls")))
    elif name in {"tar", "bsdtar"}:
        yield from map(Write, _archives(args))
    if name in UNPACKS:
        yield from (Write(value, folder=True) for option, value in pairwise(args) if _FOLDER.fullmatch(option))
    elif name not in READERS | COPIES:
        for option, value in pairwise([*args, ""]):
            key, equals, given = option.partition("=")
            glued = re.fullmatch(r"-[a-zA-Z]{0,9}o([/~].+)", option)
            if glued or (_OUT.fullmatch(key) and (given or value)):
                yield Write(glued[1] if glued else given if equals else value)


def _archives(args: Sequence[str]) -> Iterator[str]:
    """Yield the archives that tar writes."""
    flags = {a for i, a in enumerate(args) if re.fullmatch(r"-[a-zA-Z]{1,12}" if i else r"-?[a-zA-Z]{1,12}", a)}
    if any(set(flag) & set("cru") for flag in flags) or {"--create", "--append", "--update"} & set(args):
        for option, value in pairwise([*args, ""]):
            if option == "--file" or (option in flags and "f" in option):
                yield value
            elif option.startswith("--file="):
                yield option.removeprefix("--file=")


def _copied(name: str, args: Sequence[str], plain: Sequence[str]) -> Iterator[Write]:
    """Yield the possible targets of a copy: the last word, in case it is a file, and each source's name in it, in case
    it is a folder.
    """
    sources, target = list(plain[:-1]), plain[-1] if plain else ""
    for option, value in pairwise([*args, ""]):
        key, _, given = option.partition("=")
        if key in {"-t", "--target-directory"}:
            target, sources = given or value, [a for a in plain if a != (given or value)]
    if not target:
        return
    yield Write(target, tuple(sources))
    yield from (Write(f"{target}/{name_of(source)}", (source,)) for source in sources)
    whole = any(re.fullmatch(r"-\w*[arR]\w*|--archive|--recursive", a) for a in args)
    if any(s.endswith(("/.", "/*", "/")) for s in sources) and (whole or name not in {"rsync", "cp"}):
        yield Write(target, folder=True)
