"""Find the releases of a package that raise a given error message, using templates extracted from their source code.

A matching template alone is weak evidence, so only templates from the file in which the traceback ends are compared.
"""

from __future__ import annotations

import json
import lzma
import re
from functools import cache
from typing import Any

from gpuwarden.core.models import Frozen
from gpuwarden.data import data_dir
from gpuwarden.knowledge.failure import Failure
from gpuwarden.static_analysis.signatures.tables import packages

HOLE = "{}"
_PLACE = re.compile(r"(?:site|dist)-packages/(?P<file>(?P<root>\w+)/[^:]{1,300}\.py):\d+ in ")
_PACKAGES = {"sentence_transformers": "sentence-transformers", "pytorch_lightning": "lightning"}


class Origin(Frozen):
    """The first and the last known release of `package` in which `file` raises a message.

    `until` is empty if the newest release in the table also raises the message; `since` is empty if the oldest one
    does.
    """

    package: str
    file: str
    template: str
    since: str = ""
    until: str = ""


def origin(failure: Failure) -> Origin | None:
    """Return the origin of the exception that ended a run, or else of its nearest cause; None if both are unknown."""
    for raised in (failure.exception, *reversed(failure.chain)) if failure.exception else ():
        place = _PLACE.search(raised.frame.replace("\\", "/"))
        if place is None:
            continue
        package = _PACKAGES.get(place["root"], place["root"])
        file = place["file"].replace("pytorch_lightning/", "lightning/pytorch/", 1)
        content = _table(package)
        name = raised.type.rpartition(".")[2]
        message = " ".join(raised.message.split())
        fitting = [row for row in content["files"].get(file, ()) if row[0] == name and begins(message, row[1])]
        if fitting:
            # Prefer the template with the most fixed text.
            _, template, first, last = max(fitting, key=lambda row: len(row[1].replace(HOLE, "")))
            releases = content["releases"]
            since = releases[first] if first else ""
            until = releases[last] if last + 1 < len(releases) else ""
            return Origin(package=package, file=file, template=template, since=since, until=until)
    return None


def begins(message: str, template: str) -> bool:
    """Return whether a message starts with a template's text. A placeholder in the template matches any text."""
    first, *parts = template.split(HOLE)
    at = len(first)
    if not message.startswith(first):
        return False
    for part in parts:
        at = message.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


@cache
def _table(package: str) -> dict[str, Any]:
    path = data_dir("references") / "signatures" / "messages" / f"{package}.json.xz"
    if package not in packages() or not path.is_file():
        return {"releases": [], "files": {}}
    found: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    return found
