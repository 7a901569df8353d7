from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.hub_references import BUILDERS

_SOURCES = ("from_pandas", "from_csv", "from_json", "from_generator", "from_parquet", "load_from_disk", "read_csv")
# Columns that tokenizers and processors add to a row.
_MADE = frozenset(
    ["input_ids", "attention_mask", "token_type_ids", "labels", "special_tokens_mask", "offset_mapping", "length"]
) | {"pixel_values", "pixel_mask", "overflow_to_sample_mapping", "word_ids"}


@rule(
    "PF-DATA-003",
    gate="submit",
    severity=Severity.ERROR,
    fix="Read a column that the dataset has.",
)
def columns_read(facts: SubmitFacts) -> Iterator[Found]:
    """The dataset has the columns that the script's own row functions read.

    Why: a `map` over the rows raises KeyError on the first row, after the download. If a missing column is read only
    from some rows, depending on their content, the finding is a warning.

    Example:
        data = load_dataset("openai/gsm8k", "main", split="train")  # question, answer
        data.map(lambda row: {"text": row["prompt"]})

    Instead:
        data = load_dataset("openai/gsm8k", "main", split="train")  # question, answer
        data.map(lambda row: {"text": row["question"]})

    """
    data = {f.use.id: f for f in facts.hub.data} if facts.hub else {}
    if len(data) != 1 or facts.uses.typed is not None:
        return  # with several datasets, a function's input is unknown; a bundled trainer checks the columns itself
    (fact,) = data.values()
    if fact.config is None or not fact.config.columns:
        return
    # If rows pass through several functions or come from other sources, they may have columns that are not known here.
    other = facts.uses.called(*_SOURCES) is not None or any(
        c.last == "load_dataset" and c.args and isinstance(c.args[0], str) and c.args[0] in BUILDERS
        for c in facts.uses.calls
    )
    severity = Severity.WARNING if other or facts.uses.row_functions > 1 else None
    has = _MADE | fact.config.column_names | set(facts.uses.renames.values()) | facts.uses.makes
    listed = ", ".join(sorted(fact.config.column_names)[:12])
    some = [(name, line) for name, line, tested in facts.uses.some_reads if tested <= has]
    reads = dict.fromkeys(some, Severity.WARNING) | dict.fromkeys(facts.uses.reads, severity)
    for (name, line), severe in sorted(reads.items(), key=lambda one: one[0]):
        if name not in has:
            message = (
                f"line {line} reads the column {name!r}, which {fact.use.id} does not have; its columns are {listed}"
            )
            yield Found(message, severity=severe)
