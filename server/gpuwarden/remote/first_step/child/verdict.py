"""Decide whether a script ended because of its own error, a substitute, this machine, or a missing file."""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
from typing import Any, Dict, Iterator, Optional, Tuple

from gpuwarden.remote.first_step.child.record import Record, Stopped

MOST = 600
_NETWORK = re.compile(
    r"(?i)offline|name resolution|network is unreachable|connection ?(error|refused|reset|attempts)|max retries|"
    r"couldn't connect|getaddrinfo|LocalEntryNotFound|cannot find the requested files|urlopen error|ConnectError|"
    r"couldn't reach|api[_ ]?key|log ?in|not been found in the cache|couldn't find any data file"
)
_GPU = re.compile(r"(?i)cuda|\bgpu|nvidia|nccl|flash.?att|triton|bitsandbytes|\bbnb\b|vllm|deepspeed|xformers")
_GPU_PACKAGES = frozenset(
    """flash_attn bitsandbytes vllm deepspeed triton xformers unsloth unsloth_zoo apex liger_kernel flashinfer cupy
    transformer_engine""".split()  # noqa: SIM905
)
_SIZES = re.compile(r"(?i)size mismatch|shapes? cannot|out of range|mat1 and mat2|index out|must be divisible")
_NAMES = (NameError, SyntaxError)
_CALLS = re.compile(
    r"unexpected keyword argument|required (positional|keyword-only) argument|positional arguments? but|"
    r"multiple values for|got some positional-only|not used by the HfArgumentParser|cannot import name|"
    r"object is not callable|is not a valid \w+|BuilderConfig|Unknown split|module '?[\w.]+'? has no attribute|"
    r"type object '\w+' has no attribute"
)


def judge(record: Record, error: BaseException, script: str) -> Dict[str, Any]:
    """Return the outcome for a script that ended with an error."""
    line, text = script_line(error, script)
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SystemExit):
        message = record.usage or f"the script exits with code {error.code}"
    found = {"line": line, "text": text[:200], "message": message[:MOST]}
    if why := stopped(record, error):
        return {**found, "outcome": "stopped", "why": why[:MOST]}
    return {**found, "outcome": "fault", "certain": certain(record, error)}


def certain(record: Record, error: BaseException) -> bool:
    """Return whether an error is independent of all substitutes: a wrong name, call or option."""
    wrong_call = isinstance(error, (TypeError, AttributeError, ImportError, ValueError)) and _CALLS.search(str(error))
    return isinstance(error, _NAMES) or bool(wrong_call) or bool(record.usage)


def judge_caught(record: Record, error: Exception, script: str) -> Dict[str, Any]:
    """Return the outcome for a script that caught an error. `certain` is false, because the error may be expected."""
    found = judge(record, error, script)
    return {**found, "message": f"the script ignores the error {found['message']}"[:MOST], "certain": False}


def is_code_error(record: Record, error: BaseException) -> bool:
    """Return whether a caught error shows that the script's code, not its data, is wrong."""
    thing = getattr(error, "obj", None)  # available since Python 3.10
    of_no_value = isinstance(error, AttributeError) and thing is not None and type(thing).__module__ != "builtins"
    return not isinstance(error, ImportError) and (certain(record, error) or of_no_value)


def stopped(record: Record, error: BaseException) -> str:
    """Return the reason for an error that the script did not cause; empty if the script caused the error."""
    if isinstance(error, Stopped) or record.unfit:
        return record.unfit or str(error)
    if isinstance(error, ImportError):
        return _missing(record, error)
    if certain(record, error) or isinstance(error, SystemExit):
        return ""
    words = " ".join(f"{type(e).__name__}: {e}" for e in _chain(error))[:4_000]
    name = getattr(error, "filename", None)
    elsewhere = not isinstance(name, str) or os.path.isabs(name)  # relative files would be missing in the job too
    for reason, so in (
        (
            "the script needs more memory than it can use here",
            isinstance(error, MemoryError) or "allocate memory" in words,
        ),
        ("the script needs more disk space than it can use here", "No space left on device" in words),
        ("the script needs a GPU", _GPU.search(words)),
        ("the script needs the network", isinstance(error, (ConnectionError, TimeoutError)) or _NETWORK.search(words)),
        (f"the file {name} does not exist on this machine", isinstance(error, FileNotFoundError) and elsewhere),
        (f"a substitute differs from the original: {', '.join(record.made_up[:1])}", record.made_up),
        ("the script depends on the sizes of the real model", _SIZES.search(words) and record.counts_on_sizes(words)),
    ):
        if so:
            return reason
    return ""


def _missing(record: Record, error: ImportError) -> str:
    """Return the reason for a failed import that the script did not cause; empty if the script caused the failure."""
    whole = error.name or ""
    top = whole.split(".")[0]
    if top in _GPU_PACKAGES or (_GPU.search(str(error)) and not _CALLS.search(str(error))):
        return f"{top or 'a package'} needs a GPU"
    if not isinstance(error, ModuleNotFoundError) or record.order.get("own_environment"):
        return ""
    there = top in sys.modules and top != whole
    return f"the installed {top} has no {whole}" if there else f"the package {top} is not installed here"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen = set()
    current: Optional[BaseException] = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def script_line(error: BaseException, script: str) -> Tuple[int, str]:
    """Return the number and text of the last script line in an error's traceback."""
    if isinstance(error, SyntaxError) and error.filename == script:
        return error.lineno or 0, (error.text or "").strip()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == script]
    if not frames:
        return 0, ""
    number = frames[-1].lineno or 0
    return number, linecache.getline(script, number).strip()
