from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-HUB-006",
    gate="submit",
    severity=Severity.ERROR,
    fix=("Load an adapter as an adapter and a full model as a model.", do(Action.LOOK_AT_REPO)),
)
def adapter_and_base(facts: SubmitFacts) -> Iterator[Found]:
    """A repo that is loaded as an adapter is an adapter, and a repo that is loaded as a model is a full model.

    Why: merging and GGUF conversion need both an adapter and its base model. If a repo is of the wrong kind, the job
    fails only after both have been downloaded.

    Example:
        PeftModel.from_pretrained(base, "Qwen/Qwen2.5-0.5B-Instruct")  # a full model

    Instead:
        PeftModel.from_pretrained(base, "me/qwen-lora")  # has adapter_config.json

    """
    for fact in facts.hub.repos if facts.hub else ():
        if (
            not fact.repo.exists
            or not fact.repo.files
            or fact.use.revision
            or fact.use.unknown & {"revision", "inside"}
        ):
            continue
        folder = f"{fact.use.inside.strip('/')}/" if fact.use.inside else ""
        names = {f.path.removeprefix(folder) for f in fact.repo.files if f.path.startswith(folder)}
        severity = None if fact.use.certain else Severity.WARNING
        adapter = "adapter_config.json" in names
        if fact.use.role == "adapter" and not adapter:
            yield Found(f"{fact.where} is loaded as an adapter, but has no adapter_config.json", severity=severity)
        elif fact.use.role == "model" and adapter and "config.json" not in names:
            base = f"; its base is {fact.repo.base_model[0]}" if fact.repo.base_model else ""
            yield Found(
                f"{fact.where} contains only an adapter, not a full model{base}",
                severity=Severity.WARNING,
                fix="Load it with peft, or name the base model.",
            )
