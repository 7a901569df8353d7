from collections.abc import Iterator, Mapping

from gpuwarden.core.guidance import Action, Hint, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.hub.facts import RepoFact
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.ecosystem_tables import COLUMNS, SYNONYMS
from gpuwarden.static_analysis.row_layouts import fit, reads
from gpuwarden.static_analysis.shipped_trainers import trainer_names

_NEEDS = {
    "messages": "a list of messages with role and content",
    "conversations": "a list of messages",
    "objects": "lists named bbox and category",
    "label": "labels",
    "labels": "labels",
    "score": "numbers",
    "input_ids": "lists of numbers",
    **dict.fromkeys(("image", "img", "mask", "annotation"), "images"),
    **dict.fromkeys(("prompt", "completion", "chosen", "rejected"), "text or a list of messages"),
}
"""The values that methods expect in these columns. In all other columns, they expect text."""


@rule(
    "PF-DATA-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Map the columns before training, or choose a dataset made for this method.",
)
def columns_fit(facts: SubmitFacts) -> Iterator[Found]:
    """The dataset has the columns that the training method reads, with types that the method accepts.

    Why: a wrong data format is the most common reason for an immediate failure, especially for preference data. A
    column with the right name may have the wrong content, such as URLs instead of images or a string instead of
    messages. If the script calls `map` itself, the result is not analyzed, and only PF-DATA-003 applies, which checks
    the columns that the script reads.

    Example:
        data = load_dataset("tatsu-lab/alpaca", split="train")  # instruction, input, output, text
        DPOTrainer(model=model, train_dataset=data)

    Instead:
        data = load_dataset("trl-lib/ultrafeedback_binarized", split="train")  # chosen, rejected
        DPOTrainer(model=model, train_dataset=data)

    """
    hub = facts.hub
    formats = any(t.get("formatting_func") is not None for t in facts.uses.trainers)
    # A bundled trainer declares the columns that it reads, and does not change them with `map`.
    follows = facts.uses.typed is None or not facts.uses.typed.columns
    if hub is None or formats or not _methods(facts) or (facts.uses.reshaped and follows):
        return
    trained = [f for f in hub.data if not (f.use.split or "").startswith(("test", "val", "dev"))]
    judged = [(fact, _judge(facts, fact)) for fact in trained]
    if any(not problems for _, problems in judged):
        return  # a dataset that fits is assumed to be the training set
    for _, problems in judged:
        yield from problems


def _methods(facts: SubmitFacts) -> list[str]:
    """Return the training methods; `this trainer` for a bundled trainer that declares columns but no known method."""
    declares = facts.uses.typed is not None and facts.uses.typed.columns
    return sorted(facts.uses.methods) or (["this trainer"] if declares else [])


def _wanted(facts: SubmitFacts, method: str) -> tuple[frozenset[str], ...]:
    """Return the column sets that a method accepts, with the text column under the name that the script uses."""
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
        return [Found(f"{fact.where}: its columns could not be checked: {why}", "Check them yourself.", severity)]
    typed = facts.uses.typed
    renames, makes = (typed.renames, frozenset[str]()) if typed else (facts.uses.renames, facts.uses.makes)
    seen = {renames.get(c, c) for c in columns} | makes
    kinds = {renames.get(c.name, c.name): c.type for c in fact.config.columns} if fact.config else {}
    found = []
    for method in _methods(facts):
        there = [wanted for wanted in _wanted(facts, method) if wanted <= seen]
        if not there:
            sets = " or ".join("+".join(sorted(wanted)) for wanted in _wanted(facts, method)[:4])
            has = ", ".join(sorted(columns)[:12])
            fix = _mapping(facts, fact, method, dict.fromkeys(seen, "") | kinds)
            found.append(Found(f"{fact.where} has the columns {has}; {method} needs {sets}", fix))
            continue
        found += _mistyped(facts, fact, method, there, {n: k for n, k in kinds.items() if n not in makes})
    return found


def _mistyped(
    facts: SubmitFacts, fact: RepoFact, method: str, there: list[frozenset[str]], kinds: Mapping[str, str]
) -> list[Found]:
    """Return a finding if every complete column set in the dataset has a column with a wrong or unknown type."""
    if facts.uses.typed is None and facts.uses.called("cast_column", "cast"):
        return []  # the script changes column types
    # The script may choose the name of the text column, and a mask column is often called label.
    serves = {str(facts.uses.setting("dataset_text_field")): "text"}
    if method == "segmentation":
        serves["label"] = "mask"
    judged = [{n: reads(serves.get(n, n), kinds[n], wanted) for n in sorted(wanted & kinds.keys())} for wanted in there]
    if any(all(judgement.values()) for judgement in judged):
        return []
    untold = next((j for j in judged if False not in j.values()), None)
    name = next(n for n, right in (untold or judged[0]).items() if not right)
    column = f"{fact.where}: the column {name} has the type {kinds[name] or 'unknown'}"
    if untold is not None:
        message = f"{column}, and it is unknown whether {method} can read this type"
        return [Found(message, "Check a few rows.", Severity.WARNING)]
    return [Found(f"{column}; {method} needs {_NEEDS.get(serves.get(name, name), 'text')}")]


def _mapping(facts: SubmitFacts, fact: RepoFact, method: str, columns: Mapping[str, str]) -> Hint:
    """Return a fix that provides the expected columns: a setting or call that renames columns, or a row conversion."""
    wanted = _wanted(facts, method)
    if facts.uses.typed is not None:
        found = fit(columns, tuple(tuple(sorted(names)) for names in wanted))
        if found.option:
            return f"Add --columns {found.option}."
        template = method if method in trainer_names() else "METHOD"
        return do(Action.CONVERT_ROWS, name=template, path=fact.use.id)
    for names in wanted:
        renames = {n: next((s for s in SYNONYMS.get(n, ()) if s in columns), None) for n in names - columns.keys()}
        if renames and all(renames.values()):
            pairs = ", ".join(f'"{old}": "{new}"' for new, old in sorted(renames.items()))
            return f"Add dataset = dataset.rename_columns({{{pairs}}})."
    return ""
