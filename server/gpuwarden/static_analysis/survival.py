"""Decide which failures a program survives: run it in outline, with an error handler in place of the failed code.

A failure is survived if the program reaches an end at which its work is done, without a variable that only the failed
code sets. The work is training or, in a program that does not train, saving. An unknown condition may be true or false.
A failure is also survived if too many statements would have to be followed.
"""

from __future__ import annotations

import ast
import builtins
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from gpuwarden.static_analysis.statements import (
    FUNCTIONS,
    NONE,
    bound_by,
    certain_parts,
    flattened,
    is_field,
    is_none,
    last_name,
    none_mark,
    parameters,
    parts_of,
    variable,
)
from gpuwarden.static_analysis.survey import Function, Scope, Survey, catches, leaves

_Catcher: TypeAlias = "ast.Try | ast.TryStar | ast.With | ast.AsyncWith"
_Block: TypeAlias = "Sequence[ast.stmt]"
_TRAINS = frozenset({"train", "fit", "backward"})
_SAVES = re.compile(r"_?(save|push|upload|export|write)")
_HOOKS = ("training_step", "forward")
"""Methods that the training calls."""
_UNRELATED = frozenset(
    """KeyboardInterrupt SystemExit GeneratorExit StopIteration StopAsyncIteration OutOfMemoryError MemoryError
    RecursionError ArithmeticError ZeroDivisionError OverflowError FloatingPointError AssertionError ConnectionError
    TimeoutError Timeout""".split()  # noqa: SIM905
)
"""Errors that do not show a missing file, a missing package, a wrong argument or an unset variable."""
_NAME_ERRORS = frozenset({"NameError", "UnboundLocalError"})
_LOOKUPS = frozenset({"KeyError", "IndexError", "LookupError"})
_CHANGES_NAMES = frozenset({"exec", "eval", "globals", "locals", "vars", "*"})
_PLAIN_BASES = frozenset({"object", "Module", "LightningModule", "LightningDataModule", "Dataset"})
"""Classes that set no attributes of the program's choice."""
_STEPS = 30_000  # statements that are followed
_DEEPEST = 50  # nested blocks and calls
_MANY = 20  # handlers of one block


class _TooLong(Exception):
    """The program has too many statements to follow."""


class _State(NamedTuple):
    """The variables that are `missing`, those of the failed code that are `bound`, and whether the work is done.

    A missing variable is unset, or it is None and marked as such; the results of calls can also be None.
    """

    missing: frozenset[str] = frozenset()
    bound: frozenset[str] = frozenset()
    worked: bool = False


_Exits: TypeAlias = "dict[str, _State]"
"""The ways in which a block ends: next, break, continue, return or none, which is a return of None."""


class _Facts(NamedTuple):
    """The variables that a statement sets, those with which it fails if they are missing, the names that it calls, and
    the calls that certainly run. Of a compound statement, only the first line counts, except that an `if` `works` if a
    part of it does.
    """

    binds: frozenset[str]
    fatal: frozenset[str]
    words: frozenset[str]
    calls: tuple[ast.Call, ...]
    works: bool


class Survival:
    """The failures that a program survives.

    `tried` are the parts of statements that may fail; `fallbacks` are the blocks with such statements, each with the
    code that runs instead, by the id of the `try`.
    """

    def __init__(self, tree: ast.Module, survey: Survey) -> None:
        self.tried: set[int] = set()
        self.fallbacks: dict[int, tuple[_Block, list[_Block]]] = {}
        self._survey, self._body, self._left = survey, tree.body, _STEPS
        self._known: dict[int, _Facts] = {}
        self._normal: dict[int, tuple[bool, set[int]]] = {}
        self._owner: Scope = None
        self._failed: _Catcher | None = None
        self._instead: _Block = ()
        kinds = ast.Try | ast.TryStar | ast.With | ast.AsyncWith
        found = [(n, scope) for n, scope in survey.nodes if isinstance(n, kinds) and any(catches(n))]
        if found:
            self._read_functions()
        for node, scope in found:
            self._judge(node, scope)

    def _read_functions(self) -> None:
        """Find the functions that can be followed, the variables that each sets, and those that do the work."""
        words = {name for n, _ in self._survey.nodes for name in (getattr(n, "id", ""), getattr(n, "name", ""))}
        self._opaque = not _CHANGES_NAMES.isdisjoint(words)
        shared = (n.names for n, _ in self._survey.nodes if isinstance(n, ast.Global | ast.Nonlocal))
        self._shared = {*dir(builtins), *(name for names in shared for name in names)}
        self._locals: dict[int, set[str]] = {}
        self._valued = {id(s) for n, s in self._survey.nodes if isinstance(n, ast.Return) and not is_none(n.value)}
        lazy = {id(scope) for n, scope in self._survey.nodes if isinstance(n, ast.Yield | ast.YieldFrom)}
        functions = [n for n, _ in self._survey.nodes if isinstance(n, FUNCTIONS) and id(n) not in lazy]
        counts = Counter(n.name for n in functions)
        self._functions = {self._title(n): n for n in functions if counts[n.name] == 1 or n.name == "__init__"}
        callers: dict[str, set[str]] = {}
        for node, scope in self._survey.nodes:
            self._locals.setdefault(id(scope), set()).update([getattr(node, "arg", None) or "", *bound_by(node)])
            if isinstance(node, ast.Call):
                callers.setdefault(last_name(node.func), set()).add(self._title(scope))
        pending = [*(callers.keys() & _TRAINS or {name for name in callers if _SAVES.match(name)})]
        self._working = {*pending}
        while pending:
            more = callers.get(pending.pop(), set()) - self._working - {""}
            self._working |= more
            pending += more

    def _title(self, scope: Scope) -> str:
        """Return the name with which the function of a scope is called."""
        if not isinstance(scope, FUNCTIONS):
            return ""
        owner = self._survey.parents.get(id(scope))
        return owner.name if isinstance(owner, ast.ClassDef) and scope.name == "__init__" else scope.name

    # ---------------------------------------------------------------------------------------------- the failures

    def _judge(self, node: _Catcher, scope: Scope) -> None:
        """Record the statements of a block whose failure the program survives; a later one leaves fewer names unset."""
        block = [*flattened(node.body)]
        looks_up = any(isinstance(part, ast.Subscript) for s in node.body for part in ast.walk(s))
        unrelated = _UNRELATED | _NAME_ERRORS | (frozenset() if looks_up else _LOOKUPS)
        calls = (part.func for s in node.body for part in ast.walk(s) if isinstance(part, ast.Call))
        if all(last_name(func).endswith(("Config", "Arguments")) for func in calls):
            unrelated |= {"RuntimeError"}  # a wrong argument is another error
        handlers, first = [body for names, body in catches(node) if not names <= unrelated], 0
        if len(handlers) <= _MANY:
            unset = self._unset(node, scope, block)
            handlers = [body for body in handlers if self._survives(node, scope, body, unset[-1])]
            first = bisect_left(
                unset[:-1], True, key=lambda names: any(self._survives(node, scope, body, names) for body in handlers)
            )
        if handlers:
            self.fallbacks[id(node)] = node.body, handlers
            self.tried.update(id(part) for statement in block[first:] for part in ast.walk(statement))

    def _unset(self, node: _Catcher, scope: Scope, block: _Block) -> list[frozenset[str]]:
        """Return, for each statement of a block, the variables that only it and later ones set."""
        sets = [{name for part in parts_of(s) for name in bound_by(part)} for s in block]
        others = {name for s in getattr(node, "orelse", ()) for part in ast.walk(s) for name in bound_by(part)}
        names = {name for name in others.union(*sets) if self._only_in(node, name, scope)}
        found = []
        for statement, own in zip(block, sets, strict=True):
            compound = hasattr(statement, "body") and not isinstance(statement, ast.With | ast.AsyncWith)
            found.append(frozenset(names - own if compound else names))  # a part of it may have set the names
            names -= own
        return found

    def _only_in(self, node: _Catcher, name: str, scope: Scope) -> bool:
        """Return true if no code before or outside a function sets a variable, or an attribute of `self`, unnoticed."""
        if self._opaque or name in self._shared or isinstance(scope, ast.ClassDef):
            return False
        owner, field = self._survey.parents.get(id(scope)), name.removeprefix("self.")
        if name == field or not isinstance(owner, ast.ClassDef):
            return name == field
        others = (
            v for v, _ in self._survey.stores.get(field, ()) if not node.lineno <= v.lineno <= (node.end_lineno or 0)
        )
        if not {last_name(base) for base in owner.bases} <= _PLAIN_BASES or field in self._locals.get(id(owner), ()):
            return False
        return all(any(getattr(p, "attr", "") == field for p in ast.walk(value)) for value in others)

    def _survives(self, node: _Catcher, scope: Scope, instead: _Block, unset: frozenset[str]) -> bool:
        """Return true if the program may end with its work done. A function that it does not call is run alone."""
        try:
            for root in dict.fromkeys((None, scope)):
                if id(root) not in self._normal:
                    self._visited = set[int]()
                    self._normal[id(root)] = any(self._ends(root)), self._visited
                worked, visited = self._normal[id(root)]
                if id(node) in visited:
                    self._owner = self._survey.parents.get(id(scope))
                    ends = self._ends(root, (node, instead, unset))
                    return any(ends) or (bool(ends) and not worked)
        except _TooLong:
            pass
        return True

    def _ends(self, root: Scope, failure: tuple[_Catcher, _Block, frozenset[str]] | None = None) -> list[bool]:
        """Return, for each way in which the program or a function can end, whether its work is done."""
        self._failed, self._instead, self._unset_names = failure or (None, (), frozenset[str]())
        self._exited, self._active, self._depth = list[bool](), {id(root)}, 0
        body = root.body if isinstance(root, FUNCTIONS) else self._body
        exits = self._run(body, _State(bound=frozenset(parameters(root))))
        return self._exited + [state.worked for state in exits.values()]

    # ------------------------------------------------------------------------------------------------ statements

    def _run(self, block: _Block, start: _State) -> _Exits:
        """Return how a block ends that starts in a state."""
        exits: _Exits = {"next": start}
        self._depth += 1
        for statement in block:
            self._left -= 1
            if self._left < 0 or self._depth > _DEEPEST:
                raise _TooLong
            if "next" not in exits:
                break
            exits = _merged(self._step(statement, exits.pop("next")), exits)
        self._depth -= 1
        return exits

    def _then(self, exits: _Exits, block: _Block) -> _Exits:
        """Return how a block ends that runs after another one."""
        return _merged(self._run(block, exits.pop("next")), exits) if "next" in exits else exits

    def _step(self, node: ast.stmt, state: _State) -> _Exits:
        """Return how a statement ends."""
        self._visited.add(id(node))
        if node is self._failed:
            missing = state.missing | (self._unset_names - state.bound)
            exits = self._run(self._instead, state._replace(missing=missing))
            return self._then(exits, getattr(node, "finalbody", ()))
        after = self._evaluated(node, state)
        return self._controlled(node, after) if after else {}

    def _controlled(self, node: ast.stmt, state: _State) -> _Exits:
        """Return how a statement ends after its first line was evaluated."""
        match node:
            case ast.If():
                taken = self._survey.branches.get(id(node))
                blocks = [node.body, node.orelse] if taken is None else [node.body if taken else node.orelse]
                if taken is None and self._known[id(node)].works:
                    state = state._replace(worked=True)  # the work may not be asked for
                return _merged(*(self._run(block, state) for block in blocks))
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._looped(node, state)
            case ast.With() | ast.AsyncWith():
                return _merged(self._run(node.body, state), {"next": state} if any(catches(node)) else {})
            case ast.Try() | ast.TryStar():
                exits = self._then(self._run(node.body, state), node.orelse)
                others = (self._run(body, state) for names, body in catches(node) if not names <= _UNRELATED)
                return self._then(_merged(exits, *others), node.finalbody)
            case ast.Match():
                return _merged({"next": state}, *(self._run(case.body, state) for case in node.cases))
            case ast.Return(value=value):
                return {"none" if is_none(value) or none_mark(value) in state.missing else "return": state}
            case ast.Break() | ast.Continue():
                return {type(node).__name__.lower(): state}
        if leaves(node):
            self._exited += [state.worked] if self._succeeds(node) else []
            return {}
        return {"next": state}

    def _looped(self, node: ast.For | ast.AsyncFor | ast.While, state: _State) -> _Exits:
        """Return how a loop ends, after one round; only a loop over a range is certainly not empty."""
        exits = self._run(node.body, state) if self._survey.branches.get(id(node)) is not False else {}
        broken, around = exits.pop("break", None), [exits.pop(how) for how in ("next", "continue") if how in exits]
        match node:
            case ast.While(test=ast.Constant(value=value)) if value:
                around = []
            case ast.For(iter=ast.Call(func=ast.Name(id="range")) | ast.List() | ast.Tuple()):
                pass
            case _:
                around.append(state)
        ended = self._then(_merged(*({"next": each} for each in around)), node.orelse)
        return _merged(exits, ended, {"next": broken} if broken else {})

    def _succeeds(self, node: ast.stmt) -> bool:
        """Return true if a statement that ends the program may end it with success: `sys.exit(main())`."""
        call = getattr(node, "value", None) or getattr(node, "exc", None)
        if not isinstance(call, ast.Call) or (isinstance(node, ast.Raise) and last_name(call.func) != "SystemExit"):
            return False
        match call.args:
            case [ast.Constant(value=value)]:
                return value in (0, None)
            case [ast.Call(func=func)]:
                return last_name(func) in self._functions
        return all(isinstance(code, ast.Name) for code in call.args)

    # ----------------------------------------------------------------------------------------------- expressions

    def _evaluated(self, node: ast.stmt, state: _State | None) -> _State | None:
        """Return the state after the first line of a statement; None if it certainly fails."""
        binds, fatal, words, calls, _ = self._known.get(id(node)) or self._known.setdefault(id(node), self._facts(node))
        entered = [entry for call in calls for entry in self._entries(call)]
        hooks = [self._functions[name] for name in _HOOKS if words & _TRAINS and name in self._functions]
        entered += [(function, None, True) for function in hooks]
        for function, call, certain in entered:
            state = state and self._entered(function, call, state, certain=certain)
        if state is None or state.missing & fatal:
            return None
        value = getattr(node, "value", None)
        nones = {NONE + name for name in binds if none_mark(value) in state.missing and not is_field(name)}
        own = {self._title(function) for function, *_ in entered}
        return _State(
            frozenset({name for name in state.missing if name.removeprefix(NONE) not in binds} | nones),
            state.bound | (binds & self._unset_names),
            state.worked or not self._working.isdisjoint(words - own),
        )

    def _entries(self, call: ast.Call) -> Iterator[tuple[Function, ast.Call | None, bool]]:
        """Yield the functions of the program that a call runs, and whether it certainly runs them as they are."""
        function = self._functions.get(last_name(call.func))
        if function is not None and isinstance(call.func, ast.Name) is not self._is_method(function):
            known = isinstance(call.func, ast.Name) or variable(call.func) != ""
            if known or last_name(getattr(call.func, "value", call)) not in self._survey.aliases:
                yield function, call, known and not function.decorator_list
        for value in (*call.args, *(k.value for k in call.keywords)):
            if isinstance(value, ast.Name) and value.id in self._working and value.id in self._functions:
                yield self._functions[value.id], None, False

    def _is_method(self, function: Function) -> bool:
        return function.name != "__init__" and isinstance(self._survey.parents.get(id(function)), ast.ClassDef)

    def _entered(self, function: Function, call: ast.Call | None, state: _State, *, certain: bool) -> _State | None:
        """Return the state after a function of the program was run; None if it does not return."""
        if id(function) in self._active:
            return state
        names, own = parameters(function), self._locals.get(id(function), set())
        given = [*zip(names[names[:1] == ["self"] :], call.args, strict=False)] if call else []
        given += [(k.arg, k.value) for k in call.keywords if k.arg] if call else []
        same = self._owner is not None and self._survey.parents.get(id(function)) is self._owner
        missing = {
            name for name in state.missing if name.removeprefix(NONE) not in own and (same or not is_field(name))
        }
        missing |= {NONE + name for name, value in given if none_mark(value) in state.missing}
        self._active.add(id(function))
        bound = frozenset({*names, *filter(is_field, state.bound)})
        exits = self._run(function.body, _State(frozenset(missing), bound, state.worked))
        self._active.discard(id(function))
        empty = certain and call is not None and id(function) in self._valued and exits.keys() <= {"next", "none"}
        ended = _merged(*({"": each} for each in exits.values()), {} if certain else {"": state}).get("")
        if ended is None:
            return None
        missing = {name for name in state.missing if not (same and is_field(name))}
        missing |= {*filter(is_field, ended.missing), *([none_mark(call)] if empty else [])}
        return _State(frozenset(missing), state.bound | {*filter(is_field, ended.bound)}, ended.worked)

    def _facts(self, node: ast.stmt) -> _Facts:
        header, parts = [*parts_of(node, header=True)], [*certain_parts(node)]
        reads = {variable(p) for p in parts if not isinstance(getattr(p, "ctx", None), ast.Store)}
        reads |= {variable(node.target)} if isinstance(node, ast.AugAssign) else set()
        return _Facts(
            frozenset(name for part in header for name in bound_by(part)),
            frozenset(reads | {none_mark(value) for part in (node, *parts) for value in self._needed(part)}) - {""},
            frozenset(last_name(part.func) for part in header if isinstance(part, ast.Call)),
            tuple(part for part in reversed(parts) if isinstance(part, ast.Call)),  # arguments come first
            isinstance(node, ast.If) and any(last_name(getattr(p, "func", p)) in self._working for p in ast.walk(node)),
        )

    def _needed(self, node: ast.AST) -> Iterator[ast.AST | None]:
        """Yield the expressions in a node that must not be None."""
        match node:
            case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Starred(value=value):
                yield value
            case ast.For(iter=value) | ast.AsyncFor(iter=value) | ast.comprehension(iter=value):
                yield value
            case ast.Call(func=func, args=args, keywords=keywords) if last_name(func) not in self._functions:
                if last_name(func) == "fit" or last_name(func).endswith("Trainer"):
                    yield from (*args[:1], *(k.value for k in keywords if k.arg in {"model", "train_dataset"}))


def _merged(*several: _Exits) -> _Exits:
    """Return the exits of code that may run in several ways; a variable is missing if it is missing in all of them."""
    found: _Exits = {}
    for exits in several:
        for how, new in exits.items():
            old = found.get(how, new)
            found[how] = _State(old.missing & new.missing, old.bound | new.bound, old.worked or new.worked)
    return found
