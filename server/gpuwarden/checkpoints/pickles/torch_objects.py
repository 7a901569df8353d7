"""What torch's pickles mean: tensors over storages, and names that are torch's own or are not.

The list of names is an allow-list: what torch's safe loader accepts, and numpy's plain arrays, which random number
states are made of. Everything else is reported. The list of code runners only decides how loudly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Tuple  # noqa: UP035

from gpuwarden.checkpoints.file_model import (
    DTYPES,
    Anatomy,
    Broken,
    Doubtful,
    Tensor,
    short,
    some,
)
from gpuwarden.checkpoints.pickles.symbolic import Call, Global, Persistent, Tree

_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64", "ComplexDoubleStorage": "C128",
    "UntypedStorage": "U8", "QInt8Storage": "I8", "QUInt8Storage": "U8", "QInt32Storage": "I32",
}  # fmt: skip
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64", "complex128": "C128",
}  # fmt: skip
_REBUILD = {"_rebuild_tensor": 4, "_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}
_WRAP = {"_rebuild_parameter", "_rebuild_parameter_with_state"}
_OTHER = {
    "_rebuild_qtensor", "_rebuild_sparse_tensor", "_rebuild_meta_tensor_no_storage", "_rebuild_nested_tensor",
    "_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_wrapper_subclass",
}  # fmt: skip
_SAFE = {
    "collections": {"OrderedDict", "Counter", "defaultdict"},
    "builtins": {"set", "frozenset", "complex", "bytearray", "slice", "range", "dict", "list", "int", "float", "str"},
    "__builtin__": {"set", "complex", "bytearray", "dict", "list", "int", "float", "long"},
    "_codecs": {"encode"},
    "torch": {*_STORAGES, *_DTYPES, "Size", "device", "Tensor", "per_tensor_affine", "per_channel_affine", "strided"},
    "torch.storage": {"TypedStorage", "UntypedStorage", "_TypedStorage", "_UntypedStorage"},
    "torch.nn.parameter": {"Parameter", "Buffer"},
    "torch.serialization": {"_get_layout"},
    "torch._tensor": {"_rebuild_from_type_v2"},
    "torch._utils": {*_REBUILD, *_WRAP, *_OTHER},
}
_NUMPY = {"dtype", "ndarray", "_reconstruct", "scalar", "_frombuffer"}
_NOTORIOUS = """
IPython _codecs _ctypes _io _operator _pickle _thread __builtin__ antigravity ast asyncio atexit bdb builtins bz2
cPickle cProfile cffi cloudpickle code codecs codeop commands compileall contextlib copy_reg copyreg ctypes dill
dis distutils doctest ensurepip fileinput ftplib functools gc genericpath getpass glob gzip http idlelib imp
importlib inspect io itertools jax.experimental joblib lib2to3 linecache logging lzma marshal multiprocessing
nt ntpath nturl2path numpy.f2py numpy.testing operator os pathlib pdb pickle pip pkgutil platform popen2 posix
posixpath profile pty py_compile readline requests rlcompleter runpy setuptools shutil signal site smtplib socket
socketserver sqlite3 ssl subprocess sys tarfile telnetlib tempfile threading timeit tkinter torch._dynamo
torch._inductor torch.hub torch.jit torch.load torch.serialization torch.utils trace turtle types unittest urllib
urllib2 uuid venv weakref webbrowser xmlrpc zipfile zipimport
"""
_RUNNERS = frozenset(_NOTORIOUS.split())
# Files that hold a library's objects by design; they are read, but nothing here would ever unpickle them.
_INERT = ("training_args.bin", "_model_states.pt", "_optim_states.pt")
# Classes of plain fields whose names begin in lower case.
_RECORDS = {("deepspeed.utils.tensor_fragment", "fragment_address")}
_LIBRARIES = frozenset({"transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "__main__"})

_WITH_ATTRIBUTES = Global("torch._tensor", "_rebuild_from_type_v2")
_DEPTH = 100
_NODES = (dict, list, tuple, Call)
_Step = Tuple[Any, Any, Any, int]  # noqa: UP006  (Python 3.8)  # where it hangs, its key there, the value, its depth


@dataclass(frozen=True)
class Ref:
    """A tensor of the pickle: its storage's key, and its place there in elements."""

    key: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int


def known(name: Global) -> bool:
    """Whether torch's safe loader, or our own reading, understands this name without any code of the file's."""
    if name.module.partition(".")[0] == "numpy":
        plain = name.module.replace("numpy._core", "numpy.core")
        return (plain in ("numpy", "numpy.core.multiarray", "numpy.core.numeric") and name.name in _NUMPY) or (
            plain == "numpy.dtypes" and name.name.endswith("DType")
        )
    return name.name in _SAFE.get(name.module, ())


def runs_code(name: Global) -> bool:
    """Whether a name is notorious: modules and builtins through which pickles run code."""
    parts = name.module.split(".")
    return any(".".join(parts[: i + 1]) in _RUNNERS for i in range(len(parts))) and not known(name)


def fill(
    found: Anatomy,
    tree: Tree,
    stored: Mapping[str, tuple[int, int]],
    name: str,
) -> None:
    """Add to `found` the tensors of `tree`, whose storages lie at `stored`: key -> (offset, bytes)."""
    strangers = [n for n in {**tree.named, **tree.called} if not known(n)]
    evil = [n for n in strangers if runs_code(n)]
    if evil:
        found.problems.append(f"would run code when unpickled: it names {some(evil)}")
    inert = name.endswith(_INERT) and not evil and bool(strangers) and all(_plain_class(n) for n in strangers)
    if inert:
        found.meta["inert"] = True
        found.unproved.append(
            f"that it unpickles: it holds objects of {some(sorted({n.module for n in strangers}))}; not run"
        )
    elif strangers and not evil:
        found.doubts.append(f"needs code to be unpickled, so it was not: it names {some(strangers)}")
    found.doubts += [f"its pickle {o}" for o in tree.odd if not inert]
    found.meta["globals"] = sorted(str(n) for n in tree.named)
    storages = _storages(tree, stored)
    found.tensors = _tensors(tree, stored)
    found.content = tree.root
    found.proved.append(f"{len(found.tensors):,} tensors in {len(storages):,} storages; read without running anything")
    unused = [k for k in stored if k not in storages]
    if unused:
        found.doubts.append(f"holds storages that no tensor uses: {some(unused)}")


def _plain_class(name: Global) -> bool:
    """A class of the training libraries or of the script itself, as training arguments hold them."""
    root = name.module.partition(".")[0]
    if root == "torch":
        return name in (Global("torch.distributed", "ProcessGroup"), Global("torch._C", "device"))
    return (root in _LIBRARIES and name.name[:1].isupper()) or (name.module, name.name) in _RECORDS


def _storages(tree: Tree, stored: Mapping[str, tuple[int, int]]) -> set[str]:
    """Keys of the storages that the pickle names; each must be there in full size."""
    seen: set[str] = set()
    for p in tree.persistent:
        key, dtype, numel = storage(p)
        if key in seen:
            continue
        seen.add(key)
        if key not in stored:
            raise Broken(f"storage {short(key, 40)} is missing")
        need = numel * DTYPES[dtype].bits // 8
        if need != stored[key][1]:
            raise Broken(f"storage {short(key, 40)} has {stored[key][1]:,} bytes; {need:,} are needed")
    return seen


def storage(p: Persistent) -> tuple[str, str, int]:
    """(key, dtype, number of elements) of a storage reference. Raises Broken for any other."""
    pid = p.pid
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage" or not isinstance(pid[1], Global):
        raise Broken("its pickle refers to something that is no storage")
    dtype = _STORAGES.get(pid[1].name)
    if dtype is None or not isinstance(pid[2], str) or type(pid[4]) is not int or pid[4] < 0:
        raise Broken(f"its pickle refers to a storage of the unknown kind {pid[1]}")
    return pid[2], dtype, pid[4]


# ------------------------------------------------------------------------------------------------------- tensors


def _tensors(tree: Tree, stored: Mapping[str, tuple[int, int]]) -> list[Tensor]:
    made = []
    for name, ref in walk(tree.root):
        made.append(_place(name, ref, stored))
    return made


def _place(name: str, ref: Ref, stored: Mapping[str, tuple[int, int]]) -> Tensor:
    start, size = stored[ref.key]
    each = DTYPES[ref.dtype].bits // 8
    reach = 0 if 0 in ref.shape else 1 + sum((n - 1) * s for n, s in zip(ref.shape, ref.stride))  # noqa: B905
    if (ref.offset + reach) * each > size and reach:
        raise Broken(f"tensor {short(name, 60)} reaches beyond its storage")
    dense = ref.stride == _row_major(ref.shape) or reach <= 1
    return Tensor(name, ref.dtype, ref.shape, start + ref.offset * each, reach * each, None if dense else ref.stride)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def tensor(value: Any) -> Ref | None:
    """The tensor that a call stands for; None for any other value. Raises Broken where its arguments make no sense."""
    if not isinstance(value, Call) or not isinstance(value.func, Global):
        return None
    if value.func == _WITH_ATTRIBUTES:
        return _inner(value.args)
    if value.func.module != "torch._utils":
        return None
    name, args = value.func.name, value.args
    if name in _WRAP:
        return tensor(args[0]) if isinstance(args, tuple) and args else None
    if name not in _REBUILD:
        return None
    if not isinstance(args, tuple) or len(args) < _REBUILD[name] or not isinstance(args[0], Persistent):
        raise Broken(f"its pickle calls {name} with arguments that make no tensor")
    key, dtype, numel = storage(args[0])
    if name == "_rebuild_tensor_v3":
        stated = args[6]
        found = _DTYPES.get(stated.name) if isinstance(stated, Global) and stated.module == "torch" else None
        if found is None:
            raise Doubtful(f"has a tensor of the unknown dtype {short(stated, 40)}")
        dtype = found
    offset, shape, stride = args[1], sizes(args[2]), sizes(args[3])
    if type(offset) is not int or offset < 0 or shape is None or stride is None or len(shape) != len(stride):
        raise Broken("its pickle has a tensor whose shape, stride or offset makes no sense")
    return Ref(key, dtype, offset, shape, stride, numel)


def _inner(args: Any) -> Ref | None:
    """The plain tensor in one that carries attributes or is of a subclass: function, class, arguments, state."""
    inside = isinstance(args, tuple) and len(args) >= 3 and isinstance(args[0], Global)
    return tensor(Call(args[0], args[2])) if inside and args[0].module == "torch._utils" else None


def sizes(value: Any) -> tuple[int, ...] | None:
    """The numbers of a torch.Size, a tuple or a list; None for what is no shape."""
    if isinstance(value, Call) and value.func == Global("torch", "Size"):
        value = value.args[0] if isinstance(value.args, tuple) and value.args else ()
    good = isinstance(value, (tuple, list)) and len(value) <= 64
    return tuple(value) if good and all(type(v) is int and 0 <= v < 1 << 60 for v in value) else None


def walk(root: Any) -> Iterator[tuple[str, Ref]]:
    """Every tensor below `root` with the path that leads to it, without recursion; a shared container counts once."""
    stack: list[_Step] = [(None, "", root, 0)]
    seen: set[int] = set()
    while stack:
        step = stack.pop()
        _, _, value, depth = step
        ref = tensor(value)
        if ref is not None:
            yield _path(step), ref
        elif isinstance(value, _NODES) and id(value) not in seen:
            seen.add(id(value))
            if depth > _DEPTH:
                raise Doubtful(f"its pickle nests values deeper than {_DEPTH} levels")
            children = reversed(_children(value))
            stack += [(step, k, v, depth + 1) for k, v in children if v and isinstance(v, _NODES)]


def _path(step: _Step) -> str:
    """Names are put together only for tensors, and bounded: a hostile file could make them eat the memory."""
    keys: list[str] = []
    at: Any = step
    while at is not None and at[0] is not None:
        keys.append(short(at[1], 200))
        at = at[0]
    return short(".".join(reversed(keys)), 500)


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, Call):
        return [("args", value.args), ("state", value.state), ("items", value.items), ("parts", value.parts)]
    return list(enumerate(value))
