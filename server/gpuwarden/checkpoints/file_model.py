"""Define a reader's findings about one file: its tensors, its checksummed spans, and any problems.

Uses only the standard library.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

from gpuwarden.core.evidence import Cause, Evidence


class Broken(Exception):
    """The file is definitely damaged or malicious.

    The message explains why. `cause` must be a cause whose `refutes` is true.
    """

    def __init__(self, why: str, cause: Cause = Cause.DAMAGE) -> None:
        super().__init__(why)
        self.cause = cause


class Doubtful(Exception):
    """It is unknown whether the file is intact; the message explains why. The file does not count as proven."""

    def __init__(self, why: str, cause: Cause = Cause.UNREAD) -> None:
        super().__init__(why)
        self.cause = cause


class Unread(Doubtful):
    """No reader supports the file's format. A matching recorded digest can still prove that a copy is intact."""


@dataclass(frozen=True)
class Limits:
    """Limits on the work that a malicious file can cause. Sizes are in bytes.

    They limit work, not time, so that a verdict does not depend on the machine.
    """

    header: int = 100 << 20  # the safetensors library has the same limit
    json: int = 64 << 20
    containers: int = 2_000_000  # lists and objects per JSON text; 2 bytes of text can need 60 bytes of memory
    pickle: int = 64 << 20
    opcodes: int = 4_000_000
    names: int = 20_000  # number of distinct names that one pickle imports
    tensors: int = 500_000
    members: int = 300_000
    files: int = 200_000
    depth: int = 32
    lines: int = 5_000_000  # number of lines parsed in a JSON Lines file
    unpacked: int = 1 << 30  # number of bytes decompressed from one file
    unpack_ratio: int = 20  # for large files, the limit is this multiple of the file's size instead of `unpacked`
    inflate_ratio: int = 1100  # the maximum compression ratio of deflate is 1032:1


_POSSIBLE = ("inflate_ratio", "depth")  # limits that no legitimate file exceeds
NO_LIMITS = Limits(**{f.name: 1 << 60 for f in fields(Limits) if f.name not in _POSSIBLE})
"""Limits for callers that trust the file and accept any run time."""


@dataclass(frozen=True)
class DType:
    """An element type: its number of bits, and the bit patterns that represent non-finite values.

    `top` is the smallest pattern with a clear sign bit that is Inf or NaN, or None for types without such patterns.
    `nan` is the NaN pattern of a type that has only one NaN pattern.
    """

    bits: int
    kind: str
    top: int | None = None
    nan: int | None = None


# The names are the ones that safetensors uses; readers of other formats translate their type names.
DTYPES: dict[str, DType] = {
    "F64": DType(64, "f", top=0x7FF0_0000_0000_0000),
    "F32": DType(32, "f", top=0x7F80_0000),
    "F16": DType(16, "f", top=0x7C00),
    "BF16": DType(16, "f", top=0x7F80),
    "F8_E5M2": DType(8, "f", top=0x7C),
    "F8_E4M3": DType(8, "f", top=0x7F),
    "F8_E4M3FNUZ": DType(8, "f", nan=0x80),
    "F8_E5M2FNUZ": DType(8, "f", nan=0x80),
    "F8_E8M0": DType(8, "f", nan=0xFF),
    "F6_E2M3": DType(6, "f"),
    "F6_E3M2": DType(6, "f"),
    "F4": DType(4, "f"),
    # A complex number is scanned as a pair of floats.
    "C32": DType(32, "c"),
    "C64": DType(64, "c"),
    "C128": DType(128, "c"),
    "I64": DType(64, "i"),
    "I32": DType(32, "i"),
    "I16": DType(16, "i"),
    "I8": DType(8, "i"),
    "U64": DType(64, "u"),
    "U32": DType(32, "u"),
    "U16": DType(16, "u"),
    "U8": DType(8, "u"),
    "BOOL": DType(8, "b"),
}
PARTS = {"C32": "F16", "C64": "F32", "C128": "F64"}
# ggml's quantized types, with the bytes per block, the type of the scales, and their offsets in the block.
BLOCK_SCALES: dict[str, tuple[int, str, tuple[int, ...]]] = {
    "Q1_0": (18, "F16", (0,)), "Q4_0": (18, "F16", (0,)), "Q4_1": (20, "F16", (0, 2)), "Q5_0": (22, "F16", (0,)),
    "Q5_1": (24, "F16", (0, 2)), "Q8_0": (34, "F16", (0,)), "Q2_K": (84, "F16", (80, 82)), "Q3_K": (110, "F16", (108,)),
    "Q4_K": (144, "F16", (0, 2)), "Q5_K": (176, "F16", (0, 2)), "Q6_K": (210, "F16", (208,)),
    "Q8_K": (292, "F32", (0,)),
    "IQ2_XXS": (66, "F16", (0,)), "IQ2_XS": (74, "F16", (0,)), "IQ2_S": (82, "F16", (0,)), "IQ3_XXS": (98, "F16", (0,)),
    "IQ3_S": (110, "F16", (0,)), "IQ1_S": (50, "F16", (0,)), "IQ4_NL": (18, "F16", (0,)), "IQ4_XS": (136, "F16", (0,)),
    "TQ1_0": (54, "F16", (52,)), "TQ2_0": (66, "F16", (64,)), "MXFP4": (17, "F8_E8M0", (0,)),
    "NVFP4": (36, "F8_E4M3", (0, 1, 2, 3)),
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One tensor. `start` is the byte offset of its first element in the file, and `extent` is its size in bytes.

    `stride` counts elements; None means row-major without gaps. `start` is -1 if the bytes are compressed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    extent: int
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Return the tensor's number of elements."""
        n = 1
        for d in self.shape:
            n *= d
        return n


@dataclass(frozen=True)
class Span:
    """A byte range [start, end) for which the file contains a CRC-32."""

    label: str
    start: int
    end: int
    crc: int


@dataclass
class Anatomy(Evidence):
    """A reader's findings about one file."""

    format: str
    tensors: list[Tensor] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    proved: list[str] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    # Data for the layouts, such as parsed JSON, the nodes of a pickle or safetensors metadata.
    content: Any = None
    meta: dict[str, Any] = field(default_factory=dict)
    big_endian: bool = False
    # The format contains nothing that can be checked, so the file can only be verified with a recorded digest.
    opaque: bool = False
    # Arrays with NaN or infinity. `values/data_arrays.py` decides whether they are weights or data.
    not_finite: list[str] = field(default_factory=list)
    # Checks that read the complete file. Level `structure` omits them. They may raise Broken or add findings.
    later: list[Callable[[], None]] = field(default_factory=list)


PARAMETER = re.compile(
    r"(?:.*[./])?(?:\w*weight|(?:\w+_)?bias|kernel|gamma|beta|exp_avg|exp_avg_sq|momentum_buffer|lora_\w+|pos_embed"
    r"|\w+_token|A_log)"
)
"""Matches the keys of trained parameters and of optimizer moments."""
MODELS = ("model", "state_dict", "model_state_dict", "module", "net", "network", "weights", "params", "model_state")
"""The usual keys for the model in a training state file."""
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 2


def short(text: object, limit: int = 120) -> str:
    """Return untrusted text as one printable line of bounded length.

    Only the outer levels of a container are included, because a container may contain itself, or may contain the same
    list a billion times.
    """
    whole = _BRIEF.repr(text) if isinstance(text, (list, tuple, dict, set, frozenset)) else str(text)
    line = whole[: limit + 1]
    if not line.isprintable():
        line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def role(name: str) -> str:
    """Replace the numbers in a tensor or module name with #, so that the name is the same in every layer."""
    return re.sub(r"\d+", "#", name)


def some(names: Any, limit: int = 3, count: int | None = None) -> str:
    """Join the first few names, and add the number of remaining names.

    `count` is the total number of names; pass it if `names` is incomplete.
    """
    listed = list(names)
    head = ", ".join(short(n, 80) for n in listed[:limit])
    more = (len(listed) if count is None else count) - limit
    return f"{head} and {more:,} more" if more > 0 else head


def gaps(numbers: range, found: Collection[int]) -> tuple[list[int], int]:
    """Return the first few numbers that are in a range but not in a set, and the total count of such numbers.

    The running time depends on the size of the set, not of the range, because a hostile file can claim a million parts.
    """
    first = list(islice((n for n in numbers if n not in found), 3))
    return first, len(numbers) - sum(n in numbers for n in found)
