"""Parse the step, loss and learning rate from one line of any trainer's output.

The parser is not specific to a trainer. It finds pairs of a word and a number, and positions such as `10/500`, and
uses the words to interpret the numbers. All repetitions in the regular expressions are bounded, so the cost is
linear in the line's length.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

MAX_LINE = 2048
NUMBER = (
    r"[-+]?(?:\d{1,15}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][-+]?\d{1,3})?(?![\w%]|\.\d)|[-+]?(?:nan|inf(?:inity)?)(?!\w)"
)


class Lazy:
    """A regular expression that is compiled on first use, because most of the runner's commands do not need it."""

    def __init__(self, pattern: Any, flags: int = 0) -> None:
        self.given = (pattern, flags)

    def __getattr__(self, name: str) -> Any:
        compiled = re.compile(*self.given)
        self.__dict__.update(
            {verb: getattr(compiled, verb) for verb in ("search", "match", "findall", "finditer", "sub")}
        )
        return getattr(compiled, name)


ESCAPES = Lazy(r"\x1b\[[0-9;?]{0,20}[A-Za-z]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
PAIR = Lazy(
    r"(?<![\w./-])([^\W\d][\w./-]{0,47})(?:\(\w{1,12}\))?[\"'\]]{0,2}\s{0,16}(?:[:=#\uff1a]|(?:is|was)\s)?\s{0,16}"
    r"[\"'\[(]{0,2}\s{0,8}(?:tensor\(\s{0,2})?(" + NUMBER + r")(?:\s{0,8}(?:/|of\s)\s{0,8}(\d{1,12}))?",
    re.IGNORECASE,
)
AFTERWARDS = Lazy(r"loss(?:\s\D{0,24}\d{1,6})?[^\d:=]{0,24}?\s{0,3}[-:=]\s{0,4}(" + NUMBER + r")", re.IGNORECASE)
BAR = Lazy(r"(?<!\d)\d{1,3}%\s{0,2}(?:\|[^|]{0,300}\||[━╸╺╶─ ]{1,200})?\s{0,4}(\d{1,12})/(\d{1,12})(?=\s{0,4}\[|\s+\d)")
RICH_BAR = Lazy(r"[━╸╺╶─]{2,200}\s{1,4}(\d{1,12})/(\d{1,12})\s")
PLACED = Lazy(r"[\[(|]\s{0,8}(\d{1,12})\s{0,4}/\s{0,4}(\d{1,12})(?=\s{0,4}[\])(])|\d:?\s{1,8}(\d{1,12}) / (\d{1,12})\s")
AT_START = Lazy(r"\s{0,12}(\d{1,12})/(\d{1,12})\s{1,4}(?:[\[━╸╺╶─]|- \d)")
BARE_COUNT = Lazy(r"(?<![\d.])(\d{1,12})it \[")
COUNT_FIRST = Lazy(r"\s{0,8}(\d{1,12})(?:\s{0,4}\|\s{0,4}loss|\s\([\d.]{1,8}%\)\s)|\[(\d{1,9})\]\s")
TIMM = Lazy(r"\s{0,8}Train: \d{1,6} \[")
CELL = Lazy(r"\|\s{1,12}([a-z_/]{1,40})\s{1,40}\|\s{1,12}(" + NUMBER + r")\s{1,40}\|\s{0,4}$", re.IGNORECASE)
CONFIG = Lazy(r"(?:Namespace|Config|Args|Arguments|args)\(|train_runtime|\b(?:if|when|whether|until) (?:the )?loss\b")
PROSE = Lazy(r"(?:nan|inf)\s{1,4}[a-z]{2,20}\s{1,4}[a-z]{2,20}", re.IGNORECASE)
CHECKING = Lazy(
    r"\b(?:val(?:id(?:at(?:ion|ing|e))?)?|eval(?:uat(?:ion|ing|e))?|test(?:ing)?|sanity|predict(?:ing|ion)?|dev)\b"
    r"|测试|验证",
    re.IGNORECASE,
)
UNRELATED_BAR = Lazy(r"examples/s|B/s\b")
TRAINS = Lazy(r"epoch|train|step|iter|^[\s|\d]*$", re.IGNORECASE)

STEPS = (
    "global_step", "num_updates", "step", "steps", "optimizer_step", "train_step", "update", "updates", "iteration",
    "iter", "iters", "it", "训练次数", "batch",
)  # fmt: skip
NOT_A_STEP = frozenset(
    {
        "max",
        "total",
        "optimization",
        "warmup",
        "per",
        "every",
        "save",
        "eval",
        "skipped",
        "nan",
        "num",
        "size",
        "skipping",
    }
)
RATES = frozenset({"lr", "learning_rate", "learningrate", "pg0"})
NORMS = frozenset({"grad_norm", "gnorm", "gradnorm", "grad"})
CHECKED = frozenset({"val", "valid", "validation", "eval", "evaluation", "test", "dev", "holdout"})
NO_LOSS = frozenset(
    {"scale", "scaler", "weight", "weights", "coef", "fn", "type", "best", "min", "lowest", "ratio", "delta", "lambda",
     "previous", "prev", "minimum", "threshold", "target", "smoothing", "function"}
)  # fmt: skip
MAIN = frozenset({
    "loss", "train_loss", "train/loss", "training_loss", "loss/train", "loss_train", "train_loss_step", "loss_step",
    "total_loss", "lm_loss", "avg_loss", "running_loss", "tr_loss",
})  # fmt: skip


class Reading(NamedTuple):
    """The numbers in one line. `at` is a position and its maximum, such as 10 and 500, in an epoch or in the run."""

    step: int | None = None
    total: int | None = None
    at: tuple[int, int] | None = None
    epoch: float | None = None
    epochs: int | None = None
    loss: float | None = None
    checked_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    bar: bool = False
    trains: bool = True
    whole: bool = False
    """True if the progress bar counts the steps in the full run, not in an epoch."""


class Pair(NamedTuple):
    """A name with its value, the word before the name, and the total if the value is followed by a slash, as in
    `10/500`.
    """

    name: str
    before: str
    value: float
    total: int | None
    start: int

    @property
    def parts(self) -> frozenset[str]:
        """Return the parts of the name and of the preceding word, split at separators."""
        return frozenset((*re.split(r"[_/.-]", self.name), *self.before.split("_"), self.before))

    @property
    def last(self) -> str:
        """Return the name without a prefix such as `actor/`."""
        return self.name.rpartition("/")[2]


def read_line(text: str) -> Reading | None:
    """Return the training progress in a line; None if the line has none."""
    text = ESCAPES.sub("", text[:MAX_LINE])
    if CONFIG.search(text) or (not any(c.isdigit() for c in text) and "nan" not in text.lower()):
        return None
    pairs = [pair_of(text, found) for found in PAIR.finditer(text)]
    at, bar, label = position_of(text)
    words = ("epoch", "ep", "epochs", "train") if at and TIMM.match(text) else ("epoch", "ep", "epochs")
    epoch = next((p for p in pairs if p.name in words), None)
    step = step_of(pairs)
    checked, losses = losses_of(text, pairs)
    loss = losses[0] if losses else lonely_loss(text, pairs, checked)
    counts = None if step or (at is not None and not checked) else COUNT_FIRST.match(text) or BARE_COUNT.search(text)
    count = int(next(n for n in counts.groups() if n)) if counts else None
    placed = count is not None or at is not None or epoch is not None or step is not None or bar
    if not placed and ((loss is None and checked is None) or PROSE.search(text)):
        return None
    return Reading(
        step=int(step.value) if step else count,
        total=step.total if step else None,
        at=at,
        epoch=epoch.value if epoch else None,
        epochs=epoch.total if epoch else None,
        loss=loss,
        checked_loss=checked,
        lr=next((p.value for p in pairs if p.last in RATES or (p.name, p.before) == ("rate", "learning")), None),
        grad_norm=next((p.value for p in pairs if p.last in NORMS or (p.name, p.before) == ("norm", "grad")), None),
        bar=bar,
        trains=is_training(text, label, bar, loss),
        whole=bar and label.lower().lstrip().startswith("step"),
    )


def read_cell(text: str) -> tuple[str, float] | None:
    """Return the name and number in a row such as `|    loss    | 2.5    |`."""
    found = CELL.match(text)
    return (found.group(1).lower(), float(found.group(2))) if found is not None else None


def pair_of(text: str, found: re.Match[str]) -> Pair:
    """Convert a match of `PAIR` to a `Pair`, with the word before it."""
    words = text[max(0, found.start() - 24) : found.start()].lower().rstrip(" \t").split()
    glued = found.start() == 0 or text[found.start() - 1] in " \t"
    before = re.sub(r"[^\w]", "", words[-1]) if words and glued and words[-1][-1:].isalnum() else ""
    total = int(found.group(3)) if found.group(3) else None
    return Pair(found.group(1).lower(), before, float(found.group(2)), total, found.start())


def position_of(text: str) -> tuple[tuple[int, int] | None, bool, str]:
    """Return a position and its maximum, whether they belong to a progress bar, and the bar's label."""
    found = BAR.search(text) or RICH_BAR.search(text)
    if found is not None:
        return (int(found.group(1)), int(found.group(2))), True, text[: found.start()]
    first = AT_START.match(text)
    if first is not None:
        return (int(first.group(1)), int(first.group(2))), True, ""
    for placed in PLACED.finditer(text):
        now, end = (int(n) for n in placed.groups() if n is not None)
        if now <= end:
            return (now, end), False, ""
    return None, False, ""


def step_of(pairs: list[Pair]) -> Pair | None:
    """Return the pair that counts steps; optimizer steps take precedence over batches."""
    fits = {p.name: p for p in reversed(pairs) if p.name in STEPS and p.before not in NOT_A_STEP and p.value >= 0}
    for name in STEPS:
        pair = fits.get(name)
        whole = pair is not None and pair.value < 1e15 and pair.value.is_integer()
        if whole and pair is not None and (name != "batch" or pair.total is not None):
            return pair
    return None


def losses_of(text: str, pairs: list[Pair]) -> tuple[float | None, list[float]]:
    """Return the validation loss, and the training losses with the total loss first."""
    checked, main, others = None, [], []
    for p in pairs:
        named = "loss" in p.name or "losses" in p.name or (p.before == "loss" and p.name in ("train", "val"))
        if not named or p.parts & NO_LOSS:
            continue
        head = text[: p.start]
        if (
            p.parts & CHECKED
            or CHECKING.search(p.name)
            or (CHECKING.search(head[-80:]) and "train" not in head.lower() + p.name)
        ):
            checked = p.value if checked is None else checked
        elif p.name in MAIN or p.last == "loss" or p.before == "loss":
            main.append(p.value)
        else:
            others.append(p.value)
    return checked, main[:1] + others


def lonely_loss(text: str, pairs: list[Pair], checked: float | None) -> float | None:
    """Return the number in a line such as `Training loss at epoch 25 - 0.3`."""
    if checked is not None or any("loss" in p.name or p.before == "loss" for p in pairs):
        return None
    found = AFTERWARDS.search(text)
    if found is None or CHECKING.search(text[: found.start()]) or "scale" in found.group():
        return None
    return float(found.group(1))


def is_training(text: str, label: str, bar: bool, loss: float | None) -> bool:
    """Return whether a line's position belongs to training, not to validation or data preparation."""
    if loss is not None:
        return True
    if CHECKING.search(label if bar else text[:80]) and "train" not in text[:120].lower():
        return False
    if not bar:
        return True
    return TRAINS.search(label) is not None and UNRELATED_BAR.search(text) is None
