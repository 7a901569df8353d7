from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.hub.facts import RepoFact
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.scripts.ecosystem_tables import COLUMNS, SYNONYMS
from gpuwarden.scripts.row_layouts import fit
from gpuwarden.scripts.trainer_runs import TrainerRun


@rule(
    "PF-DATA-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Map the columns before training, or choose a dataset made for this method.",
)
def columns_fit(facts: SubmitFacts) -> Iterator[Found]:
    """The dataset's columns are those that the training method reads.

    Why: the format of the data is the most common reason for a job that fails at once, above all for preference
    data. What a script's own `map` makes of the rows is not followed; then only the columns that it reads are
    checked, by PF-DATA-003. What a shipped trainer makes of them is known.

    Example:
        data = load_dataset("tatsu-lab/alpaca", split="train")  # instruction, input, output, text
        DPOTrainer(model=model, train_dataset=data)

    Instead:
        data = load_dataset("trl-lib/ultrafeedback_binarized", split="train")  # chosen, rejected
        DPOTrainer(model=model, train_dataset=data)

    """
    hub = facts.hub
    formats = any(t.kwargs.get("formatting_func") is not None for t in facts.uses.trainers)
    if hub is None or formats or facts.uses.reshaped or not (facts.uses.methods or facts.uses.run):
        return
    trained = [f for f in hub.data if not (f.use.split or "").startswith(("test", "val", "dev"))]
    judged = [(fact, _judge(facts, fact)) for fact in trained]
    if any(not problems for _, problems in judged):
        return  # one that fits is what is trained on; the others serve something else
    for _, problems in judged:
        yield from problems


def _wanted(facts: SubmitFacts, method: str) -> tuple[frozenset[str], ...]:
    """Return the column sets of a method, with the text column under the name that the script gives it."""
    named = facts.uses.setting("dataset_text_field")
    if method == "sft" and isinstance(named, str):
        return (frozenset({named}), *COLUMNS[method][1:])
    return COLUMNS[method] if named is None or method != "sft" else (frozenset(),)


def _judge(facts: SubmitFacts, fact: RepoFact) -> list[Found]:
    structure = fact.repo.structure
    columns = fact.config.column_names if fact.config else frozenset()
    if not columns:
        why = (fact.config.why if fact.config else "") or (structure.why if structure else "") or "no columns are known"
        unreached = structure is not None and not structure.reached
        severity = facts.could_not if unreached else Severity.WARNING
        return [Found(f"{fact.where}: whether its columns fit could not be checked: {why}", "Look at it.", severity)]
    if facts.uses.run is not None:
        return _judge_run(facts.uses.run, fact)
    seen = {facts.uses.renames.get(c, c) for c in columns} | facts.uses.makes
    found = []
    for method in sorted(facts.uses.methods):
        if not any(wanted <= seen for wanted in _wanted(facts, method)):
            sets = " or ".join("+".join(sorted(wanted)) for wanted in _wanted(facts, method)[:4])
            has = ", ".join(sorted(columns)[:12])
            found.append(
                Found(f"{fact.where} has the columns {has}; {method} needs {sets}", fix=_mapping(method, seen))
            )
    return found


def _judge_run(run: TrainerRun, fact: RepoFact) -> list[Found]:
    """Judge a dataset for a shipped trainer, which renames what it is told to and converts some forms itself."""
    types = {run.renames.get(c.name, c.name): c.type for c in fact.config.columns} if fact.config else {}
    found = fit(types, run.trainer.wanted)
    if not run.trainer.wanted or not (found.missing or found.renames):
        return []
    sets = " or ".join("+".join(names) for names in run.trainer.wanted)
    message = f"{fact.where} has the columns {', '.join(sorted(types)[:12])}; {run.trainer.name} needs {sets}"
    if found.missing:
        return [Found(message)]
    pairs = ",".join(f"{old}={new}" for old, new in {**run.renames, **found.renames}.items())
    return [Found(message, fix=f"Pass --columns {pairs}.")]


def _mapping(method: str, seen: set[str]) -> str:
    """Return the call that renames the columns to fit, or an empty string."""
    for wanted in COLUMNS[method]:
        renames = {n: next((s for s in SYNONYMS.get(n, ()) if s in seen), None) for n in wanted - seen}
        if renames and all(renames.values()):
            pairs = ", ".join(f'"{old}": "{new}"' for new, old in sorted(renames.items()))
            return f"Add dataset = dataset.rename_columns({{{pairs}}})."
    return ""
