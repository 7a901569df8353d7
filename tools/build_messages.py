"""Build the message tables: the errors and warnings in each release, by file.

    python tools/build_messages.py --wheels FOLDER [--only PACKAGE ...]
    python tools/build_messages.py --list

Reads the wheels that `tools/build_signatures.py` downloads, and writes one table per package to
`references/signatures/messages/`. `--list` prints how many messages match an entry's signature, and lists messages that
don't match any.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from build_members import LEFT_OUT
from build_signatures import FOLDER, FORMER
from signature_tables.encode import compressed
from signature_tables.messages import HOLE, Message, read_messages
from signature_tables.wheels import python_files, wheel

from gpuwarden.knowledge import shipped
from gpuwarden.knowledge.signatures import compiled_signature, literal_of

TABLES = FOLDER / "messages"


def main() -> int:
    """Write the tables, or list the messages without an entry."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ask.add_argument("--wheels", type=Path, help="folder in which the wheels are cached between runs")
    ask.add_argument("--only", nargs="+", default=(), metavar="PACKAGE")
    ask.add_argument("--list", action="store_true")
    args = ask.parse_args()
    if args.list or args.wheels is None:
        return listed()
    releases: dict[str, list[str]] = json.loads((FOLDER / "releases.json").read_text(encoding="utf-8"))
    TABLES.mkdir(exist_ok=True)
    for package, versions in releases.items():
        if not args.only or package in args.only:
            content = compressed(table(versions, [_read(package, v, args.wheels) for v in versions]))
            (TABLES / f"{package}.json.xz").write_bytes(content)
            print(f"{package}: {len(content) / 1024:.0f} KiB", flush=True)
    return 0


_memo: dict[str, set[Message]] = {}


def _read(package: str, version: str, wheels: Path) -> dict[str, set[Message]]:
    """Return the messages in a release by file. Files are cached, because most are the same in the next release."""
    former, begins = FORMER.get(package, ("", "-"))
    source = former if version.startswith(begins) else package
    found: dict[str, set[Message]] = {}
    for file, key, text in python_files(source, wheel(source, version, wheels), LEFT_OUT):
        if key not in _memo:
            _memo[key] = read_messages(text)
        if _memo[key]:
            found[file.replace("pytorch_lightning/", "lightning/pytorch/", 1)] = _memo[key]
    return found


def table(versions: Sequence[str], releases: Sequence[Mapping[str, set[Message]]]) -> dict[str, Any]:
    """Return the messages in each file, each with the first and the last release that contains it."""
    files: dict[str, dict[Message, list[int]]] = {}
    for number, release in enumerate(releases):
        for file, messages in release.items():
            for message in messages:
                files.setdefault(file, {}).setdefault(message, [number, number])[1] = number
    return {
        "releases": list(versions),
        "files": {
            file: [[message.type, message.template, *span] for message, span in sorted(messages.items())]
            for file, messages in files.items()
        },
    }


def listed() -> int:
    """Print how many messages in the newest releases match an entry's signature, and list messages that don't match
    any.
    """
    signatures = [(literal_of(p), compiled_signature(p)) for g in shipped().gotchas.values() for p in g.signatures]
    for path in sorted(TABLES.glob("*.json.xz")):
        content = json.loads(lzma.decompress(path.read_bytes()))
        newest = len(content["releases"]) - 1
        rows = [(f, *row) for f, messages in content["files"].items() for row in messages if row[3] == newest]
        lines = [f"{kind}: {template.replace(HOLE, 'x')}" for _, kind, template, *_ in rows]
        known = [any(fixed in line.lower() and pattern.search(line) for fixed, pattern in signatures) for line in lines]
        without = [row for row, explained in zip(rows, known, strict=True) if not explained]
        print(f"{path.name.partition('.')[0]}: {len(rows) - len(without)} of {len(rows)} have an entry")
        for file, kind, template, *_ in without:
            print(f"  {file}: {kind}: {template}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
