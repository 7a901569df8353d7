"""Show a skill pack to a model that runs in a loop without a client: names in the system prompt, pages on request.

Clients do the same. The tool belongs to the harness, not to the server; checks of the kind `trigger` detect the calls
to it.
"""

from __future__ import annotations

from typing import Any, Final

from evals.harness.recorder import Recorder
from evals.harness.skill_pack import Pack
from evals.harness.tool_schemas import Shown

SKILL: Final = "Skill"
DESCRIPTION: Final = "Read a skill: instructions for a kind of work."
PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "skill": {"type": "string", "description": "Its name"},
        "file": {"type": "string", "description": "A file of the skill other than SKILL.md"},
    },
    "required": ["skill"],
    "additionalProperties": False,
}


def system(offer: Shown, pack: Pack) -> str:
    """Return the system prompt: the server's instructions for clients, and the part of the pack that this arm uses."""
    parts = [offer.instructions]
    if pack.skills:
        rows = "\n".join(f"- {skill.name}: {skill.description}" for skill in pack.skills)
        parts.append(f"Skills that can be read with the tool {SKILL}:\n{rows}")
    parts.append(pack.forced)
    return "\n\n".join(part for part in parts if part)


def read_skill(recorder: Recorder, pack: Pack, args: dict[str, Any] | None) -> str:
    """Return a page from the pack, or an error message if the page is missing. The attempt is recorded in the
    transcript.
    """
    asked = args or {}
    name, file = str(asked.get("skill")), str(asked.get("file") or "SKILL.md")
    id, _ = recorder.begin(SKILL, {"skill": name, "file": file}, server="")  # noqa: A001
    found = next((skill for skill in pack.skills if skill.name == name), None)
    try:
        text = found.read(file) if found else None
    except (OSError, ValueError):
        text = None
    recorder.answered(id, "no such page" if text is None else "read", ok=text is not None)
    return text if text is not None else f"unknown page {name}/{file}"[:300]
