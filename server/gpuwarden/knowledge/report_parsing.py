"""Extract the relevant parts of a pasted report: its title, its description and the lines about the error.

Users paste complete issues: a form with checkboxes, versions, a script, a long command and a traceback of eighty lines.
Most of this text would match unrelated entries, so it is removed before a search by words. Signatures are still
compared with every line.
"""

from __future__ import annotations

import re

from gpuwarden.knowledge.evidence import failing_lines

LEAST_LINES = 3
LEAST_WORDS = 4
MOST = 1_500  # characters; a longer report is cut to its beginning and its failing lines
BEGINNING = 700
MOST_WHOLE = 6_000  # characters; of a longer text, half of this is kept from each end
LOOKED_AT = 300
_CJK = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_COMMAND = re.compile(
    r"(?:[A-Z_]{2,40}=\S{1,80} ){0,5}(?:python3?|torchrun|accelerate|deepspeed|sbatch|srun|bash|swift|yolo"
    r"|llamafactory-cli) [^\s:].{0,250}(?:\.py|\.sh|\.ya?ml|\.pt|\\)(?:\s|$)"
)
_RANK = r"(?:\[?\w*rank\s?\d+\]?:\s?)?"
_FRAME = re.compile(rf"{_RANK}\s?File \"[^\"]{{1,300}}\", line \d+")
_DRAWN = re.compile(r"(?:[│╭╰─❱┃╔╚═|^~+=-]\s?){2,}|│|\d{1,3}%\|")
_PHRASES = re.compile(
    rf"{_RANK}(?:Traceback \(most recent|During handling of the above|The above exception was|"
    r"Setting OMP_NUM_THREADS environment variable|CUDA kernel errors might be|For debugging consider passing"
    r"|Compile with `?TORCH_USE_CUDA_DSA)"
)
_FORM = re.compile(r"(?:[-*] \[[ xX]?\]|#{1,6} |<!--|</?details|</?summary|```)")
_SETUP = re.compile(
    r"(?i)[-*•]?\s?[`*]{0,2}(?:[\w .`-]{1,30} version|platform|system|os|python|py?torch|torch\w*|cuda|cudnn"
    r"|driver|nvidia|gpus?|transformers|accelerate|datasets|peft|trl|deepspeed|bitsandbytes|tokenizers|numpy|huggingface[_-]hub)"
    r"[`*]{0,2}\s?(?:[:=]=?|\s)\s?\S{0,40}\d\S{0,60}$"
)
_CODE = re.compile(
    r"(?:>>> |\$ |--?[A-Za-z][\w-]*(?:[ =]\S{0,200})?\s?\\?$|(?:from [\w.]+ )?import \w|def |class |@"
    r"|[\w.\[\]]{1,80} = \S|\w{1,60}=\S{1,80},$|[)\]}]+,?$|#!)"
)


def gist(text: str) -> str:
    """Return `text` without lines unrelated to the failure. If the text is short, or if few words would remain, no line
    is removed.
    """
    lines = text.splitlines()
    if len(lines) < LEAST_LINES:
        return _ends(text)
    informative = []
    inside = False  # a stack frame is followed by its line of code and the markers below that line
    for number, line in enumerate(lines):
        start = line.strip()[:LOOKED_AT]
        if _FRAME.match(start):
            inside = True
            continue
        if inside and line[:1].isspace():
            continue
        inside = False
        if number == 0 or not any(form.match(start) for form in (_DRAWN, _PHRASES, _FORM, _SETUP, _COMMAND, _CODE)):
            informative.append(line)
    kept = "\n".join(informative)
    if len(kept.split()) < LEAST_WORDS and len(_CJK.findall(kept)) < LEAST_WORDS:
        return _ends(text)
    return kept if len(kept) <= MOST else "\n".join((kept[:BEGINNING], *failing_lines(text)))[:MOST]


def _ends(text: str) -> str:
    """Return `text`, or only both of its ends if it is too long to be a description of one failure."""
    return text if len(text) <= MOST_WHOLE else f"{text[: MOST_WHOLE // 2]} {text[-MOST_WHOLE // 2 :]}"
