from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.hub.facts import RepoFact
from gpuwarden.rules.facts import SubmitFacts

_SETTERS = ("clone_chat_template", "setup_chat_format", "get_chat_template", "apply_chat_template_fallback")


@rule(
    "PF-DATA-004",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use the instruct model, pass chat_template_path, or call clone_chat_template.",
)
def chat_template(facts: SubmitFacts) -> Iterator[Found]:
    """A model that is trained on messages has a chat template.

    Why: base models often have none, and the tokenizer then refuses the first conversation.

    Example:
        data = load_dataset("trl-lib/Capybara", split="train")  # conversations
        SFTTrainer(model="openai-community/gpt2", train_dataset=data)  # a base model

    Instead:
        data = load_dataset("trl-lib/Capybara", split="train")
        SFTTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", train_dataset=data)

    """
    hub = facts.hub
    if hub is None or not facts.uses.methods or _set_by_script(facts):
        return
    model = hub.model
    if model is None or model.repo.chat_template is not False:
        return
    talks = [f for f in hub.data if _is_chat(facts, f)]
    if talks:
        yield Found(f"{model.where} has no chat template, and {talks[0].use.id} consists of conversations")


def _set_by_script(facts: SubmitFacts) -> bool:
    uses = facts.uses
    return (
        uses.called(*_SETTERS) is not None
        or uses.setting("chat_template_path") is not None
        or "chat_template" in uses.settings
        or "chat_template" in uses.assigned
        or any(t.kwargs.get("formatting_func") is not None for t in uses.trainers)
    )


def _is_chat(facts: SubmitFacts, fact: RepoFact) -> bool:
    columns = fact.config.columns if fact.config else ()
    if facts.uses.reshaped:
        return False
    wanted = {"messages", "prompt", "completion", "chosen", "rejected"}
    return any(facts.uses.renames.get(c.name, c.name) in wanted and "role: " in c.type for c in columns)
