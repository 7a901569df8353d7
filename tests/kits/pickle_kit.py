"""Handwritten pickles: every way in which a file can make its reader call a function, and a child that loads them."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


def zip_file(path: Path, data: bytes, extra: dict[str, bytes] | None = None) -> Path:
    """Write a torch archive that contains a pickle."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        for name, content in {"data.pkl": data, "byteorder": b"little", "version": b"3\n", **(extra or {})}.items():
            out.writestr(f"archive/{name}", content)
    return path


def legacy_file(path: Path, data: bytes) -> Path:
    """Write a pickle in torch's older file format."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    head = b"".join(pickle.dumps(v, 2) for v in (MAGIC, PROTOCOL, system))
    path.write_bytes(head + data + pickle.dumps([], 2))
    return path


def text(value: str) -> bytes:
    """Encode a string with BINUNICODE."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def name(module: str, own: str) -> bytes:
    """Encode a name with GLOBAL."""
    return f"c{module}\n{own}\n".encode()


def stacked(module: str, own: str) -> bytes:
    """Encode a name with STACK_GLOBAL."""
    return text(module) + text(own) + b"\x93"


def group(args: tuple[str, ...]) -> bytes:
    """Encode a tuple of strings."""
    return b"(" + b"".join(map(text, args)) + b"t"


Route = Callable[[bytes, tuple[str, ...]], bytes]
"""(opcodes that push a function, its arguments) -> opcodes that make the reader call it."""

_ORDERED = name("collections", "OrderedDict") + b")R"
_V2 = name("torch._tensor", "_rebuild_from_type_v2")

ROUTES: dict[str, Route] = {
    "reduce": lambda f, a: f + group(a) + b"R",
    "reduce_then_pop": lambda f, a: f + group(a) + b"R0}",
    "reduce_in_a_list": lambda f, a: b"](" + f + group(a) + b"Re",
    "reduce_as_a_key": lambda f, a: b"}" + f + group(a) + b"RNs",
    "reduce_through_the_memo": lambda f, a: b"Nq\x000" + f + b"q\x000" + b"h\x00" + group(a) + b"R",
    "reduce_after_dup": lambda f, a: f + b"20" + group(a) + b"R",
    "reduce_of_memoized_arguments": lambda f, a: group(a) + b"q\x050" + f + b"h\x05R",
    "obj": lambda f, a: b"(" + f + b"".join(map(text, a)) + b"o",
    "newobj": lambda f, a: f + group(a) + b"\x81",
    "newobj_ex": lambda f, a: f + group(a) + b"}\x92",
    "special_method_on_a_dict": lambda f, a: _ORDERED + b"}" + text("__setstate__") + f + b"sb" + text(a[0]) + b"b",
    "special_method_in_a_slot": lambda f, a: (
        _ORDERED + b"N}" + text("__setstate__") + f + b"s\x86b" + text(a[0]) + b"b"
    ),
    "special_method_on_a_namespace": lambda f, a: (
        name("types", "SimpleNamespace") + b")R}" + text("__setstate__") + f + b"sb" + text(a[0]) + b"b"
    ),
    "own_extend_of_a_namespace": lambda f, a: (
        name("types", "SimpleNamespace") + b")R}" + text("extend") + f + b"sb(" + b"".join(map(text, a)) + b"e"
    ),
    "own_append_of_an_object": lambda f, a: (
        name("argparse", "Namespace") + b")\x81}" + text("append") + f + b"sb" + text(a[0]) + b"a"
    ),
    "own_keys_of_an_object": lambda f, a: (
        name("builtins", "dict") + name("argparse", "Namespace") + b")\x81}" + text("keys") + f + b"sb\x85R"
    ),
    "own_beginning_of_a_location": lambda f, a: (
        b"(" + text("storage") + name("torch", "FloatStorage") + text("0")
        + name("argparse", "Namespace") + b")\x81}" + text("startswith") + f + b"sbK\x00tQ"
    ),
    "state_of_the_function": lambda f, a: f + b"}" + text("__defaults__") + text(a[0]) + b"sb",
    "function_of_a_rebuild": lambda f, a: _V2 + b"(" + f + name("torch", "Tensor") + group(a) + b"}tR",
    "missing_key": lambda f, a: name("collections", "defaultdict") + f + b"\x85R",
    "partial": lambda f, a: name("functools", "partial") + f + b"\x85R(" + f + group(a) + b"}Ntb)R",
    "map": lambda f, a: name("builtins", "list") + name("builtins", "map") + f + b"]" + text(a[0]) + b"a\x86R\x85R",
    "old_object": lambda f, a: name("copyreg", "_reconstructor") + b"(" + f + name("builtins", "object") + b"NtR",
    "getattr": lambda f, a: name("builtins", "getattr") + f + text("__call__") + b"\x86R" + group(a) + b"R",
    "reference": lambda f, a: f + group(a) + b"RQ",
    "set_item": lambda f, a: f + group(a) + b"R" + text("k") + text("v") + b"s",
    "add_items": lambda f, a: f + group(a) + b"R(" + text("v") + b"\x90",
}  # fmt: skip

# Ways to spell a name in opcodes.
SPELLINGS: dict[str, Callable[[str, str], bytes]] = {
    "global": name,
    "stack_global": stacked,
    "stack_global_of_short_text": lambda m, n: (
        b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (m, n)) + b"\x93"
    ),
    "stack_global_of_old_text": lambda m, n: f"S'{m}'\nS'{n}'\n".encode() + b"\x93",
    "stack_global_of_escapes": lambda m, n: (
        b"S'" + "".join(f"\\x{ord(c):02x}" for c in m).encode() + b"'\n" + f"V{n}\n".encode() + b"\x93"
    ),
    "stack_global_of_memo": lambda m, n: text(m) + b"q\x070" + text(n) + b"q\x080h\x07h\x08\x93",
    "stack_global_of_overwritten_memo": lambda m, n: (
        text("collections") + b"q\x070" + text("OrderedDict") + b"q\x080"
        + text(m) + b"q\x070" + text(n) + b"q\x080h\x07h\x08\x93"
    ),
}  # fmt: skip


def programs(
    module: str, own: str, args: tuple[str, ...], spellings: tuple[str, ...] = ()
) -> Iterator[tuple[str, bytes]]:
    """Yield programs that call a function by every route, with every spelling or with `spellings`.

    INST spells and calls in one opcode.
    """
    for spelled in spellings or SPELLINGS:
        spell = SPELLINGS[spelled]
        for way, route in ROUTES.items():
            for protocol in (2, 4) if spelled == "global" else (4,):
                yield f"{way}/{spelled}/{protocol}", bytes([0x80, protocol]) + route(spell(module, own), args) + b"."
    inst = b"(" + b"".join(map(text, args)) + f"i{module}\n{own}\n".encode() + b"."
    yield "inst/0", inst
    yield "inst/4", b"\x80\x04" + inst


_CHILD = '''
import json, pickle, sys, types, warnings
warnings.filterwarnings("ignore")
import argparse, collections, datetime, decimal, fractions, pathlib, uuid
import numpy, torch
import torch.utils.data.dataset, torch.distributed.checkpoint.metadata, torch.distributed.fsdp.api
for optional in sys.argv[1:]:
    __import__(optional)

events, calls, watching = [], [], [False]
QUIET = {"pickle.find_class", "builtins.id", "open", "import", "object.__getattr__", "array.__new__", "sys._getframe",
         "os.listdir", "os.scandir", "marshal.loads", "code.__new__", "object.__setattr__"}
def imports(event, args):
    """A module of a library that is run because it is imported for the first time."""
    place = args[0].co_filename if event == "exec" else args[1] if event == "compile" else ""
    return isinstance(place, str) and place.startswith(sys.prefix) or str(place).startswith(sys.base_prefix)
def hook(event, args):
    if watching[0] and event not in QUIET and not imports(event, args):
        events.append(event)
    if watching[0] and event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        events.append(f"open {args[1]}")
sys.addaudithook(hook)

def full(func):
    return f"{getattr(func, '__module__', None) or type(func).__module__}.{getattr(func, '__qualname__', type(func))}"

class Recorder(pickle._Unpickler):
    """The interpreter's own reader in Python, with each call noted before it is made."""
    dispatch = dict(pickle._Unpickler.dispatch)
    def load_reduce(self):
        calls.append(["call", full(self.stack[-2])])
        pickle._Unpickler.load_reduce(self)
    def load_newobj(self):
        calls.append(["new", full(self.stack[-2])])
        pickle._Unpickler.load_newobj(self)
    def load_newobj_ex(self):
        calls.append(["new", full(self.stack[-3])])
        pickle._Unpickler.load_newobj_ex(self)
    def load_build(self):
        setter = getattr(self.stack[-2], "__setstate__", None)
        calls.append(["state", full(type(self.stack[-2])), full(setter) if setter else ""])
        pickle._Unpickler.load_build(self)
    def _instantiate(self, klass, args):
        calls.append(["call", full(klass)])
        pickle._Unpickler._instantiate(self, klass, args)
    def load_append(self):
        calls.append(["fill", full(type(self.stack[-2]))])
        pickle._Unpickler.load_append(self)
    def load_appends(self):
        calls.append(["fill", full(type(self.metastack[-1][-1]))])
        pickle._Unpickler.load_appends(self)
    def load_setitem(self):
        calls.append(["fill", full(type(self.stack[-3]))])
        pickle._Unpickler.load_setitem(self)
    def load_setitems(self):
        calls.append(["fill", full(type(self.metastack[-1][-1]))])
        pickle._Unpickler.load_setitems(self)
    def load_additems(self):
        calls.append(["fill", full(type(self.metastack[-1][-1]))])
        pickle._Unpickler.load_additems(self)
    for code, method in ((pickle.ADDITEMS, load_additems), (pickle.REDUCE, load_reduce),
                         (pickle.NEWOBJ, load_newobj), (pickle.BUILD, load_build),
                         (pickle.NEWOBJ_EX, load_newobj_ex), (pickle.APPEND, load_append),
                         (pickle.APPENDS, load_appends), (pickle.SETITEM, load_setitem),
                         (pickle.SETITEMS, load_setitems)):
        dispatch[code[0]] = method

slow = types.ModuleType("slow")
slow.__dict__.update({k: v for k, v in vars(pickle).items() if not k.startswith("__")})
slow.Unpickler = Recorder

def load(path, module):
    """Load one of torch's files, or every pickle of a plain one."""
    if not path.endswith(".pkl"):
        return torch.load(path, weights_only=False, pickle_module=module)
    with open(path, "rb") as file:
        while file.peek(1):
            module.load(file)

sys.dont_write_bytecode = True  # a module that is imported late would otherwise be written, and that counts as an event
for line in sys.stdin:
    events.clear(); calls.clear()
    answer = {}
    for which, module in (("error", pickle), ("slow_error", slow)):
        try:
            watching[0] = True
            load(line.rstrip("\\n"), module)
        except BaseException as why:
            answer[which] = f"{type(why).__name__}: {why}"[:300]
        finally:
            watching[0] = False
    print(json.dumps({**answer, "events": sorted(set(events)), "calls": calls}), flush=True)
'''


class Loader:
    """A child that loads files with `torch.load(weights_only=False)`, or with `pickle` if the name ends in `.pkl`.

    It reports the audit events and every call.
    """

    def __init__(self, *modules: str) -> None:
        argv = [sys.executable, "-c", _CHILD, *modules]
        self.child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def load(self, path: Path) -> dict[str, Any]:
        """Load one file."""
        assert self.child.stdin and self.child.stdout
        self.child.stdin.write(f"{path}\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        assert line, "the child died"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the child."""
        assert self.child.stdin and self.child.stdout
        self.child.stdin.close()
        self.child.wait()
        self.child.stdout.close()
