"""Interpret a pickle's opcodes symbolically: nothing is imported, called or changed.

`pickle` builds objects by calling the functions that the file names. This module represents a call by a `Call` node and
a class by a `Global` node, and stores an object's state in its node instead of setting it. All opcodes in all protocols
are supported, so that every call in a hostile file can be reported, although torch itself uses only a few opcodes.
Standard library only.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import Any

from gpuwarden.checkpoints.file_model import Broken, Doubtful, Limits
from gpuwarden.checkpoints.pickles import allow_list
from gpuwarden.checkpoints.pickles.nodes import Call, Global, Persistent, Tree
from gpuwarden.core.evidence import Cause

# The opcodes that torch.save writes with protocol 2 and that torch's safe loader accepts.
TORCH_OPS = frozenset(b"c\x81Rbaesu(t\x85\x86\x87N\x89\x88)]}\x8fQJKMGhjqrXU\x8a\x80.")
# In addition, the opcodes that Python 3 writes with protocols 0 to 5, except those for classes in protocol 0.
PYTHON_OPS = TORCH_OPS | frozenset(b"BCVFILSTdglp01\x8b\x8c\x8d\x8e\x90\x91\x92\x93\x94\x95\x96")


class _Mark:
    """Marks the start of a group of values on the stack."""


_MARK = _Mark()
_ORDERED = Global("collections", "OrderedDict")
_KEYS = (str, int, float, bytes, bool, type(None), Global)
_TOO_DEEP = 1_000
_ODDITIES = 50
_LONG = 1_000


class Machine:
    """Interpret one pickle. `start` is the pickle's offset in `data`, and `tree.end` is the offset of its end.

    Calls and changes are checked immediately, because later opcodes could change their arguments.
    """

    def __init__(self, data: bytes, limits: Limits, start: int = 0, names: allow_list.Names = allow_list.PLAIN) -> None:
        self.names = names
        self.data = data
        self.at = start
        self.limits = limits
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.tree = Tree()

    def run(self) -> Tree:
        """Interpret the pickle up to its STOP opcode. Raises Broken if it is invalid, Doubtful if it is too large."""
        data, steps = self.data, 0
        ops = _OPS
        while True:
            if self.at >= len(data):
                raise Broken("its pickle is truncated: it has no STOP opcode")
            op = data[self.at]
            self.at += 1
            if op == 0x2E:  # STOP
                break
            steps += 1
            if steps > self.limits.opcodes:
                raise Doubtful(
                    f"its pickle has more than {self.limits.opcodes:,} opcodes; the rest was not read", Cause.LIMIT
                )
            if op not in TORCH_OPS:
                self.tree.opcodes[op] = None
            move = ops.get(op)
            if move is None:
                raise Broken(f"its pickle has the unknown opcode 0x{op:02x} at byte {self.at - 1:,}")
            try:
                move(self)
            except (IndexError, struct.error, UnicodeDecodeError, OverflowError) as why:
                raise Broken(f"its pickle is invalid near byte {self.at:,}: {type(why).__name__}") from why
        if len(self.stack) != 1:
            raise Broken(f"its pickle leaves {len(self.stack):,} values on its stack instead of one")
        self.tree.root, self.tree.end = self.stack[0], self.at
        return self.tree

    # ------------------------------------------------------------------------------------------- reading

    def take(self, n: int) -> bytes:
        """Return the next `n` bytes."""
        if n < 0 or self.at + n > len(self.data):
            raise Broken(f"its pickle needs {n:,} bytes at byte {self.at:,}, but has only {len(self.data):,} bytes")
        out = self.data[self.at : self.at + n]
        self.at += n
        return out

    def number(self, form: str) -> int:
        """Return an integer that is encoded in a `struct` format."""
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def line(self) -> bytes:
        """Return the bytes up to the end of the line."""
        end = self.data.find(b"\n", self.at, self.at + 4096)
        if end < 0:
            raise Broken("its pickle has an unterminated line")
        return self.take(end + 1 - self.at)[:-1]

    def pop(self) -> Any:
        """Pop the top value. A mark at the top makes the pickle invalid."""
        if self.marks and self.marks[-1] == len(self.stack):
            raise IndexError
        return self.stack.pop()

    def group(self) -> list[Any]:
        """Pop the values above the last mark, and the mark."""
        start = self.marks.pop()
        out = self.stack[start:]
        del self.stack[start:]
        return out

    def top(self) -> Any:
        """Return the top value without popping it."""
        if self.marks and self.marks[-1] == len(self.stack):
            raise IndexError
        return self.stack[-1]

    # ------------------------------------------------------------------------------------------- meaning

    def name(self, module: str, name: str) -> None:
        """Push a node for a global, and record its name."""
        if len(module) + len(name) > _LONG:
            raise Doubtful("its pickle has a name that is too long")
        made = Global(module, name)
        self.tree.named[made] = None
        if len(self.tree.named) > self.limits.names:
            raise Doubtful(f"its pickle imports more than {self.limits.names:,} names", Cause.LIMIT)
        self.stack.append(made)

    def call(self, func: Any, args: Any, *, new: bool = False) -> None:
        """Push a node for a call, without making the call."""
        if func == _ORDERED and args == ():
            self.stack.append({})
            return
        made = Call(func, args, new=new)
        self.note(self.names.call(made))
        self.stack.append(made)

    def note(self, odd: str) -> None:
        """Record a call or change that is not known to be harmless, up to a maximum number."""
        if odd and len(self.tree.odd) < _ODDITIES:
            self.tree.odd[odd] = None

    def set(self, pairs: list[Any]) -> None:
        """Set items in a dict, or in a node that represents one."""
        if len(pairs) % 2:
            raise IndexError
        target = self.top()
        table = target if isinstance(target, dict) else target.items if isinstance(target, Call) else None
        if isinstance(target, Call):
            self.note(self.names.filled(target, sequence=False))
        if table is None:
            raise Broken("its pickle sets items of a value that can't have items")
        for i in range(0, len(pairs), 2):
            key = pairs[i]
            # Hashing a deeply nested tuple would exhaust the C stack. A call is hashed by its identity.
            flat = isinstance(key, tuple) and len(key) <= 16 and all(map(_simple, key))
            if not (flat or _simple(key) or isinstance(key, Call)):
                raise Doubtful("its pickle has a dict with a key that is not a simple value")
            table[key] = pairs[i + 1]

    def extend(self, values: list[Any]) -> None:
        """Append elements to a list, or to a node that represents one."""
        target = self.top()
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Call):
            self.note(self.names.filled(target, sequence=True))
            target.parts.extend(values)
        else:
            raise Broken("its pickle appends to a value that is not a list")

    def build(self) -> None:
        """Store the state of an object in its node, without setting it."""
        state = self.pop()
        target = self.top()
        self.note(self.names.state(target, state))
        if isinstance(target, Call):
            target.state = state
        elif isinstance(target, Global):
            self.note(f"would change {target} itself")
        elif not isinstance(target, dict):  # a dict's state, such as the _metadata of an OrderedDict, is ignored
            raise Broken("its pickle sets the state of a value that can't have one")

    def proto(self) -> None:
        """Interpret PROTO: the pickle's protocol."""
        version = self.number("B")
        if version > 5:
            raise Broken(f"specifies the unknown pickle protocol {version}")

    def frame(self) -> None:
        """Interpret FRAME: the length of the next frame."""
        if self.number("<Q") > len(self.data) - self.at:
            raise Broken("its pickle specifies a frame that is longer than the pickle")

    def string(self) -> None:
        """Interpret STRING: a quoted string in protocol 0, with escape sequences."""
        raw = self.line()
        if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in b"'\"":
            raise Broken("its pickle has a string without quotes")
        self.stack.append(codecs.escape_decode(raw[1:-1])[0].decode("latin-1"))  # as the pickle module does

    def integer(self) -> None:
        """Interpret INT: a decimal number, or a boolean, which protocol 0 writes as 00 or 01."""
        raw = self.line()
        self.stack.append(raw == b"01" if raw in (b"00", b"01") else _decimal(raw))

    def real(self) -> None:
        """Interpret FLOAT: a number as text."""
        try:
            self.stack.append(float(self.line()))
        except ValueError as why:
            raise Broken("its pickle has an invalid number") from why

    def drop(self) -> None:
        """Interpret POP: remove the top value or mark."""
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def table(self) -> None:
        """Interpret DICT: a dict from the keys and values in the group."""
        pairs = self.group()
        self.stack.append({})
        self.set(pairs)

    def setitem(self) -> None:
        """Interpret SETITEM: set one item in a dict."""
        value, key = self.pop(), self.pop()
        self.set([key, value])

    def append(self) -> None:
        """Interpret APPEND: append one element to a list."""
        value = self.pop()
        self.extend([value])

    def reduce(self) -> None:
        """Interpret REDUCE: a call to the function on the stack with the arguments on the stack."""
        args, func = self.pop(), self.pop()
        self.call(func, args)

    def newobj(self) -> None:
        """Interpret NEWOBJ: an instance that `__new__` creates."""
        args, func = self.pop(), self.pop()
        self.call(func, args, new=True)

    def newobj_ex(self) -> None:
        """Interpret NEWOBJ_EX: an instance that `__new__` creates with keyword arguments."""
        kwargs, args, func = self.pop(), self.pop(), self.pop()
        self.call(func, (args, kwargs) if kwargs else args, new=True)

    def inst(self) -> None:
        """Interpret INST: a call to a named class, with the values in the group as arguments."""
        module, name = _text(self.line()), _text(self.line())
        args = tuple(self.group())
        self.name(module, name)
        self.call(self.pop(), args)

    def obj(self) -> None:
        """Interpret OBJ: a call to the class at the start of the group, with the other values as arguments."""
        func, *args = self.group()
        self.call(func, tuple(args))

    def stack_global(self) -> None:
        """Interpret STACK_GLOBAL: a global whose module and name are on the stack."""
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise Broken("its pickle has a global whose name is not a string")
        self.name(module, name)

    def pick(self, key: int) -> None:
        """Push a value from the memo."""
        if key not in self.memo:
            raise Broken(f"its pickle reads memo entry {key:,}, which was never written")
        self.stack.append(self.memo[key])

    def reference(self, pid: Any) -> None:
        """Push a reference for a persistent id."""
        made = Persistent(pid)
        self.tree.persistent.append(made)
        self.stack.append(made)

    def mark(self) -> None:
        """Interpret MARK: the beginning of a group."""
        if len(self.marks) >= _TOO_DEEP:
            raise Doubtful(f"its pickle has groups nested deeper than {_TOO_DEEP:,} levels")
        self.marks.append(len(self.stack))

    def extension(self) -> None:
        """Interpret EXT: a name from an extension registry, which exists only in the unpickling program."""
        raise Doubtful(
            "its pickle refers to a function by a number in an extension registry, so the function is unknown"
        )

    def buffer(self) -> None:
        """Interpret NEXT_BUFFER: bytes that are stored outside the pickle."""
        raise Doubtful("its pickle needs bytes that are stored outside the pickle")


def _simple(value: Any) -> bool:
    """Return true for a safe dict key. Large integers could have many hash collisions, which is slow."""
    return isinstance(value, _KEYS) and not (isinstance(value, int) and not -(1 << 60) < value < 1 << 60)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _decimal(raw: bytes) -> int:
    text = raw.rstrip(b"L")
    if len(text) > 1000:
        raise Doubtful("its pickle has a number that is too large")
    try:
        return int(text)
    except ValueError as why:
        raise Broken("its pickle has an invalid number") from why


def _long(m: Machine, length: int) -> None:
    if length > 4096:
        raise Doubtful("its pickle has a number that is too large")
    m.stack.append(int.from_bytes(m.take(length), "little", signed=True))


def _push(value: Callable[[], Any]) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(value())


def _tuple(n: int) -> Callable[[Machine], None]:
    def move(m: Machine) -> None:
        if len(m.stack) - (m.marks[-1] if m.marks else 0) < n:
            raise IndexError
        m.stack[len(m.stack) - n :] = [tuple(m.stack[len(m.stack) - n :])]

    return move


def _put(form: str) -> Callable[[Machine], None]:
    def move(m: Machine) -> None:
        m.memo[m.number(form)] = m.top()

    return move


_OPS: dict[int, Callable[[Machine], Any]] = {
    ord("("): Machine.mark,
    ord("0"): Machine.drop,
    ord("1"): Machine.group,
    ord("2"): lambda m: m.stack.append(m.top()),
    ord("F"): Machine.real,
    ord("I"): Machine.integer,
    ord("J"): lambda m: m.stack.append(m.number("<i")),
    ord("K"): lambda m: m.stack.append(m.number("B")),
    ord("L"): lambda m: m.stack.append(_decimal(m.line())),
    ord("M"): lambda m: m.stack.append(m.number("<H")),
    ord("N"): _push(lambda: None),
    ord("P"): lambda m: m.reference(_text(m.line())),
    ord("Q"): lambda m: m.reference(m.pop()),
    ord("R"): Machine.reduce,
    ord("S"): Machine.string,
    ord("T"): lambda m: m.stack.append(m.take(m.number("<i")).decode("latin-1")),
    ord("U"): lambda m: m.stack.append(m.take(m.number("B")).decode("latin-1")),
    ord("V"): lambda m: m.stack.append(m.line().decode("raw_unicode_escape")),
    ord("X"): lambda m: m.stack.append(_text(m.take(m.number("<I")))),
    ord("a"): Machine.append,
    ord("b"): Machine.build,
    ord("c"): lambda m: m.name(_text(m.line()), _text(m.line())),
    ord("d"): Machine.table,
    ord("}"): _push(dict),
    ord("e"): lambda m: m.extend(m.group()),
    ord("g"): lambda m: m.pick(_decimal(m.line())),
    ord("h"): lambda m: m.pick(m.number("B")),
    ord("i"): Machine.inst,
    ord("j"): lambda m: m.pick(m.number("<I")),
    ord("l"): lambda m: m.stack.append(m.group()),
    ord("]"): _push(list),
    ord("o"): Machine.obj,
    ord("p"): lambda m: m.memo.__setitem__(_decimal(m.line()), m.top()),
    ord("q"): _put("B"),
    ord("r"): _put("<I"),
    ord("s"): Machine.setitem,
    ord("t"): lambda m: m.stack.append(tuple(m.group())),
    ord(")"): _push(tuple),
    ord("u"): lambda m: m.set(m.group()),
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    ord("B"): lambda m: m.stack.append(m.take(m.number("<I"))),
    ord("C"): lambda m: m.stack.append(m.take(m.number("B"))),
    0x80: Machine.proto,
    0x81: Machine.newobj,
    0x82: Machine.extension,
    0x83: Machine.extension,
    0x84: Machine.extension,
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    0x88: _push(lambda: True),
    0x89: _push(lambda: False),
    0x8A: lambda m: _long(m, m.number("B")),
    0x8B: lambda m: _long(m, m.number("<i")),
    0x8C: lambda m: m.stack.append(_text(m.take(m.number("B")))),
    0x8D: lambda m: m.stack.append(_text(m.take(m.number("<Q")))),
    0x8E: lambda m: m.stack.append(m.take(m.number("<Q"))),
    0x8F: lambda m: m.stack.append(Call(Global("builtins", "set"), ())),
    0x90: lambda m: m.extend(m.group()),
    0x91: lambda m: m.stack.append(Call(Global("builtins", "frozenset"), tuple(m.group()))),
    0x92: Machine.newobj_ex,
    0x93: Machine.stack_global,
    0x94: lambda m: m.memo.__setitem__(len(m.memo), m.top()),
    0x95: Machine.frame,
    0x96: lambda m: m.stack.append(m.take(m.number("<Q"))),
    0x97: Machine.buffer,
    0x98: lambda m: None,
}
