"""Replay a traced step at the model's full depth through the allocator to find its peak memory.

A trace contains only a few layers (see `trace_child`). The layers in the middle all allocate the same tensors, so one
of them is repeated in place of the layers that are not in the trace. Three steps are replayed: the first creates the
optimizer's states, and the later ones run with the holes left by the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple, TypeAlias

from gpuwarden.core.models import Frozen
from gpuwarden.static_analysis.estimate.allocator import Block, CachingAllocator, CardFull

DEPTH: Final = 5
"""Number of layers in a trace: two at each end, which may differ, and one in the middle, which is repeated."""
_OUTSIDE: Final = -1
_STEPS: Final = 3
Name: TypeAlias = tuple[str, int, int]


class Segment(Frozen):
    """A part of a step in one layer, or outside all layers (-1).

    `events` lists the names and sizes of tensors; size 0 means that the tensor is freed.
    """

    part: str
    layer: int
    events: tuple[tuple[str, int, int, int], ...]


class Sizes(Frozen):
    """The size in bytes of each parameter, outside the layers and in each traced layer."""

    outside: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]

    def of(self, layers: int) -> list[int]:
        """Return the size in bytes of each parameter in a model with `layers` layers."""
        middle = len(self.layers) // 2
        repeated = (self.layers[middle],) * (layers - len(self.layers))
        inner = (*self.layers[:middle], *repeated, *self.layers[middle:])
        return [*self.outside, *(size for layer in inner for size in layer)]


class Trace(Frozen):
    """The child process's response: all parameters, the trained parameters, and the segments of one or two batches."""

    by: str
    weights: Sizes
    trained: Sizes
    steps: tuple[tuple[Segment, ...], ...]

    @property
    def depth(self) -> int:
        """Return the number of traced layers."""
        return len(self.weights.layers)

    @property
    def repeats(self) -> bool:
        """Return true if the inner layers allocate the same tensors, so that one layer can represent all of them."""
        for step in self.steps:
            taken: dict[str, set[tuple[int, ...]]] = {}
            for segment in step:
                if 0 < segment.layer < self.depth - 1 and segment.part != "between":
                    taken.setdefault(segment.part, set()).add(tuple(event[3] for event in segment.events))
            if not taken or any(len(found) > 1 for found in taken.values()):
                return False
        return True


class Peak(NamedTuple):
    """The peak sizes in bytes of PyTorch's tensors and of its allocator's segments, and whether the GPU was full."""

    allocated: int
    reserved: int
    full: bool


def deepened(step: Sequence[Segment], depth: int, layers: int) -> Iterator[tuple[Name, int]]:
    """Yield the tensor names and sizes of a step with `layers` layers, by repeating the middle layer's segments."""
    middle, more = depth // 2, layers - depth
    for layer, group in groupby(step, key=lambda segment: segment.layer):
        segments = list(group)
        events = [event for segment in segments for event in segment.events]
        if layer == middle:
            copies = range(more + 1)
            for copy in reversed(copies) if segments[0].part == "backward" else copies:
                for part, of, number, size in events:
                    yield (part, of if of == _OUTSIDE else of + copy, number), size
            continue
        for part, of, number, size in events:
            if of < middle:
                yield (part, of, number), size
            elif of > middle or layer > middle:
                yield (part, of + more, number), size
            else:  # if a tensor from the repeated layer is freed outside the layers, it is freed in all copies
                for copy in range(more + 1) if layer == _OUTSIDE else (0,):
                    yield (part, of + copy, number), size


def replay(trace: Trace, layers: int, limit: float, *, foreach: bool) -> Peak:
    """Return the peak memory of a training run with `layers` layers on a GPU with `limit` bytes.

    If `foreach` is true, AdamW works on lists of tensors and needs another copy of the gradients. A run that does not
    fit on the GPU is replayed without a limit.
    """
    batches = [list(deepened(step, trace.depth, layers)) for step in trace.steps]
    allocator, fits = CachingAllocator(limit), True
    try:
        _train(allocator, trace, layers, batches, foreach)
    except CardFull:
        allocator, fits = CachingAllocator(), False
        _train(allocator, trace, layers, batches, foreach)
    return Peak(allocator.most_allocated, allocator.most_reserved, allocator.emptied > 0 or not fits)


def _train(
    allocator: CachingAllocator,
    trace: Trace,
    layers: int,
    batches: Sequence[Sequence[tuple[Name, int]]],
    foreach: bool,
) -> None:
    """Allocate and free the memory of a few training steps."""
    for size in trace.weights.of(layers):
        allocator.take(size)
    trained = trace.trained.of(layers)
    for step in range(_STEPS):
        held: dict[Name, Block] = {}
        _run(allocator, batches[0], held)
        for _ in range(2 if len(batches) > 1 else 0):
            _run(allocator, batches[1], held)
        if step == 0:
            for size in trained:
                allocator.take(size)
                allocator.take(size)
        if foreach:
            for block in [allocator.take(size) for size in trained]:
                allocator.give(block)
        for block in held.values():  # the gradients
            allocator.give(block)


def _run(allocator: CachingAllocator, events: Sequence[tuple[Name, int]], held: dict[Name, Block]) -> None:
    for name, size in events:
        if size:
            held[name] = allocator.take(size)
        elif name in held:
            allocator.give(held.pop(name))
