"""Check the recorded removal dates of arguments against the released wheels.

    python tools/check_advice.py --wheels FOLDER

The dates are read from `static_analysis/signatures/advice.py` and, for each argument with advice there, from the
tables. For each date, the last release with the argument and the first release without it are downloaded into FOLDER
and read as text. The exit code is 1 if a date is wrong.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from signature_tables.wheels import files_of, wheel

from gpuwarden.static_analysis.signatures.advice import ARGUMENTS, LOADING
from gpuwarden.static_analysis.signatures.tables import table

CLASS = re.compile(r"\w*(?:Trainer|TrainingArguments|Config)")


def main() -> int:
    """Print each date with the findings in the wheels, and return 1 if a date is wrong."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ask.add_argument("--wheels", type=Path, required=True, help="folder in which the wheels are cached between runs")
    folder = ask.parse_args().wheels
    folder.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for package, name, last, gone, shows in (*loading(folder), *arguments(folder)):
        good = shows == (True, False)
        wrong += not good
        print(
            f"{'right' if good else 'WRONG'} {package} {name}: in {last} {shows[0]}, in {gone} {shows[1]}", flush=True
        )
    return int(wrong > 0)


Row = tuple[str, str, str, str, tuple[bool, bool]]


def loading(folder: Path) -> Iterator[Row]:
    """Yield the arguments of `from_pretrained` that releases before the removal date read from `kwargs`."""
    known = table("transformers")
    assert known is not None
    for name, (since, _) in LOADING.items():
        number = tuple(map(int, since.split(".")))
        first = next(n for n, release in enumerate(known.versions) if release.release[: len(number)] >= number)
        last, gone = known.releases[first - 1], known.releases[first]
        pops = re.compile(rf"""kwargs\.pop\(\s*["']{name}["']""".encode())
        texts = (files_of(wheel("transformers", release, folder)) for release in (last, gone))
        before, after = (bool(pops.search(files["transformers/modeling_utils.py"])) for files in texts)
        yield "transformers", f"from_pretrained({name}=)", last, gone, (before, after)


def arguments(folder: Path) -> Iterator[Row]:
    """Yield the arguments with advice that a trainer or a configuration declares only in an older release."""
    for package in ("transformers", "trl"):
        known = table(package)
        assert known is not None
        newest = len(known.releases) - 1
        names = {name for place in range(newest + 1) for name in known.names(package, place) if CLASS.fullmatch(name)}
        for qualified in sorted({q for name in names for q in known.defined_as(name)}):
            forms = sorted(known.definitions(qualified), key=lambda form: form[0])
            for argument in ARGUMENTS:
                ends = [end for _, end, form in forms if argument in {p.name for p in form.parameters}]
                # A class that is moved or removed gives no information about its argument.
                if ends and max(ends) < newest and known.definition(qualified, max(ends) + 1):
                    last, gone = known.releases[max(ends)], known.releases[max(ends) + 1]
                    shows = tuple(takes(wheel(package, r, folder), qualified, argument) for r in (last, gone))
                    yield package, f"{qualified}({argument}=)", last, gone, (shows[0], shows[1])


def takes(path: Path, qualified: str, argument: str) -> bool:
    """Return whether a class in a wheel declares a field or an argument of its constructor with this name."""
    module, _, name = qualified.rpartition(".")
    files = files_of(path)
    stem = module.replace(".", "/")
    text = files.get(f"{stem}.py") or files.get(f"{stem}/__init__.py") or b""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
            inits = (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
            given = {a.arg for init in inits for a in (*init.args.posonlyargs, *init.args.args, *init.args.kwonlyargs)}
            return argument in fields | given
    return False


if __name__ == "__main__":
    sys.exit(main())
