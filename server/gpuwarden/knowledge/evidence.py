"""Extract the first error, the lines about the failure and the library versions from a failed run's log."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpuwarden.core.sanitize import line as safe_line

MAX_LINES = 12
MAX_LINE = 300
_PREFIX = r"(?:\[?(?:rank|default)\s?\d+\]?:? ?|\d{4}-\d\d-\d\d[T ][\d:,.]+Z? |\[\w+\] ){0,3}"
_EXCEPTION = re.compile(
    rf"{_PREFIX}(?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Expired)\b(?:: ?\S|$)"
)
_SAID = re.compile(
    r"(?i)\b(?:error|fatal|killed|aborted|segmentation fault|core dumped|traceback|cannot|no such file)\b"
)
_NOISE = re.compile(r"(?i)\b(?:0 errors|no errors?|error_?rate|errors?=0)\b|\berror[ =:]+[\d.]+(?:e-?\d+)?\b")
_VERSION = re.compile(
    r"(?i)\b(python|torch|transformers|trl|accelerate|peft|datasets|tokenizers|safetensors|huggingface[_-]hub|deepspeed"
    r"|bitsandbytes|diffusers|(?:pytorch[_-])?lightning|sentence[_-]transformers|vllm|unsloth|numpy|cuda|cudnn|nccl|triton|flash[_-]attn|xformers|driver)"
    r"(?: version)?\s*(?:==|[:=v-]|\s)\s*v?(\d+(?:\.\d+){1,3}(?:[+.-]?[a-z0-9]+)?)"
)
_PERSON = re.compile(r"(/(?:home|Users)/)[^/\s'\"]+")


def first_error(log: str) -> str:
    """Return the first line with an exception, or else the first with a word such as `error`, or an empty string."""
    lines = _clean(log)
    raised = [line for line in lines if _EXCEPTION.match(line)]
    messages = [line for line in lines if _SAID.search(line) and not _NOISE.search(line)]
    return next(iter(raised or messages), "")


def failing_lines(log: str) -> tuple[str, ...]:
    """Return at most twelve distinct lines about the failure: the first error, then the others in log order."""
    first = first_error(log)
    found = dict.fromkeys(
        line for line in _clean(log) if _EXCEPTION.match(line) or (_SAID.search(line) and not _NOISE.search(line))
    )
    told = [first, *(line for line in found if line != first)] if first else list(found)
    return tuple(told[:MAX_LINES])


def versions(log: str, more: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the library versions in the log, each as `name version`, followed by the requirements in `more`."""
    seen: dict[str, str] = {}
    for name, number in _VERSION.findall(log):
        seen.setdefault(name.lower().replace("_", "-"), number)
    return (*(f"{name} {number}" for name, number in sorted(seen.items())), *(safe_line(text, 100) for text in more))


def nameless(text: str) -> str:
    """Return `text` with user names in home folder paths replaced by `me`."""
    return _PERSON.sub(r"\1me", text)


def _clean(log: str) -> list[str]:
    """Return the truncated lines without escape sequences, recognizable secrets and user names in paths."""
    raws = log.replace("\r", "\n").split("\n")
    return [text for raw in raws if (text := nameless(safe_line(raw[: 4 * MAX_LINE], MAX_LINE)))]
