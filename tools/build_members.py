"""Build the member tables: the module names and class members that exist only in some releases.

    python tools/build_members.py --wheels FOLDER [--only PACKAGE ...]

Reads the wheels that `tools/build_signatures.py` downloads, and writes one table for each package to
`references/signatures/members/`. The same list of releases always gives the same output.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from build_signatures import FOLDER, FORMER
from signature_tables.encode import compressed
from signature_tables.members import Text, changes, read_text
from signature_tables.wheels import python_files, wheel

BULK = re.compile(r"transformers/models/|diffusers/(pipelines|modular_pipelines|models)/|torch/")
"""In these files, attributes that are assigned in methods are ignored."""
LEFT_OUT = re.compile(
    r"torch/(_inductor|_dynamo|_refs|_decomp|_export|ao|fx|onnx|jit|quantization|distributions|include)/"
)


def main() -> int:
    """Write the tables."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ask.add_argument("--wheels", type=Path, required=True, help="folder in which the wheels are cached between runs")
    ask.add_argument("--only", nargs="+", default=(), metavar="PACKAGE")
    args = ask.parse_args()
    releases: dict[str, list[str]] = json.loads((FOLDER / "releases.json").read_text(encoding="utf-8"))
    (FOLDER / "members").mkdir(exist_ok=True)
    for package, versions in releases.items():
        if not args.only or package in args.only:
            content = build(package, versions, args.wheels)
            (FOLDER / "members" / f"{package}.json.xz").write_bytes(content)
            print(f"{package}: {len(versions)} releases, {len(content) / 1024:.0f} KiB", flush=True)
    return 0


def build(package: str, versions: list[str], wheels: Path) -> bytes:
    """Return the compressed table of a package's releases."""
    memo: dict[str, Text] = {}
    found = []
    for version in versions:
        former, begins = FORMER.get(package, ("", "-"))
        source = former if version.startswith(begins) else package
        found.append(texts_of(source, wheel(source, version, wheels), memo))
    return compressed(changes(versions, found))


def texts_of(package: str, path: Path, memo: dict[str, Text]) -> dict[str, Text]:
    """Return the modules of a wheel; `memo` caches files, because most files are the same in the next release."""
    rename = ("pytorch_lightning", "lightning.pytorch")
    found: dict[str, Text] = {}
    for file, key, text in python_files(package, path, LEFT_OUT):
        if key not in memo:
            memo[key] = read_text(text, attributes=not BULK.match(file))
        found[file.removesuffix(".py").removesuffix("/__init__").replace("/", ".").replace(*rename)] = memo[key]
    return found


if __name__ == "__main__":
    raise SystemExit(main())
