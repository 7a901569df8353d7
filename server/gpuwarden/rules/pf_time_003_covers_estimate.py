import re
from collections.abc import Iterator
from typing import Final

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.estimate.setup import run_of
from gpuwarden.static_analysis.estimate.time import START_S, duration, shortest

SHORT_S: Final = 180
"""Minimum timeout in seconds. With a shorter timeout, a rented machine often does not finish starting."""
WHOLE_S: Final = 90
"""Minimum time in seconds to start a rented machine, import, load a model, train on a full dataset and save."""
# Settings, flags and methods that make a run shorter than its data.
_LIMITS: Final = frozenset(
    """max_steps max_train_steps num_train_steps total_steps max_iters max_iterations max_updates fast_dev_run max_time
    limit_train_batches max_samples max_train_samples num_samples num_train_samples subset_size debug""".split()  # noqa: SIM905
)
_PARTS: Final = ("select", "take", "head", "islice", "sample", "Subset", "from_dict", "from_list", "from_generator")


@rule(
    "PF-TIME-003",
    gate="submit",
    severity=Severity.ERROR,
    fix=(do(Action.SET_ARGUMENT, "higher", name="timeout_s"), "Or shorten the job."),
)
def covers_estimate(facts: SubmitFacts) -> Iterator[Found]:
    """The timeout is not shorter than the minimum time that the job needs.

    Why: a job that can't finish in time wastes money. The estimate is a wide interval. A timeout is an error if it is
    below half of the interval's lower end, or below the minimum time that the run's steps take with any model. It is a
    warning if it is below the lower end itself, or if a slow start alone can use it up. If the number of steps is
    unknown, a timeout below 90 s is an error unless the script makes the run shorter than its data.

    Example:
        submit_job(gpu="t4-small", script=three_epochs_of_an_8b_model, timeout_s=600)

    Instead:
        submit_job(gpu="a100-large", script=three_epochs_of_an_8b_model, timeout_s=86_400)

    """
    timeout, gpu, hub, uses = facts.spec.timeout_s, facts.gpu, facts.hub, facts.uses
    if timeout is None or gpu is None:
        return
    model = hub.model if hub else None
    params = model.parameters if model else None
    run = run_of(uses, params or 1, _rows(facts), gpu[1], model.shape if model else None)
    time = duration(run, gpu[0]) if params else None
    least = shortest(run, gpu[0], sized=bool(params)) if uses.trainers else None
    if time is not None and time.low > timeout:
        sure = least is not None and least > timeout
        message = f"the timeout is {timeout} s; even at its fastest the job takes {time} ({time.how})"
        yield Found(message, severity=None if sure else Severity.WARNING)
    elif least is not None and least > timeout:
        yield Found(f"the timeout is {timeout} s; with any model, the start and the steps take at least {least:.0f} s")
    elif uses.trainers and facts.metered and timeout < SHORT_S:
        named = {name for call in uses.calls for name, value in call.kwargs.items() if value not in (-1, None)}
        splits = [call.get("split", default="train") for call in uses.calls if call.last == "load_dataset"]
        whole = all(isinstance(s, str | None) and (s or "train").replace("+", "").isidentifier() for s in splits)
        shorter = (named | uses.flags.keys()) & _LIMITS or "**" in uses.settings or uses.called(*_PARTS)
        start = f"image, packages and weights alone take {START_S[0]:.0f} to {START_S[1]:.0f} s"
        if least is None and timeout < WHOLE_S and whole and not shorter:
            yield Found(f"the timeout is {timeout} s; {start}, and this run has no step limit")
        else:
            yield Found(f"the timeout is {timeout} s; {start}", severity=Severity.WARNING)


def _rows(facts: SubmitFacts) -> int | None:
    """Return the number of rows in the only dataset; None if there are several, or if the script selects some of the
    rows.
    """
    if facts.hub is None or facts.uses.called("select", "take", "filter"):
        return None
    splits = {
        (fact.use.id, split.name): sliced(fact.use.split or "train", split.rows)
        for fact in facts.hub.data
        for split in (fact.config.splits if fact.config else ())
        if split.name == (fact.use.split or "train").partition("[")[0]
    }
    return next(iter(splits.values())) if len(splits) == 1 else None


def sliced(split: str, rows: int | None) -> int | None:
    """Return the number of rows in a split with an optional slice such as `train[:1000]`; None for other forms."""
    found = re.fullmatch(r"\w+(?:\[:(\d+)(%?)\])?", split)
    if found is None or rows is None or found[1] is None:
        return rows if found else None
    return rows * int(found[1]) // 100 if found[2] else min(rows, int(found[1]))
