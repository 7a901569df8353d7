from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.hub.facts import RepoFact
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.scripts.ecosystem_tables import COLUMNS, SYNONYMS


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
    checked, by PF-DATA-003.

    Example:
        data = load_dataset("tatsu-lab/alpaca", split="train")  # instruction, input, output, text
        DPOTrainer(model=model, train_dataset=data)

    Instead:
        data = load_dataset("trl-lib/ultrafeedback_binarized", split="train")  # chosen, rejected
        DPOTrainer(model=model, train_dataset=data)

    """
    hub = facts.hub
    formats = any(t.kwargs.get("formatting_func") is not None for t in facts.uses.trainers)
    # A shipped trainer says itself which columns it reads and converts.
    follows = facts.uses.typed is None or not facts.uses.typed.columns
    if hub is None or formats or not facts.uses.methods or (facts.uses.reshaped and follows):
        return
    trained = [f for f in hub.data if not (f.use.split or "").startswith(("test", "val", "dev"))]
    judged = [(fact, _judge(facts, fact)) for fact in trained]
    if any(not problems for _, problems in judged):
        return  # one that fits is what is trained on; the others serve something else
    for _, problems in judged:
        yield from problems


def _wanted(facts: SubmitFacts, method: str) -> tuple[frozenset[str], ...]:
    """Return the column sets of a method, with the text column under the name that the script gives it."""
    if facts.uses.typed is not None and facts.uses.typed.columns:
        return facts.uses.typed.columns
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
    typed = facts.uses.typed
    renames, makes = (typed.renames, frozenset[str]()) if typed else (facts.uses.renames, facts.uses.makes)
    seen = {renames.get(c, c) for c in columns} | makes
    found = []
    for method in sorted(facts.uses.methods):
        if not any(wanted <= seen for wanted in _wanted(facts, method)):
            sets = " or ".join("+".join(sorted(wanted)) for wanted in _wanted(facts, method)[:4])
            has = ", ".join(sorted(columns)[:12])
            found.append(
                Found(f"{fact.where} has the columns {has}; {method} needs {sets}", fix=_mapping(facts, method, seen))
            )
    return found


def _mapping(facts: SubmitFacts, method: str, seen: set[str]) -> str:
    """Return the call or the setting that renames the columns to fit, or an empty string."""
    for wanted in _wanted(facts, method):
        renames = {n: next((s for s in SYNONYMS.get(n, ()) if s in seen), None) for n in wanted - seen}
        if renames and all(renames.values()):
            if facts.uses.typed is not None:
                return f"Add --columns {','.join(f'{old}={new}' for new, old in sorted(renames.items()))}."
            pairs = ", ".join(f'"{old}": "{new}"' for new, old in sorted(renames.items()))
            return f"Add dataset = dataset.rename_columns({{{pairs}}})."
    return ""
