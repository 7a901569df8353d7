"""Check the shipped trainers for imports, keywords and methods that a release of their libraries lacks.

    python tools/check_trainers.py [--wheels FOLDER] [--keep FOLDER] [--only PACKAGE...]

Two releases are read for every package in the trainers' headers: the newest within the header's bounds, which a job
installs today, and the newest of all. pip downloads the releases, using its own settings. They are not installed or
executed; signatures are read from the sources in the wheels. `--wheels` reads the releases from a folder instead of an
index. The check also compares the gate's tables: it reports a name that exists in a release although PF-API-001 says
that it was removed.

Exit code: 0 if nothing is missing, 1 if a release within the bounds lacks a name, 3 if only a release beyond them lacks
one, 2 if a release could not be downloaded or read. A scheduler should report any nonzero code.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from trainer_checks.releases import Library, Release
from trainer_checks.uses import MODULES, READ, Use, uses_of

from gpuwarden.static_analysis.bundle import PACKAGE, Bundle, sources_of, with_package
from gpuwarden.static_analysis.ecosystem_tables import canonical_name, read_requirement
from gpuwarden.static_analysis.signatures.advice import ARGUMENTS
from gpuwarden.static_analysis.signatures.history import history

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "skills" / "gpu-training" / "scripts"
# The classes that are described by the gate's argument table.
CONFIGS = (("transformers", "TrainingArguments"), ("trl", "SFTConfig"), ("trl", "DPOConfig"), ("trl", "GRPOConfig"))


def bounds(scripts: Iterable[Path]) -> dict[str, str]:
    """Return, for each package, the requirement in the trainers' headers."""
    found: dict[str, str] = {}
    for script in scripts:
        text = script.read_text(encoding="utf-8").partition("# ///\n")[0]
        lines = [line.removeprefix("#").removeprefix(" ") for line in text.splitlines() if line.startswith("#")]
        header = tomllib.loads("\n".join(line for line in lines if not line.startswith("///")))
        for wanted in header.get("dependencies", ()):
            requirement = read_requirement(wanted)
            if requirement is not None and requirement.name in READ:
                found[requirement.name] = wanted.partition(";")[0].strip()
    return found


def whole(script: Path) -> ast.Module:
    """Return the syntax tree of a trainer, with the modules of its package."""
    package = sources_of({p.name: p.read_text(encoding="utf-8") for p in (script.parent / PACKAGE).glob("*.py")})
    text = script.read_text(encoding="utf-8")
    return with_package(ast.parse(text), Bundle(text, package))


def download(wanted: str, folder: Path, wheels: Path | None) -> Release | None:
    """Return the release that pip chooses for a requirement, or None if pip finds no wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--dest", str(folder), wanted]  # fmt: skip
    if wheels is not None:
        command += ["--no-index", "--find-links", str(wheels)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if done.returncode or len(found) != 1:
        print(f"{wanted}: {done.stderr.strip().splitlines()[-1:] or 'no wheel'}", file=sys.stderr)
        return None
    name, version = found[0].name.split("-")[:2]
    return Release(canonical_name(name), version, found[0])


def lacking(uses: Mapping[Use, set[str]], library: Library) -> Iterator[str]:
    """Yield a line for each name that is used but missing from the releases."""
    for use in sorted(uses):
        if library.has(use) is False:
            release = library.release_of(use.module)
            assert release is not None
            yield f"{release.package} {release.version} lacks {use}, used by {', '.join(sorted(uses[use]))}"


def back(library: Library) -> Iterator[str]:
    """Yield a line for each argument that the gate considers removed but a configuration still has."""
    for name in ARGUMENTS:
        for module, config in CONFIGS:
            gone = history(module, config, name).gone_in
            if gone and library.has(Use(module, config, "", name)):
                yield f"{module}.{config} has {name}, which PF-API-001 considers removed since {MODULES[module]} {gone}"


def main(words: Sequence[str] | None = None) -> int:
    """Compare the trainers with the releases, and print the missing names."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--wheels", type=Path, default=None, help="folder of wheels to use instead of an index")
    ask.add_argument("--keep", type=Path, default=None, help="folder in which to keep the downloaded wheels")
    ask.add_argument("--only", nargs="*", choices=READ, default=list(READ))
    ask.add_argument("--scripts", type=Path, default=SHIPPED, help="the folder with the trainers")
    asked = ask.parse_args(words)
    scripts = [
        path for path in sorted(asked.scripts.glob("*.py")) if "# /// script" in path.read_text(encoding="utf-8")
    ]
    uses: dict[Use, set[str]] = {}
    for script in scripts:
        for use in uses_of(whole(script)):
            uses.setdefault(use, set()).add(script.name)
    wanted = {name: text for name, text in bounds(scripts).items() if name in asked.only}
    with tempfile.TemporaryDirectory() as made:
        keep = asked.keep or Path(made)
        inside = {name: download(text, keep / "within" / name, asked.wheels) for name, text in wanted.items()}
        beyond = {name: download(name, keep / "beyond" / name, asked.wheels) for name in wanted}
        unread = [name for name in wanted if inside[name] is None or beyond[name] is None]
        codes = [_report("within the bounds", uses, inside, 1), _report("the newest", uses, beyond, 3)]
    found = next((code for code in codes if code), 0)
    return found if found == 1 else 2 if unread else found


def _report(title: str, uses: Mapping[Use, set[str]], found: Mapping[str, Release | None], code: int) -> int:
    """Print the names that a set of releases lacks. Return `code` if there are any, otherwise 0."""
    library = Library(release for release in found.values() if release is not None)
    lines = [*lacking(uses, library), *back(library)]
    names = ", ".join(f"{release.package} {release.version}" for release in library.releases.values())
    read = sum(library.has(use) is not None for use in uses)
    print(f"{title}: {names}: {read} uses, {len(lines)} to review", *lines, sep="\n  ")
    return code if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
