"""Check a script's imports, arguments and flags against the library releases that the job will get."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from gpuwarden.static_analysis.command_line import CommandLine
from gpuwarden.static_analysis.package_usage import OWN, PackageUse
from gpuwarden.static_analysis.signatures.advice import ARGUMENTS, DROPPED, NAMES
from gpuwarden.static_analysis.signatures.history import (
    ArgumentHistory,
    accepted_in_any_release,
    accepted_values_ever,
    argument_history,
    history,
    minor,
    misspelt,
    nearest,
)
from gpuwarden.static_analysis.signatures.resolve import Existence, Installed, Signature
from gpuwarden.static_analysis.signatures.tables import canonical, package_of, table
from gpuwarden.static_analysis.signatures.together import excludes_older_releases, possible_places
from gpuwarden.static_analysis.static_eval import Call

if TYPE_CHECKING:
    from gpuwarden.static_analysis.signatures.releases import ChosenRelease

_PATCHED = frozenset({"trl", "transformers", "peft"})
"""The packages whose trainers and configurations unsloth replaces when it is imported."""
_NAME = re.compile(r"\w+_\w+")
_TRAINING = "transformers.TrainingArguments"
"""The base class of nearly all dataclasses whose fields become training flags."""


@dataclass(frozen=True)
class Mismatch:
    """A name, argument, flag or value that the job's libraries don't accept.

    `sure` is false if another release accepts it and the job's release is unknown, or if the line may not run.
    """

    message: str
    fix: str
    sure: bool = True


@lru_cache(maxsize=64)
def _chosen(requirements: tuple[str, ...] | None) -> Mapping[str, ChosenRelease]:
    from gpuwarden.static_analysis.signatures.releases import choose

    return choose(requirements)


class Libraries:
    """The libraries of one job, with one release of each. If the tables lack a library's release, the releases before
    and after it are used instead.

    Releases are chosen when a table is first needed, because reading all tables takes longer than analyzing most
    scripts.
    """

    def __init__(self, requirements: Iterable[str] | None, use: PackageUse, imports: Iterable[tuple[str, int]]) -> None:
        imports = tuple(imports)
        self.requirements = None if requirements is None else tuple(requirements)
        self.use = use
        self.patched = any(name.partition(".")[0] == "unsloth" for name, _ in imports)
        self.needed = tuple(name for name, line in imports if line not in use.careful)

    @cached_property
    def chosen(self) -> Mapping[str, ChosenRelease]:
        """Return the release of each package that has a table."""
        return _chosen(self.requirements)

    @cached_property
    def installed(self) -> list[Installed]:
        """Return the job's set of libraries, or two sets if a release lies between two releases in a table."""
        ends = ({p: c.places[0] for p, c in self.chosen.items()}, {p: c.places[-1] for p, c in self.chosen.items()})
        return [Installed(places, self.use.own) for places in (ends[:1] if ends[0] == ends[1] else ends)]

    # ------------------------------------------------------------------------------------------------- imports

    def imports(self, names: Iterable[tuple[str, int]], calls: Iterable[Call]) -> Iterator[Mismatch]:
        """Yield the imported names and the called module attributes that do not exist."""
        seen: set[str] = set()
        calls = [call for call in calls if call.base not in self.use.rebound]
        maybe = {(c.name, c.line) for c in calls if not c.certain}
        named = [(name, line) for name, line in names if not name.endswith(".*")]
        modules = {name for name, _ in named}
        named += [(c.name, c.line) for c in calls if c.name.rpartition(".")[0] in modules]
        for name, line in sorted(named, key=lambda one: one in maybe):
            if name in seen or line in self.use.careful or not package_of(name):
                continue
            seen.add(name)
            if all(installed.exists(name) is Existence.ABSENT for installed in self.installed):
                yield self._missing_name(name, line, maybe=(name, line) in maybe)

    def _missing_name(self, name: str, line: int, *, maybe: bool) -> Mismatch:
        package = package_of(name)
        past = history(package, name)
        owner, _, last = name.rpartition(".")
        if past.gone_in and self._is_past(package, past.gone_in):
            message = f"line {line}: {name} was removed in {package} {minor(past.gone_in)}"
        elif past.since:
            message = f"line {line}: {name} was added in {package} {minor(past.since)}"
        else:
            message = f"line {line}: {owner} has no {last}"
        return Mismatch(
            f"{message} (checked: {self._text(package)})",
            self._other_home(name),
            not maybe and (self._decided(package) or (not past.since and self._never_was(package, name))),
        )

    def _never_was(self, package: str, name: str) -> bool:
        """Return true if no release, including those before the table, contained a name.

        A name that differs by a letter or two from an existing one is a spelling mistake. Any other name may be older
        than the table, unless the script's other imports need a later release than the table's first.
        """
        known = table(package)
        places = range(len(known.releases) if known else 0)
        if any(Installed({package: place}).exists(name) is not Existence.ABSENT for place in places):
            return False
        if misspelt(name.rpartition(".")[2], self.installed[-1].names_beside(name)):
            return True
        possible = possible_places(package, tuple(sorted({*self.needed} - {name})), ())
        return bool(possible) and possible[0] > 0

    def _other_home(self, name: str) -> str:
        """Return a fix: the replacement of a name, its new module, or the closest name."""
        package, last = package_of(name), name.rpartition(".")[2]
        known, installed = table(package), self.installed[-1]
        assert known is not None
        if name in NAMES:
            return f"Use {NAMES[name]}."
        homes = [m for m in known.homes(last, installed.places[package]) if not m.startswith(canonical(name) + ".")]
        if homes:
            return f"Import it from {homes[0]}."
        near = nearest(last, installed.names_beside(name))
        return f"Use {near}." if near else ""

    # ----------------------------------------------------------------------------------------------- arguments

    def calls(self, calls: Iterable[Call]) -> Iterator[tuple[Call, str, list[Signature]]]:
        """Yield the calls whose signature is known in every release, each with its qualified name and signatures."""
        for call in calls:
            own = OWN + call.name
            name = own if own in self.use.own else call.name
            if not call.kwargs or not self._judges(call):
                continue
            if self.patched and package_of(self.inherited_class(name)) in _PATCHED:
                continue
            found = (
                [installed.signature(name) for installed in self.installed] if name == own or package_of(name) else []
            )
            known = [signature for signature in found if signature is not None]
            if known and len(known) == len(found):
                yield call, self.inherited_class(name), known

    def _judges(self, call: Call) -> bool:
        """Return true if a call certainly refers to the imported name, and does not depend on the installed release."""
        return call.base not in self.use.rebound and call.line not in self.use.careful

    def inherited_class(self, name: str) -> str:
        """Return the library class from which a script's own class inherits; other names are returned unchanged."""
        name = OWN + name if OWN + name in self.use.own else name
        for _ in self.use.own:  # the script's classes may inherit from each other in a circle
            own = self.use.own.get(name)
            if own is None or not own.bases:
                break
            name = own.bases[0]
        return name

    def arguments(self, calls: Iterable[Call]) -> Iterator[Mismatch]:
        """Yield the passed arguments that do not exist."""
        calls = tuple(calls)
        judged: set[int] = set()
        for call, name, signatures in self.calls(calls):
            judged.add(id(call))
            for argument in call.kwargs:
                if all(signature.lacks(argument) for signature in signatures):
                    yield self._missing_argument(call, name, argument, signatures[-1], calls)
        yield from self._misspelt_arguments(call for call in calls if id(call) not in judged)

    def _misspelt_arguments(self, calls: Iterable[Call]) -> Iterator[Mismatch]:
        """Yield the arguments that no release has ever had and that differ by a letter or two from an existing one.

        This check works even if the release is unknown, or if unsloth replaces the class.
        """
        for call in calls:
            known = self.accepted_ever(call.name) if call.kwargs and self._judges(call) else None
            for argument in call.kwargs if known else ():
                if argument not in (known or ()) and (meant := misspelt(argument, known or ())):
                    message = f"line {call.line}: no release of {call.last} has an argument {argument}"
                    yield Mismatch(message, f"Use {meant}.", call.certain)

    def accepted_ever(self, name: str) -> frozenset[str] | None:
        """Return the arguments that a class accepts in any release; None if the class or a base accepts any name."""
        found, pending, seen = set[str](), [name], set[str]()
        while pending:
            name = pending.pop()
            own = self.use.own.get(OWN + name.removeprefix(OWN))
            if own is None:
                names = accepted_in_any_release(name) if package_of(name) else None
            else:
                names = None if own.open else frozenset(p.name for p in own.parameters)
                pending += [base for base in own.bases if base not in seen]
                seen |= {*own.bases}
            if names is None:
                return None
            found |= names
        return frozenset(found)

    def _missing_argument(
        self, call: Call, name: str, argument: str, signature: Signature, calls: Iterable[Call]
    ) -> Mismatch:
        past = argument_history(name, argument)
        package = past.package or package_of(name)
        where = f"line {call.line}: {call.last} has no argument {argument}"
        instead = _instead(argument, past, signature)
        if past.existed and past.gone_in and self._is_past(package, past.gone_in):
            where += f" as of {package} {minor(past.gone_in)}"
        elif past.existed:
            where += f" before {package} {minor(past.since)}"
            instead = f"Require {package}>={minor(past.since)}, or omit the argument."
        sure = self._decided(package) or not (past.existed or past.open)
        if not sure and past.gone_in and not past.open:
            judged = [c for c in calls if c.certain and self._judges(c) and package_of(c.name)]
            passed = ((c.name, other) for c in judged for other in c.kwargs if other != argument)
            sure = excludes_older_releases(package, past.gone_in, self.needed, passed)
        return Mismatch(f"{where} (checked: {self._text(package)})", instead, sure and call.certain)

    def deprecated(self, calls: Iterable[Call]) -> Iterator[Mismatch]:
        """Yield the passed arguments that are deprecated."""
        for call, name, signatures in self.calls(calls):
            for argument in call.kwargs:
                news = [signature.renames.get(argument) for signature in signatures]
                if new := all(news) and news[-1]:
                    message = f"line {call.line}: the argument {argument} of {call.last} is deprecated"
                    package = argument_history(name, argument).package or package_of(name)
                    yield Mismatch(f"{message} ({self._text(package)})", f"Use {new}.")

    def choices(self, calls: Iterable[Call]) -> Iterator[Mismatch]:
        """Yield the strings that an argument does not accept; `sure` is false if the library may not reject them."""
        for call, name, signatures in self.calls(calls):
            for argument, value in call.kwargs.items():
                accepted = [
                    installed.values(parameter) if (parameter := s.parameters.get(argument)) else ()
                    for installed, s in zip(self.installed, signatures, strict=True)
                ]
                if isinstance(value, str) and all(a and value not in a for a in accepted):
                    known = self._decided(package_of(name)) or value not in accepted_values_ever(name, argument)
                    strict = signatures[-1].parameters[argument].strict and known and call.certain
                    message = f"line {call.line}: {call.last} does not accept {argument}={value!r}"
                    yield Mismatch(f"{message} ({self._text(package_of(name))})", _one_of(value, accepted[-1]), strict)

    # -------------------------------------------------------------------------------------------- command line

    def flags(self, line: CommandLine, given: Mapping[str, Any]) -> Iterator[Mismatch]:
        """Yield the given flags that a script does not declare, and the abbreviations that match several flags.

        If the job's release of a dataclass is unknown, only a misspelled flag that no release has is certainly wrong.
        If the dataclass itself is unknown, no flag is certainly wrong. If the parser ignores unknown flags, training
        starts without the intended setting.
        """
        fields, exact = self._fields(line), True
        if fields is None:
            fields, exact = self._fields_ever(line), False
        if fields is None:
            classes = (*line.classes, _TRAINING) if line.classes else ()
            known = set(line.flags).union(*(self.accepted_ever(name) or () for name in classes))
            for name in given:
                if name not in known and (meant := misspelt(name, known)):
                    message = f"--{name} looks like --{meant}, but not all flags of this script are known"
                    yield Mismatch(message, f"Write --{meant} if you mean that flag.", sure=False)
            return
        for name, declared in self._declared(line, given, fields):
            named = [flag for flag in fields if not flag.startswith("no_")]
            if not declared and (line.ignores or not exact):
                meant = misspelt(name, named)
                does = "which ignores it" if line.ignores else "in any release of its libraries"
                if meant or line.ignores:
                    fix = f"Write --{meant}." if meant else "Leave it out, or correct it."
                    yield Mismatch(f"--{name} is not a flag of this script, {does}", fix, bool(meant))
            elif not declared:
                past = next(
                    (p for c in line.classes if (p := argument_history(self.inherited_class(c), name)).existed), None
                )
                near = _instead(name, past, None) if past else ""
                flag = nearest(name, named)
                yield Mismatch(f"--{name} is not a flag of this script", near or (f"Write --{flag}." if flag else ""))
            elif len(declared) > 1 and exact:
                listed = ", ".join(f"--{flag}" for flag in declared[:4])
                yield Mismatch(f"--{name} could be short for several flags: {listed}", "Write the full flag.")

    def declares(self, line: CommandLine, name: str) -> bool | None:
        """Return whether a command line declares a flag, without abbreviation; None if some of its flags are unknown.

        A parser that ignores unknown flags may pass them to other code.
        """
        fields = self._fields(line)
        return None if fields is None or (line.ignores and name not in fields) else name in fields

    def flag_choices(self, line: CommandLine, given: Mapping[str, Any]) -> Iterator[Mismatch]:
        """Yield the string values that a flag does not accept."""
        fields = self._fields(line) or {}
        for name, declared in self._declared(line, given, fields or None):
            accepted = fields[declared[0]] if len(declared) == 1 else ()
            if accepted and given[name] is not True and str(given[name]) not in accepted:
                yield Mismatch(f"--{name} does not accept {given[name]!r}", _one_of(str(given[name]), accepted))

    def _declared(
        self, line: CommandLine, given: Mapping[str, Any], fields: Mapping[str, tuple[str, ...]] | None
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield each given flag with the flags to which it may refer: the flag itself, or else the flags that it
        abbreviates.
        """
        for name in given if fields is not None else ():
            longer = [flag for flag in fields or {} if line.abbreviates and flag.startswith(name)]
            yield name, [name] if name in (fields or {}) else longer

    def _fields(self, line: CommandLine) -> dict[str, tuple[str, ...]] | None:
        """Return every flag with the strings that it accepts; None if a dataclass is unknown in one of the releases."""
        if line.partial:
            return None
        fields = dict(line.flags)
        for installed in self.installed:
            for name in line.classes:
                signature = installed.signature(name)
                if signature is None or signature.open or (self.patched and package_of(self.inherited_class(name))):
                    return None
                for parameter in signature.parameters.values():
                    fields |= {parameter.name: installed.values(parameter), f"no_{parameter.name}": ()}
        return fields

    def _fields_ever(self, line: CommandLine) -> dict[str, tuple[str, ...]] | None:
        """Return every flag that a script accepts with any release; None if one of its dataclasses is unknown."""
        if line.partial:
            return None
        fields = dict(line.flags)
        for name in line.classes:
            known = self.accepted_ever(name)
            if not known:
                return None
            fields |= {flag: () for field in known for flag in (field, f"no_{field}")}
        return fields

    # ---------------------------------------------------------------------------------------------------------

    def _text(self, package: str) -> str:
        return self.chosen[package].text if package in self.chosen else package

    def _decided(self, package: str) -> bool:
        return package in self.chosen and self.chosen[package].named

    def _is_past(self, package: str, release: str) -> bool:
        """Return true if the job's release is this release or a later one."""
        known = table(package)
        return (
            known is not None
            and package in self.chosen
            and known.releases.index(release) <= self.chosen[package].places[-1]
        )


def _instead(argument: str, past: ArgumentHistory, signature: Signature | None) -> str:
    """Return a fix for an argument: its replacement, or the closest name."""
    known = signature.parameters if signature else {}
    if past.renamed_to in known or (signature is None and past.renamed_to):
        return f"Use {past.renamed_to}."
    if past.existed and argument in DROPPED:
        why = DROPPED[argument]
        return f"Leave it out: {why}." if why else "Leave it out."
    if past.existed and argument in ARGUMENTS:
        advice = ARGUMENTS[argument]
        new = _NAME.match(advice)
        if new and known and new[0] not in known:  # an argument that moved from the trainer to its configuration
            return "Pass it to the configuration." if "args" in known else ""
        return f"Use {advice}."
    near = nearest(argument, known)
    return f"Use {near}." if near else ""


def _one_of(value: str, accepted: tuple[str, ...]) -> str:
    near = nearest(value, accepted)
    return f"Use {near!r}." if near else f"Use one of {', '.join(accepted[:12])}."
