from collections.abc import Iterator
from pathlib import PurePosixPath

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.writes import MAY_SAVE, TEXT_SUFFIXES

_NAMES = """
save _save save_pretrained save_model save_file save_state save_checkpoint save_weights save_adapter save_lora_weights
savez savez_compressed savetxt tofile save_pretrained_merged save_pretrained_gguf save_pretrained_torchao save_to_disk
save_to_hub push_to_hub upload_folder upload_file CommitScheduler to_parquet to_json to_pickle
dump write write_text write_bytes copytree copy move merge_and_unload export
"""
_SAVES = frozenset(_NAMES.split())
_REPORTS = frozenset("dump write write_text savetxt to_json to_parquet to_pickle copy copytree move".split())  # noqa: SIM905
"""Calls that write metrics, settings or copies, but not the model, in a script with a Trainer."""
_PICKLES = frozenset({"pickle.dump", "joblib.dump"})


@rule(
    "PF-OUT-004",
    gate="submit",
    severity=Severity.WARNING,
    fix="Save the model, at least at the end and preferably at intervals.",
)
def something_saved(facts: SubmitFacts) -> Iterator[Found]:
    """A script that trains a model also saves it.

    Why: a training loop that doesn't save anything succeeds without a result. The trainers of transformers and trl save
    automatically, unless save_strategy="no" turns this off; a metrics file does not replace the model. If only a
    method's name suggests that it saves, as in `model.export_weights(folder)`, the finding is INFO instead of a
    warning.

    Example:
        for batch in batches:
            model(batch).loss.backward()

    Instead:
        for batch in batches:
            model(batch).loss.backward()
        model.save_pretrained("out")

    """
    uses = facts.uses
    passed_on = {w.via for w in uses.writes} | {p.via for p in uses.pushes}  # for a call, `via` ends in parentheses
    saves = any(c.last in _SAVES for c in uses.calls) or passed_on & {*_SAVES, "ZipFile()"}
    kept = any(c.last in _SAVES - _REPORTS or c.name in _PICKLES for c in uses.calls) or passed_on & _SAVES - _REPORTS
    unclear = [w for w in uses.writes if MAY_SAVE.fullmatch(w.via.removesuffix("()"))]
    if kept or any((w.path or "").startswith("hf://") for w in uses.writes):
        return
    unread = [*uses.savers, *(w.via for w in unclear)]
    other = f"; {unread[0]}, which is not analyzed, may do so" if unread else ""
    severity = Severity.INFO if unclear else None
    if uses.trainers:
        if uses.setting("save_strategy") == "no":
            line = uses.line_of("save_strategy")
            yield Found(f"line {line} turns saving off, and nothing else in the script saves{other}", severity=severity)
        return
    if not any(c.last == "backward" for c in uses.calls):
        return
    if not saves:
        yield Found(f"the script trains but never saves anything{other}", severity=severity)
    else:
        written = [PurePosixPath(w.path) if w.path else None for w in uses.writes]
        if written and all(path is not None and path.suffix in TEXT_SUFFIXES for path in written):
            yield Found(f"the script trains but saves only text: {written[0]}")
