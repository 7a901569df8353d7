"""Return the skills in the format of the MCP extension for skills (SEP-2640): entries with digests, and folders.

Every response comes from the documents that `resources/read` also serves, so a digest always matches the content.
"""

from __future__ import annotations

import hashlib
from typing import Any

from gpuwarden.core.errors import NotFound
from gpuwarden.interfaces.mcp.resources import Document, documents, front_matter

EXTENSION = "io.modelcontextprotocol/skills"
SCHEME = "skill://"
FOLDER = "inode/directory"
MAIN = "SKILL.md"


def listed() -> list[dict[str, Any]]:
    """Return every skill, sorted by name."""
    return [_skill(d) for d in _files() if _is_main(d)]


def found(uri: str) -> dict[str, Any]:
    """Return the skill whose SKILL.md has this URI. Raises NotFound."""
    for document in _files():
        if document.uri == uri and _is_main(document):
            return _skill(document)
    raise NotFound(f"no skill has the URI {uri!r}", "Call skills/list to list all skills.")


def folder(uri: str) -> list[dict[str, str]]:
    """Return the entries of a skill's folder. `uri` has no trailing slash. Raises NotFound."""
    inside = [d for d in _files() if d.uri.startswith(f"{uri}/")]
    if not inside or uri.endswith("/"):
        raise NotFound(f"{uri!r} is not a skill folder", "Specify a folder such as skill://gpu-training.")
    rows: dict[str, dict[str, str]] = {}
    for document in inside:
        name, below, _ = document.uri[len(uri) + 1 :].partition("/")
        kind = FOLDER if below else document.mime_type
        rows.setdefault(name, {"uri": f"{uri}/{name}", "name": name, "mimeType": kind})
    return [rows[name] for name in sorted(rows)]


def _files() -> list[Document]:
    return sorted((d for d in documents().values() if d.kind == "skills"), key=lambda d: d.uri)


def _is_main(document: Document) -> bool:
    return document.path.count("/") == 1 and document.path.endswith(f"/{MAIN}")


def _skill(main: Document) -> dict[str, Any]:
    root = main.uri.removesuffix(MAIN)
    resources = [
        {"uri": d.uri, "digest": f"sha256:{hashlib.sha256(d.content).hexdigest()}", "size": len(d.content)}
        for d in _files()
        if d.uri.startswith(root)
    ]
    return {"uri": main.uri, "frontmatter": front_matter(main.text), "resources": resources}
