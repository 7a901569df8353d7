from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

_NAMES = """
save save_pretrained save_model save_file save_state save_checkpoint save_weights save_adapter save_lora_weights savez
save_pretrained_merged save_pretrained_gguf save_to_disk push_to_hub upload_folder upload_file to_parquet to_json
dump write write_text write_bytes copytree copy move merge_and_unload export
"""
_SAVES = frozenset(_NAMES.split())


@rule(
    "PF-OUT-004",
    gate="submit",
    severity=Severity.WARNING,
    fix="Save the model, at least at the end and better at intervals.",
)
def something_saved(facts: SubmitFacts) -> Iterator[Found]:
    """A script that trains also saves.

    Why: a loop without a save ends well and leaves nothing. The trainers of transformers and trl save by
    themselves, unless save_strategy="no" turns that off.

    Example:
        for batch in batches:
            model(batch).loss.backward()

    Instead:
        for batch in batches:
            model(batch).loss.backward()
        model.save_pretrained("out")

    """
    uses = facts.uses
    saves = any(c.last in _SAVES for c in uses.calls)
    if uses.trainers:
        if uses.setting("save_strategy") == "no" and not saves:
            yield Found(f"line {uses.line_of('save_strategy')} turns saving off, and nothing else saves")
        return
    if any(c.last == "backward" for c in uses.calls) and not saves:
        yield Found("the script trains and never saves anything")
