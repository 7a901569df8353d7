"""The skill pack for an agent under test, and the arms of an uplift study.

An arm determines the part of the pack that the agent sees.

A pack is a folder with `skills/<name>/SKILL.md`: a checkout, an older checkout, or any folder with this layout.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from evals.errors import EvalError
from evals.scoring.surface import HERE

ARMS: Final = ("none", "pack", "forced", "old")
_MAX_TEXT: Final = 200_000
"""Maximum number of characters in a forced pack. A longer text would test the model's context window, not the pack."""


@dataclass(frozen=True)
class Skill:
    """One skill: its folder and the two fields that every client shows to its model."""

    folder: Path
    name: str
    description: str

    @classmethod
    def load(cls, page: Path) -> Skill:
        """Read a skill's page. Raises EvalError if one of the two fields is missing."""
        fields = _split(page)[0]
        name, description = fields.get("name", ""), fields.get("description", "")
        if name != page.parent.name or not description:
            raise EvalError("a skill needs its folder's name as `name`, and a `description`", "Fix the page", file=page)
        return cls(page.parent, name, description)

    @property
    def text(self) -> str:
        """Return the page without its front matter."""
        return _split(self.folder / "SKILL.md")[1]

    def read(self, file: str) -> str:
        """Return a file of the skill. Raises FileNotFoundError if the file is missing or outside its folder."""
        path = (self.folder / file).resolve()
        if not path.is_relative_to(self.folder.resolve()) or not path.is_file():
            raise FileNotFoundError(file)
        return path.read_text("utf-8", errors="replace")[:_MAX_TEXT]


@dataclass(frozen=True)
class Pack:
    """The skills that an agent sees in one arm.

    The agent can load the `skills`; `forced` is text that is always in its context. `bare` hides the server's own copy
    of the skills (its resources), because that copy is the pack under test.
    """

    arm: str
    skills: tuple[Skill, ...] = ()
    forced: str = ""
    root: Path = HERE.parent

    @property
    def bare(self) -> bool:
        """Return true if the server's copy of the skills must be hidden."""
        return self.arm in ("none", "old")

    def install(self, folder: Path) -> None:
        """Copy the available skills to `folder/<name>/`. Does nothing if there are none."""
        for skill in self.skills:
            shutil.copytree(skill.folder, folder / skill.name, ignore=shutil.ignore_patterns("__pycache__"))


def load_pack(arm: str, root: Path | None = None) -> Pack:
    """Return the pack of an arm; `root` is this checkout by default. Raises EvalError if it can't be loaded."""
    if arm not in ARMS:
        raise EvalError(f"unknown arm {arm!r}", f"The arms are {', '.join(ARMS)}")
    if arm == "old" and root is None:
        raise EvalError("the arm `old` requires the old pack", "Specify its folder with --pack")
    if arm == "none":
        return Pack(arm)
    root = root or HERE.parent
    pages = sorted((root / "skills").glob("*/SKILL.md"))
    if not pages:
        raise EvalError("no skills/<name>/SKILL.md was found", "Specify the folder of a pack with --pack", file=root)
    skills = tuple(Skill.load(page) for page in pages)
    if arm == "forced":
        text = "\n\n".join(skill.text for skill in skills)
        if len(text) > _MAX_TEXT:
            raise EvalError(f"the pack has {len(text):,} characters", "Use a shorter pack", file=root)
        return Pack(arm, forced=text, root=root)
    return Pack(arm, skills, root=root)


def _split(page: Path) -> tuple[dict[str, str], str]:
    """Return the one-line fields of the front matter, and the text after it."""
    text = page.read_text("utf-8")
    if not text.startswith("---\n") or "\n---\n" not in text[4:]:
        return {}, text
    head, _, body = text[4:].partition("\n---\n")
    pairs = (line.partition(":") for line in head.splitlines() if not line.startswith((" ", "#")))
    return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}, body.strip()
