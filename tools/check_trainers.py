"""Compare the shipped trainers with releases of their libraries: each import, keyword and method that a release lacks.

    python tools/check_trainers.py [--wheels FOLDER] [--keep FOLDER] [--only PACKAGE...]

For every package of the trainers' headers two releases are read: the newest within the header's bounds, which a job
installs today, and the newest of all. pip downloads them, with its own settings; nothing is installed, and nothing of
a release is run: signatures are read from the sources in the wheel. `--wheels` takes the releases from a folder
instead of an index. The gate's own tables are compared too: a name that PF-API-001 calls gone and a release has.

Exit code: 0 nothing is lacking, 1 a release within the bounds lacks something, 3 only one beyond them does, 2 a
release could not be had or read. For a scheduler: anything but 0 asks for a look.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gpuwarden.scripts.ecosystem_tables import GONE_ARGUMENTS, canonical_name, read_requirement

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "skills" / "gpu-training" / "scripts"
# Packages whose signatures the trainers depend on. The others are only imported, or by a library.
READ = ("transformers", "trl", "peft", "datasets", "accelerate", "huggingface-hub", "sentence-transformers",
        "safetensors", "albumentations", "torchmetrics")  # fmt: skip
MODULES = {name.replace("-", "_"): name for name in READ}
# The gate's table of arguments is about these classes.
CONFIGS = (("transformers", "TrainingArguments"), ("trl", "SFTConfig"), ("trl", "DPOConfig"), ("trl", "GRPOConfig"))
OPEN = "**"
Parameters = frozenset[str]


@dataclass(frozen=True, order=True)
class Use:
    """One thing that a trainer needs of a library: a name, or one argument or method of it."""

    module: str
    name: str
    method: str = ""
    keyword: str = ""

    def __str__(self) -> str:
        """Return the use as it is written in a script."""
        whole = f"{self.module}.{self.name}{f'.{self.method}' if self.method else ''}"
        return f"{whole}({self.keyword}=)" if self.keyword else whole


# ------------------------------------------------------------------------------------------------ what a trainer uses


def uses_of(tree: ast.Module) -> set[Use]:
    """Return what one script uses of the libraries."""
    imported: dict[str, Use] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            imported |= {a.asname or a.name: Use(str(node.module), a.name) for a in node.names}
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = set(imported.values())
    for function in functions.values():
        found |= set(_called(function, imported, functions))
    return found | set(_of_the_trainer(tree))


def _called(
    function: ast.FunctionDef, imported: Mapping[str, Use], functions: Mapping[str, ast.FunctionDef]
) -> Iterator[Use]:
    """Yield the arguments and methods that a function uses of imported classes and functions."""
    made = {
        target.id: imported[node.value.func.id]
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
        for target in node.targets
        if isinstance(target, ast.Name) and node.value.func.id in imported
    }
    for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        match call.func:
            case ast.Name(id=name) if name in imported:
                use, method = imported[name], ""
            case ast.Attribute(value=ast.Name(id=name), attr=method) if name in imported or name in made:
                use = imported.get(name) or made[name]
            case ast.Attribute(value=ast.Call(func=ast.Name(id=name)), attr=method) if name in imported:
                use = imported[name]
            case _:
                continue
        yield Use(use.module, use.name, method)
        yield from (Use(use.module, use.name, method, key) for key in _keywords(call, function, functions))


def _keywords(call: ast.Call, around: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> Iterator[str]:
    """Yield a call's keywords, those in a mapping that a function here returns or fills included."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg
            continue
        match keyword.value:
            case ast.Call(func=ast.Name(id=name)) if name in functions:
                yield from _keys(functions[name], None)
            case ast.Name(id=name):
                yield from _keys(around, name)


def _keys(function: ast.FunctionDef, name: str | None) -> Iterator[str]:
    """Yield the keys of the mappings that a function assigns to a name, or to the name that it returns."""
    returned = {n.value.id for n in ast.walk(function) if isinstance(n, ast.Return) and isinstance(n.value, ast.Name)}
    names = {name} if name else returned
    for node in ast.walk(function):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=target)], value=value)
                | ast.AnnAssign(target=ast.Name(id=target), value=value)
                | ast.AugAssign(target=ast.Name(id=target), value=value)
            ) if target in names:
                yield from _literal_keys(value)
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=target), slice=ast.Constant(value=str(key)))]) if (
                target in names
            ):
                yield key
            case ast.Return(value=ast.Dict() as value) if name is None:
                yield from _literal_keys(value)


def _literal_keys(value: ast.expr | None) -> Iterator[str]:
    for node in ast.walk(value) if value else ():
        if isinstance(node, ast.Dict):
            yield from (k.value for k in node.keys if isinstance(k, ast.Constant) and isinstance(k.value, str))
            return


def _of_the_trainer(tree: ast.Module) -> Iterator[Use]:
    """Yield the methods of the Trainer that a script calls or replaces, and the events that its callbacks answer."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="trainer"), attr=name):
                yield Use("transformers", "Trainer", name)
            case ast.FunctionDef(name=name) if name.startswith("on_") and len(node.args.args) > 3:
                yield Use("transformers", "TrainerCallback", name)


# ------------------------------------------------------------------------------------------------- what a release has


@dataclass
class Release:
    """One release of a package, read from its wheel."""

    package: str
    version: str
    wheel: Path
    trees: dict[str, ast.Module] = field(default_factory=dict)

    @cached_property
    def modules(self) -> dict[str, str]:
        """Return dotted module -> its path in the wheel."""
        with zipfile.ZipFile(self.wheel) as wheel:
            paths = [name for name in wheel.namelist() if name.endswith(".py")]
        return {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in paths}

    def tree(self, module: str) -> ast.Module | None:
        """Return a module's syntax tree, None where the wheel has no such module."""
        if module not in self.trees:
            if module not in self.modules:
                return None
            with zipfile.ZipFile(self.wheel) as wheel:
                self.trees[module] = ast.parse(wheel.read(self.modules[module]))
        return self.trees[module]

    @cached_property
    def definitions(self) -> dict[str, list[str]]:
        """Return the name of each class and function -> the modules that define it."""
        found: dict[str, list[str]] = {}
        pattern = re.compile(rb"^(?:class|(?:async )?def) (\w+)", re.MULTILINE)
        with zipfile.ZipFile(self.wheel) as wheel:
            for module, path in self.modules.items():
                for name in pattern.findall(wheel.read(path)):
                    found.setdefault(name.decode(), []).append(module)
        return found


class Library:
    """A set of releases, one of each package."""

    def __init__(self, releases: Iterable[Release]) -> None:
        self.releases = {release.package: release for release in releases}

    def release_of(self, module: str) -> Release | None:
        """Return the release that a module belongs to."""
        return self.releases.get(MODULES.get(module.partition(".")[0], ""))

    def find(self, module: str, name: str, depth: int = 0) -> tuple[str, ast.stmt] | None:
        """Return the module and the statement that define a name which a module offers, None where none does."""
        release = self.release_of(module)
        tree = release.tree(module) if release else None
        if tree is None or release is None or depth > 12:
            return None
        is_package = release.modules[module].endswith("__init__.py")
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name and node in tree.body:
                    return module, node
                case ast.Assign(targets=[ast.Name(id=found)]) if found == name:
                    return module, node
                case ast.ImportFrom() if any((a.asname or a.name) in {name, "*"} for a in node.names):
                    origin = next(a.name for a in node.names if (a.asname or a.name) in {name, "*"})
                    where = _absolute(module, node, is_package=is_package)
                    if origin != "*" and self.release_of(where) is release and where not in release.modules:
                        # A compiled module has no source; nothing is known of what it offers.
                        return where, ast.Pass()
                    if (there := self.find(where, name if origin == "*" else origin, depth + 1)) is not None:
                        return there
        return self._lazy(release, module, tree, name) if is_package else None

    def _lazy(self, release: Release, module: str, tree: ast.Module, name: str) -> tuple[str, ast.stmt] | None:
        """Return the definition of a name that a package loads when it is asked for, by a table of strings."""
        text = ast.dump(tree)
        below = [m for m in release.definitions.get(name, ()) if m.startswith(f"{module}.")]
        named = f"value='{name}'" in text
        # transformers lists the contents of `models` by walking its folders.
        walked = "define_import_structure" in text
        for where in below:
            inner = where.removeprefix(f"{module}.")
            found = release.tree(where)
            if (named or (walked and inner.startswith("models."))) and found is not None:
                node = next(n for n in found.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)
                return where, node
        return None

    def has(self, use: Use) -> bool | None:
        """Return whether the releases have what is used; None where the package is not among them."""
        if self.release_of(use.module) is None:
            return None
        if use.module.count(".") >= 1 and self.find(use.module, use.name) is None:
            return f"{use.module}.{use.name}" in (self.release_of(use.module) or Release("", "", Path())).modules
        found = self.find(use.module, use.name)
        if found is None or not (use.method or use.keyword):
            return found is not None
        module, node = found
        if use.method and not isinstance(node, ast.ClassDef):
            return None  # what a function returns is not known
        if use.method:
            members = self.members(module, node)
            if use.method not in members:
                return not members.keys().isdisjoint({OPEN}) or use.method.startswith("__")
            module, inner = members[use.method]
            if not use.keyword:
                return True
            return isinstance(inner, ast.FunctionDef) is False or _fits(_parameters(inner), use.keyword)
        return _fits(self.parameters(module, node), use.keyword)

    def members(self, module: str, node: ast.stmt) -> dict[str, tuple[str, ast.AST]]:
        """Return the methods and attributes of a class; OPEN stands for those of a base that is not read here."""
        found: dict[str, tuple[str, ast.AST]] = {}
        for where, line in reversed(list(self.line(module, node))):
            if line is None:
                found[OPEN] = (where, ast.Pass())
                continue
            for part in ast.walk(line):
                match part:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        found.setdefault(name, (where, part))
                    case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                        found.setdefault(name, (where, part))
            found |= {part.name: (where, part) for part in line.body if isinstance(part, ast.FunctionDef)}
        return found

    def line(self, module: str, node: ast.stmt) -> Iterator[tuple[str, ast.ClassDef | None]]:
        """Yield a class and its bases, nearest first; None for a base that is not read here."""
        if not isinstance(node, ast.ClassDef):
            return
        yield module, node
        for base in node.bases:
            match base:
                case ast.Name(id=name):
                    there = self.find(module, name)
                    if there is not None and isinstance(there[1], ast.ClassDef):
                        yield from self.line(*there)
                        continue
            if not (isinstance(base, ast.Name) and base.id in {"object", "Protocol", "ABC"}):
                yield module, None

    def parameters(self, module: str, node: ast.stmt) -> Parameters:
        """Return what a function or a class's constructor accepts; OPEN among them accepts anything."""
        if isinstance(node, ast.FunctionDef):
            return _parameters(node)
        if not isinstance(node, ast.ClassDef):
            return frozenset({OPEN})
        fields: set[str] = set()
        for _, one in self.line(module, node):
            if one is None:
                return frozenset(fields | {OPEN})
            init = next((n for n in one.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
            if init is not None:
                return frozenset(fields) | _parameters(init)
            if _is_dataclass(one):
                fields |= {
                    n.target.id for n in one.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                }
        return frozenset(fields) or frozenset({OPEN})


def _absolute(module: str, node: ast.ImportFrom, *, is_package: bool) -> str:
    """Return the module that an import names, with the dots in front resolved."""
    parts = module.split(".") if is_package else module.split(".")[:-1]
    above = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def _parameters(function: ast.FunctionDef) -> Parameters:
    given = function.args
    names = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return frozenset(names | ({OPEN} if given.kwarg else set()))


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list)


def _fits(parameters: Parameters, keyword: str) -> bool:
    return keyword in parameters or OPEN in parameters


# ------------------------------------------------------------------------------------------------------------ releases


def bounds(scripts: Iterable[Path]) -> dict[str, str]:
    """Return package -> the requirement of the trainers' headers."""
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


def download(wanted: str, folder: Path, wheels: Path | None) -> Release | None:
    """Return a release that pip chooses for a requirement, None where it finds none."""
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
    """Yield a line for each thing that the releases lack."""
    for use in sorted(uses):
        if library.has(use) is False:
            release = library.release_of(use.module)
            assert release is not None
            yield f"{release.package} {release.version} lacks {use}, used by {', '.join(sorted(uses[use]))}"


def back(library: Library) -> Iterator[str]:
    """Yield a line for each argument that the gate calls gone and that every one of the configurations has."""
    for name, gone in GONE_ARGUMENTS.items():
        for module, config in CONFIGS:
            if MODULES[module] == gone.package and library.has(Use(module, config, "", name)):
                yield f"{module}.{config} has {name}, which PF-API-001 calls gone since {gone.package} {gone.since}"


def main(words: Sequence[str] | None = None) -> int:
    """Compare, and print what is lacking."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--wheels", type=Path, default=None, help="a folder of wheels to take instead of an index")
    ask.add_argument("--keep", type=Path, default=None, help="where the downloaded wheels are kept")
    ask.add_argument("--only", nargs="*", choices=READ, default=list(READ))
    ask.add_argument("--scripts", type=Path, default=SHIPPED, help="the folder of the trainers")
    asked = ask.parse_args(words)
    scripts = [
        path for path in sorted(asked.scripts.glob("*.py")) if "# /// script" in path.read_text(encoding="utf-8")
    ]
    uses: dict[Use, set[str]] = {}
    for script in scripts:
        for use in uses_of(ast.parse(script.read_text(encoding="utf-8"))):
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
    """Print what a set of releases lacks; return the exit code that stands for it."""
    library = Library(release for release in found.values() if release is not None)
    lines = [*lacking(uses, library), *back(library)]
    names = ", ".join(f"{release.package} {release.version}" for release in library.releases.values())
    read = sum(library.has(use) is not None for use in uses)
    print(f"{title}: {names}: {read} uses, {len(lines)} to look at", *lines, sep="\n  ")
    return code if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
