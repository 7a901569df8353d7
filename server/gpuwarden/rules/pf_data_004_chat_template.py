from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

_SETTERS = ("clone_chat_template", "setup_chat_format", "get_chat_template", "apply_chat_template_fallback")
_MESSAGES = frozenset({"messages", "prompt", "completion", "chosen", "rejected"})


@rule(
    "PF-DATA-004",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use the instruct model, pass chat_template_path (--chat-template-from), or call clone_chat_template.",
)
def chat_template(facts: SubmitFacts) -> Iterator[Found]:
    """A model that is trained on messages has a chat template.

    Why: base models often have none, and the tokenizer then fails on the first conversation.

    Example:
        data = load_dataset("trl-lib/Capybara", split="train")  # conversations
        SFTTrainer(model="openai-community/gpt2", train_dataset=data)  # a base model

    Instead:
        data = load_dataset("trl-lib/Capybara", split="train")
        SFTTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", train_dataset=data)

    """
    hub, uses = facts.hub, facts.uses
    set_by_script = (
        uses.called(*_SETTERS) is not None
        or uses.setting("chat_template_path") is not None
        or "chat_template" in uses.settings
        or "chat_template" in uses.assigned
        or any(t.get("formatting_func") is not None for t in uses.trainers)
    )
    if uses.typed is not None:
        set_by_script = bool(uses.typed.text("chat_template_from"))
    reshaped = uses.reshaped and uses.typed is None
    if hub is None or not uses.methods or reshaped or set_by_script:
        return
    model = hub.model
    if model is None or model.repo.chat_template is not False:
        return
    for fact in hub.data:
        columns = fact.config.columns if fact.config else ()
        if any(uses.renames.get(c.name, c.name) in _MESSAGES and "role: " in c.type for c in columns):
            yield Found(f"{model.where} has no chat template, but {fact.use.id} consists of conversations")
            return
