"""Resolve the modules of one release: the names that each module exports, and their definitions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from signature_tables.modules import Definition, Module, Parameter

PACKAGES = frozenset(
    {"transformers", "trl", "peft", "accelerate", "datasets", "diffusers", "sentence_transformers", "torch"}
    | {"lightning", "pytorch_lightning", "lightning_fabric", "bitsandbytes", "deepspeed", "unsloth"}
)
_HOPS = 12


@dataclass
class Release:
    """One release: its modules (true if a module may have further names), the names that each module binds, and the
    definitions.
    """

    version: str
    requires: list[str]
    modules: dict[str, bool]
    names: dict[str, dict[str, str]]
    definitions: dict[str, Definition]


def resolve(version: str, read: dict[str, Module], present: set[str], requires: list[str]) -> Release:
    """Return a release in which all star imports and chains of imports are resolved."""
    for module in read.values():
        _expand(module, read, set())
    definitions = {f"{m.name}.{n}": d for m in read.values() for n, d in m.definitions.items()}
    names: dict[str, dict[str, str]] = {}
    for module in read.values():
        if not any(part.startswith("_") for part in module.name.split(".")) and (module.bindings or not module.open):
            names[module.name] = {n: follow(t, read) for n, t in module.bindings.items() if not n.startswith("_")}
    for key, found in definitions.items():
        found.bases = tuple(follow(base, read) for base in found.bases)
        found.parameters = tuple(_with_enum(p, read, definitions, key) for p in found.parameters)
    opened = {name: name not in read or read[name].open for name in present}
    for old, new in ((old, new) for m in read.values() for old, new in m.moved.items() if old not in opened):
        names |= {old: names[new]} if new in names else {}
        opened[old] = opened.get(new, True)
    # Names that a package's top module adds to sys.modules as strings can be imported too.
    root = next((read[name] for name in sorted(read) if "." not in name), None)
    if root is not None and _patches(root):
        opened = {f"{root.name}.{text}": True for text in root.strings if text.isidentifier()} | opened
    return Release(version, requires, opened, names, _reachable(names, definitions))


def _patches(root: Module) -> bool:
    return any("_ALIAS" in name.upper() or "alias" in name for name in (*root.bindings, *root.hidden)) or root.open


def follow(target: str, read: dict[str, Module]) -> str:
    """Return the target of a chain of imports: the name of a definition, of a module, or of another package's
    object.
    """
    for _ in range(_HOPS):
        owner, _, name = target.rpartition(".")
        if target in read or owner not in read:
            return target
        following = read[owner].bindings.get(name) or read[owner].hidden.get(name)
        if following is None or following == target:
            return target
        target = following
    return target


def _expand(module: Module, read: dict[str, Module], busy: set[str]) -> None:
    """Replace a module's star imports with the names that they import."""
    if module.name in busy:
        return
    busy.add(module.name)
    stars, module.stars = module.stars, []
    for source in stars:
        if source.endswith(".models") and source.partition(".")[0] == "transformers":
            for other in [m for m in read.values() if m.name.startswith(source + ".") and m.exported]:
                module.bindings |= {n: f"{other.name}.{n}" for n in other.exported or ()}
        elif source in read:
            other = read[source]
            _expand(other, read, busy)
            public = other.exported or [n for n in other.bindings if not n.startswith("_")]
            module.bindings |= {n: f"{source}.{n}" for n in public if n not in module.definitions}
            module.open = module.open or other.open
        elif not source.rpartition(".")[2].startswith("dumm"):
            module.open = True


def _with_enum(
    parameter: Parameter, read: dict[str, Module], definitions: dict[str, Definition], key: str
) -> Parameter:
    """Return a parameter with the enum in its annotation; without an enum if the annotation names none or several."""
    ends = [follow(kind, read) for kind in parameter.kinds]
    known = [e for e in ends if (e not in definitions or definitions[e].kind == "enum")]
    known = [e for e in known if e.partition(".")[0] in PACKAGES - {"torch"}]
    foreign = [e for e in known if e not in definitions and e.partition(".")[0] == key.partition(".")[0]]
    return replace(parameter, kinds=tuple(known) if len(ends) == 1 == len(known) and not foreign else ())


def _reachable(names: dict[str, dict[str, str]], definitions: dict[str, Definition]) -> dict[str, Definition]:
    """Return the definitions of all public names, and their bases and enums."""
    todo = [target for bound in names.values() for target in bound.values()]
    found: dict[str, Definition] = {}
    while todo:
        key = todo.pop()
        if key in definitions and key not in found:
            found[key] = definitions[key]
            todo += [*definitions[key].bases, *(k for p in definitions[key].parameters for k in p.kinds)]
    return found
