"""Build the signature tables: the names and arguments in each released version of a training library.

    python tools/build_signatures.py --wheels FOLDER [--only PACKAGE ...]

Downloads the releases that `references/signatures/releases.json` lists into FOLDER, reads them as text, and writes one
table per package to the folder that contains the list. The output depends only on the list. To add a release, add it to
the list.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
from pathlib import Path

from signature_tables import modules
from signature_tables.encode import compressed, table
from signature_tables.releases import resolve
from signature_tables.wheels import modules_of, wheel

FOLDER = Path(__file__).resolve().parent.parent / "references" / "signatures"
FORMER = {"lightning": ("pytorch-lightning", "1.")}
"""package -> (its former name, the version prefix of the releases under that name)"""


def main() -> int:
    """Write the tables."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ask.add_argument("--wheels", type=Path, required=True, help="folder in which the wheels are cached between runs")
    ask.add_argument("--only", nargs="+", default=(), metavar="PACKAGE")
    args = ask.parse_args()
    args.wheels.mkdir(parents=True, exist_ok=True)
    releases: dict[str, list[str]] = json.loads((FOLDER / "releases.json").read_text(encoding="utf-8"))
    for package, versions in releases.items():
        if not args.only or package in args.only:
            content = build(package, versions, args.wheels)
            (FOLDER / f"{package}.json.xz").write_bytes(content)
            print(f"{package}: {len(versions)} releases, {len(content) / 1024:.0f} KiB", flush=True)
    return 0


def build(package: str, versions: list[str], wheels: Path) -> bytes:
    """Return the compressed table of a package's releases."""
    # The cached results are valid until the code that reads the files changes.
    reader = hashlib.sha256(Path(modules.__file__).read_bytes()).hexdigest()[:12]
    kept = wheels / f"{package}.{reader}.read"
    memo: dict[str, bytes] = pickle.loads(kept.read_bytes()) if kept.exists() else {}  # noqa: S301 - written by this command
    found = []
    for version in versions:
        former, begins = FORMER.get(package, ("", "-"))
        source = former if version.startswith(begins) else package
        found.append(resolve(version, *modules_of(source, wheel(source, version, wheels), memo)))
    kept.write_bytes(pickle.dumps(memo))
    return compressed(table(package, found))


if __name__ == "__main__":
    raise SystemExit(main())
