"""Walk a Python program once: find the parts that can run, and the names that they import, bind, declare and change.

A survey uses conditions that have already been evaluated, and evaluates nothing itself. It walks the tree with a list
instead of recursion, so that deep nesting can't overflow the stack.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from gpuwarden.static_analysis.declared_options import Option, added_option, field_option

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"
Scope: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | None"
_MUTATORS = frozenset({"append", "extend", "insert", "update", "setdefault", "pop", "remove", "clear", "sort"})
_FIRST = frozenset({"is_main_process", "is_local_main_process", "is_world_process_zero", "is_global_zero"})
_EXISTS = frozenset({"exists", "isdir", "isfile", "is_dir", "is_file"})
_WORK = re.compile(r"(run_|start_|do_)?(train|training|fit|fine_?tune|backward)(_model|(_one)?_epoch|_loop)?")
_UNRELATED = frozenset(
    """KeyboardInterrupt SystemExit GeneratorExit StopIteration StopAsyncIteration OutOfMemoryError MemoryError
    RecursionError ArithmeticError ZeroDivisionError OverflowError FloatingPointError AssertionError ConnectionError
    TimeoutError Timeout NameError UnboundLocalError
    TimeoutExpired JSONDecodeError""".split()  # noqa: SIM905
)
"""Errors that do not indicate a missing file, a missing package or a wrong argument."""
_LEAVES = frozenset({"sys.exit", "exit", "quit", "os._exit", "parser.error"})
_INDIRECT = frozenset({"exec", "eval", "globals", "locals", "vars", "getattr", "Fire", "__main__", "modules"})
"""Names that a program may use to call a function indirectly."""


class Survey:
    """The parts of a program that can run, with their scopes and the facts about them.

    `branches` maps the node ids of conditions to their known truth values. `optional` contains the parts that may fail
    or be skipped without harm, and `maybe` those under an unknown condition. `assigned` contains the values of names by
    scope, with None for a value that is not an expression; `stores` contains the values of attributes, and `mutated`
    the names of objects that are changed. `written` contains the environment variables that the program sets (`*`: any
    variable). `rewrites` lists the lines that change `sys.argv`, with their scopes; if `drops` is true, arguments may
    be lost. `tried` contains the parts of a `try` whose failure does not stop the program; `unusual` contains these,
    and the parts in `maybe` that may not run even on a new machine with a GPU. `executes` is true if the program runs
    text as code, which may change any name.
    """

    def __init__(self, tree: ast.Module, branches: Mapping[int, bool]) -> None:
        self._branches = branches
        self.nodes: list[tuple[ast.AST, Scope]] = []
        self.optional: set[int] = set()
        self.maybe: set[int] = set()
        self.tried: set[int] = set()
        self.unusual: set[int] = set()
        self.aliases: dict[str, str] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.parents: dict[int, Scope] = {}
        self.assigned: dict[tuple[int, str], list[ast.expr | None]] = {}
        self._outer: dict[int, dict[str, Scope]] = {}
        self.options: dict[str, list[Option]] = {}
        self.stores: dict[str, list[tuple[ast.expr, Scope]]] = {}
        self.mutated: set[str] = set()
        self.written: set[str] = set()
        self.rewrites: list[tuple[int, Scope]] = []
        self.drops = False
        self.by_name: dict[str, list[ast.Call]] = {}
        self.functions: dict[str, Function] = {}
        self.around: dict[int, Scope] = {}
        self.executes = False
        stack: list[tuple[ast.AST, Scope, bool, bool, bool, bool]] = [(tree, None, False, False, False, False)]
        while stack:
            node, scope, guarded, maybe, tried, unusual = stack.pop()
            self.nodes.append((node, scope))
            if guarded:
                self.optional.add(id(node))
            if maybe:
                self.maybe.add(id(node))
            if tried:
                self.tried.add(id(node))
            if tried or unusual:
                self.unusual.add(id(node))
            inner = scope
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                self.parents[id(node)] = scope
                inner = node
            self._note(node, scope)
            soft = guarded_parts(node)
            open_ = self._open(node)
            usual = {id(n) for n in node.body} if isinstance(node, ast.If) and _new_machine(node.test) else set[int]()
            rare, survived = open_ - usual, _survived_parts(node)
            stack += [
                (
                    n,
                    inner,
                    guarded or id(n) in soft,
                    maybe or id(n) in open_,
                    tried or id(n) in survived,
                    unusual or id(n) in rare,
                )
                for n in reversed([*self._running(node)])
            ]

    def _running(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield a node's children that can run."""
        taken = self._branches.get(id(node))
        for name, value in ast.iter_fields(node):
            if taken is not None and name == ("orelse" if taken else "body"):
                continue
            if isinstance(value, ast.AST):
                yield value
            elif isinstance(value, list):
                for item in value:
                    if isinstance(item, ast.AST):
                        yield item
                        if isinstance(item, ast.stmt) and self._ends(item):
                            break

    def _ends(self, node: ast.stmt) -> bool:
        """Return true if the statements after this one in its block never run."""
        while isinstance(node, ast.If) and (taken := self._branches.get(id(node))) is not None:
            block = node.body if taken else node.orelse
            if not block:
                return False
            node = block[-1]
        return _leaves(node) or isinstance(node, ast.Return | ast.Break | ast.Continue)

    def _open(self, node: ast.AST) -> set[int]:
        """Return a node's children that run only if an unknown condition is true."""
        match node:
            case ast.If() | ast.IfExp() if id(node) not in self._branches:
                blocks = [node.orelse] if first_process(node.test) else [node.body, node.orelse]
                return {id(n) for b in blocks for n in (b if isinstance(b, list) else [b])}
            case ast.BoolOp():
                return {id(n) for n in node.values[1:]}
            case ast.Try() | ast.TryStar():
                return {id(n) for n in node.handlers}
            case ast.Match():
                return {id(n) for n in node.cases}
        return set()

    def _note(self, node: ast.AST, scope: Scope) -> None:
        """Record the names that a node imports, binds, declares or changes."""
        self._note_argv(node, scope)
        match node:
            case ast.Import():
                for alias in node.names:
                    root = alias.name.partition(".")[0]  # `import a.b` binds `a`
                    self.aliases[alias.asname or root] = alias.name if alias.asname else root
            case ast.ImportFrom() if node.module and not node.level:
                self.aliases.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.functions[node.name] = node
            case ast.ClassDef():
                self.classes[node.name] = node
            case ast.Call():
                self.around[id(node)] = scope
                self._note_call(node)
            case _:
                self._note_binding(node, scope)

    def _note_binding(self, node: ast.AST, scope: Scope) -> None:
        """Record the names, attributes and items that a node assigns."""
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._assign(target, node.value, scope)
            case ast.AnnAssign() if node.value is None and isinstance(scope, ast.ClassDef):
                self._assign(node.target, None, scope)
            case ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
                self._assign(node.target, node.value, scope)
            case ast.AugAssign() | ast.For() | ast.AsyncFor() | ast.comprehension():
                self._assign(node.target, None, scope)
            case ast.withitem() if node.optional_vars is not None:
                self._assign(node.optional_vars, None, scope)
            case ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar() if node.name:
                self._bind(node.name, None, scope)
            case ast.Global():
                self._outer.setdefault(id(scope), {}).update(dict.fromkeys(node.names))
            case ast.Nonlocal():
                outer = self.parents.get(id(scope))
                self._outer.setdefault(id(scope), {}).update(dict.fromkeys(node.names, outer))
            case ast.Delete():
                for target in node.targets:
                    self._assign(target, None, scope)

    def _assign(self, target: ast.AST, value: ast.expr | None, scope: Scope) -> None:
        match target:
            case ast.Name():
                self._bind(target.id, value, scope)
                if isinstance(scope, ast.ClassDef):
                    self.options.setdefault(target.id, []).append(field_option(value))
            case ast.Tuple() | ast.List():
                same_length = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
                starred = any(isinstance(e, ast.Starred) for e in target.elts)
                for n, inner in enumerate(target.elts):
                    paired = isinstance(value, ast.Tuple | ast.List) and same_length and not starred
                    self._assign(inner, value.elts[n] if paired else None, scope)  # type: ignore[union-attr]
            case ast.Starred():
                self._assign(target.value, None, scope)
            case ast.Attribute():
                self.stores.setdefault(target.attr, []).append((value or target, scope))
            case ast.Subscript():
                if isinstance(target.value, ast.Name):
                    self.mutated.add(target.value.id)
                elif self.dotted(target.value) == "os.environ":
                    key = target.slice
                    self.written.add(str(key.value) if isinstance(key, ast.Constant) else "*")

    def _note_argv(self, node: ast.AST, scope: Scope) -> None:
        """Record a change to the program's arguments, and whether it may drop some of them."""
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                adds = False
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                targets, adds = [target], isinstance(node, ast.AugAssign) and isinstance(target, ast.Attribute)
            case ast.Call(func=ast.Attribute(value=target, attr=name)) if name in _MUTATORS:
                targets, adds = [target], name in {"append", "extend"}
            case _:
                return
        if any(self._is_argv(each) for target in targets for each in getattr(target, "elts", [target])):
            self.rewrites.append((node.lineno, scope))
            self.drops |= not adds

    def _is_argv(self, node: ast.expr) -> bool:
        """Return true if a node is the program's arguments; `sys.argv[0]` is the program's name."""
        match node:
            case ast.Subscript(slice=ast.Constant(value=0)):
                return False
            case ast.Subscript(value=value):
                return self.dotted(value) == "sys.argv"
        return self.dotted(node) == "sys.argv"

    def _bind(self, name: str, value: ast.expr | None, scope: Scope) -> None:
        """Record a value that is assigned to a name. The value is None if it is not an expression."""
        home = self._outer.get(id(scope), {}).get(name, scope)
        self.assigned.setdefault((id(home) if home else 0, name), []).append(value)

    def _note_call(self, node: ast.Call) -> None:
        """Record a call by name, an option declared by `add_argument`, or an object changed by a method."""
        if isinstance(node.func, ast.Name):
            self.by_name.setdefault(node.func.id, []).append(node)
            self.executes |= node.func.id == "exec"
        elif isinstance(node.func, ast.Attribute):
            base = node.func.value
            if node.func.attr == "add_argument":
                name, option = added_option(node)
                self.options.setdefault(name, []).append(option)
            elif isinstance(base, ast.Name) and node.func.attr in _MUTATORS:
                self.mutated.add(base.id)
            elif self.dotted(base) == "os.environ" and node.func.attr in _MUTATORS:
                self.written.add("*")
            elif isinstance(base, ast.Call) and self.dotted(base.func) == "globals":
                self.executes = True
        if self.dotted(node.func).endswith("load_dotenv"):
            self.written.add("*")

    def dotted(self, node: ast.AST) -> str:
        """Return the dotted name of an expression with imports resolved, or `.method` for a method of a variable.

        The name is empty for any other expression.
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        rest = "".join("." + p for p in reversed(parts))
        if isinstance(node, ast.Name):
            found = self.aliases.get(node.id)
            if found is not None:
                return found + rest
            return rest or node.id
        return rest


def idle_lines(tree: ast.Module) -> frozenset[int]:
    """Return the lines of unused functions: no code refers to them, except other unused functions.

    Decorated functions and methods are omitted, because a decorator or a class may register them.
    """
    words: dict[int, set[str]] = {}
    for part in tree.body:
        own = words[id(part)] = set[str]()
        for node in ast.walk(part):
            match node:
                case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Constant(value=str(word)):
                    own.add(word)
    named = Counter(word for each in words.values() for word in each)
    if named.keys() & _INDIRECT:
        return frozenset()
    parts = (part for part in tree.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
    functions = {part.name: part for part in parts if not part.decorator_list}
    found: dict[int, Function] = {}
    left = [*functions.values()]
    while left:
        one = left.pop()
        own = words[id(one)]
        if id(one) not in found and named[one.name] <= (one.name in own):
            found[id(one)] = one
            named.subtract(own)
            left += [functions[word] for word in own if word in functions]
    return frozenset(n for one in found.values() for n in range(one.lineno, (one.end_lineno or one.lineno) + 1))


def first_process(test: ast.expr) -> bool:
    """Return true if a condition such as `accelerator.is_main_process` holds in a job's first process."""
    match test:
        case ast.Attribute(attr=name) | ast.Call(func=ast.Attribute(attr=name)):
            return name in _FIRST
        case ast.Compare(left=ast.Name(id=name) | ast.Attribute(attr=name), ops=[ast.Eq()], comparators=[right]):
            return name.lower().endswith("rank") and isinstance(right, ast.Constant) and right.value == 0
    return False


def _new_machine(test: ast.expr) -> bool:
    """Return true if a condition such as `not os.path.exists("build")` holds on a new machine with a GPU."""
    match test:
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="cuda"), attr="is_available")):
            return True
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call(func=ast.Attribute(attr=name)) as call) if name in _EXISTS:
            paths = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            return not any(path.startswith(("/", "~")) for path in paths)
    return False


def catches(node: ast.AST) -> Iterator[tuple[set[str], Sequence[ast.stmt]]]:
    """Yield the names of the errors that a `try` or `contextlib.suppress` catches, with the code that handles them."""
    match node:
        case ast.Try(handlers=handlers) | ast.TryStar(handlers=handlers):
            yield from ((_named([h.type]) if h.type else {"Exception"}, h.body) for h in handlers)
        case ast.With(items=items) | ast.AsyncWith(items=items):
            calls = (item.context_expr for item in items if isinstance(item.context_expr, ast.Call))
            yield from ((_named(call.args), ()) for call in calls if "suppress" in _named([call.func]))


def _named(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the last parts of the names in expressions."""
    parts = [part for node in nodes for part in ast.walk(node)]
    owners = {id(part.value) for part in parts if isinstance(part, ast.Attribute)}
    return {getattr(p, "id", "") or getattr(p, "attr", "") for p in parts if id(p) not in owners} - {""}


def _leaves(node: ast.stmt) -> bool:
    """Return true if a statement raises an error or ends the program."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
            return name in _LEAVES
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name))):
            return f"{module}.{name}" in _LEAVES
    return isinstance(node, ast.Raise)


def _survived_parts(node: ast.AST) -> set[int]:
    """Return the statements in a `try` whose failure does not stop the program; empty if one of them trains.

    A handler that returns does not stop the program. The code in functions that the block calls is not included.
    """
    handlers = (body for names, body in catches(node) if not names <= _UNRELATED)
    if not any(not body or not _leaves(body[-1]) for body in handlers):
        return set()
    block = getattr(node, "body", [])
    calls = (n.func for s in block for n in ast.walk(s) if isinstance(n, ast.Call))
    works = any(_WORK.fullmatch(getattr(f, "attr", "") or getattr(f, "id", "")) for f in calls)
    return set() if works else {id(statement) for statement in block}


def guarded_parts(node: ast.AST) -> set[int]:
    """Return a node's children that may fail or be skipped without harm: `try: import x`, `if TYPE_CHECKING:`."""
    if isinstance(node, ast.Try | ast.TryStar | ast.With | ast.AsyncWith):
        soft = any(names & {"ImportError", "ModuleNotFoundError", "Exception"} for names, _ in catches(node))
        return {id(n) for n in (*node.body, *getattr(node, "handlers", ()))} if soft else set()
    if isinstance(node, ast.If):
        test = node.test
        name = test.id if isinstance(test, ast.Name) else test.attr if isinstance(test, ast.Attribute) else ""
        return {id(n) for n in node.body} if name == "TYPE_CHECKING" else set()
    return set()
