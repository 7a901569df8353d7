"""Write and check `trial.json`, the head of a trial, which is cryptographically bound to the trial's other files.

Seals protect only the server's replies, and not the other files in a trial's folder. `mac` is an HMAC over the whole
head, with the key of the seals, and `files` in the head contains the digests of the transcript, the end state and the
ledger. An edited, removed or copied file therefore no longer matches. The MAC does not protect against the owner of the
folder, because the key is in the head.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from evals.transcripts.canonical import Problem

NAME: Final = "trial.json"
_EVIDENCE: Final = ("transcript.*", "end_state.json", "ledger.jsonl")


def write(folder: Path, head: dict[str, Any]) -> None:
    """Write the head of a trial after its other files. If the head has seals, the digests of these files and a MAC are
    added to it.
    """
    if head.get("seals"):
        head = {**head, "files": _digests(folder)}
        head["mac"] = _mac(head)
    (folder / NAME).write_text(json.dumps(head, indent=1), "utf-8")


def problems(folder: Path, head: dict[str, Any], case: str, n: int) -> Iterator[Problem]:
    """List the differences between a sealed head, its position in the run, and the files next to it."""
    if not head.get("seals"):
        if "mac" in head:
            yield Problem("seal", f"the seals were removed from {NAME}")
        return
    if (head.get("case"), head.get("n")) != (case, n):
        yield Problem("seal", f"the folder of {case}/{n} contains the trial {head.get('case')}/{head.get('n')}")
    if not hmac.compare_digest(str(head.get("mac", "")).encode(), _mac(head).encode()):
        yield Problem("seal", f"{NAME} was edited")
        return
    before, now = head.get("files") or {}, _digests(folder)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            change = "is missing" if name not in now else "was added" if name not in before else "was edited"
            yield Problem("seal", f"{name} {change} after the trial")


def _digests(folder: Path) -> dict[str, str]:
    found = (path for pattern in _EVIDENCE for path in folder.glob(pattern))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def _mac(head: dict[str, Any]) -> str:
    """Return the MAC over the head without its own `mac`. Raises ValueError if the key is not hexadecimal."""
    text = json.dumps({k: v for k, v in head.items() if k != "mac"}, sort_keys=True)
    return hmac.new(bytes.fromhex(head["seals"]["key"]), text.encode(), hashlib.sha256).hexdigest()
