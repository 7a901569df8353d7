"""Interpret torch's pickles: locate the tensors in their storages, and check the names and calls.

`allow_list` lists the harmless names, and `code_runners` the names that are known to run code. All other names are
recorded as doubts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpuwarden.checkpoints.file_model import (
    DTYPES,
    Anatomy,
    Broken,
    Doubtful,
    Limits,
    Tensor,
    short,
    some,
)
from gpuwarden.checkpoints.pickles import allow_list
from gpuwarden.checkpoints.pickles.allow_list import (
    REBUILD,
    STORAGES,
    TORCH_DTYPES,
    WRAP,
    Names,
)
from gpuwarden.checkpoints.pickles.code_runners import runs_code
from gpuwarden.checkpoints.pickles.nodes import Call, Global, Persistent, Tree
from gpuwarden.checkpoints.pickles.symbolic import PYTHON_OPS
from gpuwarden.core.evidence import Cause

_META = Global("torch._utils", "_rebuild_meta_tensor_no_storage")
_WITH_ATTRIBUTES = Global("torch._tensor", "_rebuild_from_type_v2")
# Storages in which a byte contains several elements.
_PACKED = frozenset({"QUInt4x2Storage", "QUInt2x4Storage"})
_DEPTH = 100
_NODES = (dict, list, tuple, Call)
_END = object()


@dataclass(frozen=True)
class Ref:
    """A tensor in a pickle: its storage's key, and its location in the storage, in elements."""

    key: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    # True for a quantized tensor, whose arguments contain further tensors: the scales and zero points.
    parts: bool = False


def fill(
    found: Anatomy,
    tree: Tree,
    stored: Mapping[str, tuple[int, int]],
    name: str,
    limits: Limits,
) -> None:
    """Add the tensors in `tree` to `found`. `stored` maps each storage key to its offset and size in bytes."""
    judge(found, tree, allow_list.of_file(name))
    strange = [op for op in tree.opcodes if op not in PYTHON_OPS]
    if strange:
        codes = some(f"0x{op:02x}" for op in strange)
        found.doubt(f"its pickle contains opcodes that neither torch nor Python writes: {codes}")
    elif tree.opcodes:
        found.meta["inert"] = True
        found.unproved.append("whether torch's safe loader accepts it, because that loader reads only protocol 2")
    found.meta["globals"] = sorted(str(n) for n in tree.named)
    used = set()
    for key, dtype, numel in storages(tree):
        if key in used:
            continue
        used.add(key)
        if key not in stored:
            raise Broken(f"storage {short(key, 40)} is missing")
        need = numel * DTYPES[dtype].bits // 8
        if need != stored[key][1]:
            size = stored[key][1]
            raise Broken(f"storage {short(key, 40)} has {size:,} bytes; {need:,} are needed", Cause.CONTRADICTION)
    for where, ref in walk(tree.root):
        if len(found.tensors) >= limits.tensors:
            raise Doubtful(f"lists more than {limits.tensors:,} tensors; the rest was not examined", Cause.LIMIT)
        found.tensors.append(_place(where, ref, stored))
    if _META in tree.named:  # for example in a model whose layers were offloaded or never loaded
        found.doubt("has tensors on torch's meta device, whose values were not saved", Cause.UNREAD)
    found.content = tree.root
    found.proved.append(f"{len(found.tensors):,} tensors in {len(used):,} storages were read without running code")
    unused = [k for k in stored if k not in used]
    if unused:
        found.doubts.append(f"has storages that no tensor uses: {some(unused)}")


def judge(found: Anatomy, tree: Tree, names: Names) -> None:
    """Check the names and calls in a pickle, and add the result to `found`.

    Only a name that is known to run code refutes the file. Any other name, call or change that is not known to be
    harmless is recorded as a doubt.
    """
    strangers = [n for n in tree.named if not names.allows(n)]
    evil = [n for n in strangers if runs_code(n)]
    if evil:
        found.refute(f"would run code when unpickled: it refers to {some(evil)}", Cause.RUNS_CODE)
    if len(strangers) > len(evil):
        others = [n for n in strangers if n not in evil]
        found.doubt(f"can't be unpickled without running code: it refers to {some(others)}", Cause.NEEDS_CODE)
    for odd in tree.odd:
        found.doubt(f"its pickle {odd}", Cause.NEEDS_CODE)
    extra = [n for n in tree.named if names.beyond_torch(n)]
    if extra:
        found.meta["inert"] = True
        found.unproved.append(
            f"whether it can be unpickled: it contains objects from {some(sorted({n.module for n in extra}))}"
        )


def storages(tree: Tree) -> list[tuple[str, str, int]]:
    """Return (key, dtype, number of elements) for each storage reference.

    The older format also has references to module classes and their source text; `judge` reports their names.
    """
    of_a_module = (p for p in tree.persistent if isinstance(p.pid, tuple) and len(p.pid) == 4)
    modules = {id(p) for p in of_a_module if isinstance(p.pid[0], str) and p.pid[0] == "module"}
    return [storage(p) for p in tree.persistent if id(p) not in modules]


def storage(p: Persistent) -> tuple[str, str, int]:
    """Return (key, dtype, number of elements) for a storage reference. Raises Broken for any other reference."""
    pid = p.pid
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage" or not isinstance(pid[1], Global):
        raise Broken("its pickle refers to something other than a storage", Cause.CONTRADICTION)
    dtype = STORAGES.get(pid[1].name)
    # torch calls startswith on the location, so it must be a string.
    texts = all(type(part) is str for part in pid[2:4])
    if not texts or type(pid[4]) is not int or pid[4] < 0:
        raise Broken("its pickle refers to a storage without a name, a location or a size", Cause.CONTRADICTION)
    if dtype is None:
        raise Doubtful(f"its pickle refers to a storage of the unknown type {pid[1]}")
    return pid[2], dtype, pid[4]


# ------------------------------------------------------------------------------------------------------- tensors


def _place(name: str, ref: Ref, stored: Mapping[str, tuple[int, int]]) -> Tensor:
    """Locate a tensor in the file. Raises Broken if it exceeds its storage."""
    start, size = stored[ref.key]
    each = DTYPES[ref.dtype].bits // 8
    reach = 0 if 0 in ref.shape else 1 + sum((n - 1) * s for n, s in zip(ref.shape, ref.stride))  # noqa: B905
    if (ref.offset + reach) * each > size and reach:
        raise Broken(f"tensor {short(name, 60)} exceeds its storage", Cause.CONTRADICTION)
    row_major: list[int] = []
    step = 1
    for n in reversed(ref.shape):
        row_major.insert(0, step)
        step *= max(n, 1)
    dense = ref.stride == tuple(row_major) or step <= 1 or not reach
    return Tensor(name, ref.dtype, ref.shape, start + ref.offset * each, reach * each, None if dense else ref.stride)


def tensor(value: Any) -> Ref | None:
    """Return the tensor that a call rebuilds; None for any other value. Raises Broken for invalid arguments."""
    if not isinstance(value, Call) or not isinstance(value.func, Global):
        return None
    if value.func == _WITH_ATTRIBUTES:
        # For a tensor subclass or a tensor with attributes, the arguments are: function, class, arguments, state.
        inside = isinstance(value.args, tuple) and len(value.args) >= 3 and isinstance(value.args[0], Global)
        plain = inside and value.args[0].module == "torch._utils"
        return tensor(Call(value.args[0], value.args[2])) if plain else None
    if value.func.module != "torch._utils":
        return None
    name, args = value.func.name, value.args
    if name in WRAP:
        return tensor(args[0]) if isinstance(args, tuple) and args else None
    if name not in REBUILD:
        return None
    if not isinstance(args, tuple) or len(args) < REBUILD[name]:
        raise Broken(f"its pickle calls {name} with too few arguments", Cause.CONTRADICTION)
    if not isinstance(args[0], Persistent):
        raise Doubtful(f"its pickle calls {name}, but the first argument is not a storage reference")
    key, dtype, numel = storage(args[0])
    if name == "_rebuild_tensor_v3":
        stated = args[6]
        found = TORCH_DTYPES.get(stated.name) if isinstance(stated, Global) and stated.module == "torch" else None
        if found is None:
            raise Doubtful(f"has a tensor of the unknown dtype {short(stated, 40)}")
        dtype = found
    offset, shape, stride = args[1], sizes(args[2]), sizes(args[3])
    if type(offset) is not int or offset < 0 or shape is None or stride is None or len(shape) != len(stride):
        raise Broken("its pickle has a tensor with an invalid shape, stride or offset", Cause.CONTRADICTION)
    quantized = name == "_rebuild_qtensor"
    if quantized and args[0].pid[1].name in _PACKED:
        offset, shape, stride = 0, (numel,), (1,)
    return Ref(key, dtype, offset, shape, stride, numel, quantized)


def sizes(value: Any) -> tuple[int, ...] | None:
    """Return the integers of a torch.Size, a tuple or a list; None for anything else."""
    if isinstance(value, Call) and value.func == Global("torch", "Size"):
        value = value.args[0] if isinstance(value.args, tuple) and value.args else ()
    good = isinstance(value, (tuple, list)) and len(value) <= 64
    return tuple(value) if good and all(type(v) is int and 0 <= v < 1 << 60 for v in value) else None


@dataclass
class _Frame:
    """A container on the current path: its remaining items, its key in its parent, and its path, once computed."""

    left: Iterator[tuple[Any, Any]]
    key: Any = ""
    path: str | None = None


def walk(root: Any) -> Iterator[tuple[str, Ref]]:
    """Yield every tensor below `root` with its path, without recursion. A shared container is visited once."""
    stack = [_Frame(iter([("", root)]), path="")]
    seen: set[int] = set()
    while stack:
        key, value = next(stack[-1].left, (None, _END))
        if value is _END:
            stack.pop()
            continue
        if not value or not isinstance(value, _NODES):
            continue
        ref = tensor(value)
        if ref is not None:
            yield _path(stack, key), ref
        if id(value) in seen or (ref is not None and not ref.parts):
            continue
        seen.add(id(value))
        if len(stack) > _DEPTH:
            raise Doubtful(f"its pickle has values nested deeper than {_DEPTH} levels", Cause.LIMIT)
        if isinstance(value, Call):
            value = {"args": value.args, "state": value.state, "items": value.items, "parts": value.parts}
        children = value.items() if isinstance(value, dict) else enumerate(value)
        stack.append(_Frame(iter(children), key))


def _path(stack: list[_Frame], key: Any) -> str:
    """Return a value's path. The path length is limited, because a hostile file could fill the memory with names.

    Each container's path is computed only once, even if the container has many tensors.
    """
    path = ""
    for frame in stack:
        if frame.path is None:
            frame.path = _joined(path, frame.key)
        path = frame.path
    return _joined(path, key)


def _joined(path: str, key: Any) -> str:
    return short(f"{path}.{short(key, 200)}" if path else short(key, 200), 500)
