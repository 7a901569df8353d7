"""Check file edits and patches: which file is changed, and which text is removed or added."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpuwarden.interfaces.hooks.guard import settings
from gpuwarden.interfaces.hooks.guard.judge import Judge


def edited(path: str, given: Mapping[str, Any], judge: Judge) -> str | None:
    """Return the reason to block an edit of a file."""
    full = judge.files.path(path.strip())
    listed = given.get("edits")
    candidates = (given, *listed) if isinstance(listed, list) else (given,)
    edits = [e for e in candidates if isinstance(e, Mapping) and "old_string" in e]
    whole = next((given[n] for n in ("content", "contents", "file_text") if isinstance(given.get(n), str)), None)
    if full not in judge.files.settings and (why := judge.files.change(full)):
        return why
    on_disk = settings.contents(full)
    if whole is not None:
        before = on_disk if on_disk is not None else settings.MARK if full in judge.files.settings else ""
        return settings.edited(full, before, str(whole))
    if edits:
        before = on_disk if on_disk is not None else "\n".join(str(e.get("old_string")) for e in edits)
        return settings.edited(full, before, settings.after_edits(before, [dict(e) for e in edits]))
    return judge.files.change(full)


def patched(patch: str, judge: Judge) -> str | None:
    """Return the reason to block a patch because of its files, or because of the text that it removes and adds."""
    for section in re.split(r"^(?=\*\*\* (?:Update|Add|Delete) File: )", patch, flags=re.MULTILINE)[1:]:
        head, _, body = section.partition("\n")
        path = judge.files.path(head.partition(": ")[2].strip())
        moved = re.findall(r"^\*\*\* Move to: (.+)$", body, re.MULTILINE)
        if why := next((w for p in (path, *moved) if (w := judge.files.change(p.strip()))), None):
            return why
        rows = body.splitlines()
        before, after = ("\n".join(r[1:] for r in rows if r[:1] in {" ", mark}) for mark in "-+")
        if why := settings.edited(path, before, after):
            return why
    return None
