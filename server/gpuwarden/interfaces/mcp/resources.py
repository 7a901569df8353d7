"""Provide references, profiles, skills and the user's notes as documents, each with a URI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gpuwarden.core.errors import BadRequest
from gpuwarden.data import data_dir
from gpuwarden.frontmatter import read_front_matter

Kind: TypeAlias = Literal["references", "profiles", "skills", "notes"]

MAX_BYTES = 1 << 20
NOTES_URI = "gpuwarden://notes"
ENTRY_TEMPLATE = "gpuwarden://entries/{id}"
PROFILE_TEMPLATE = "gpuwarden://profiles/{name}.md"
TEMPLATES = "gpuwarden://templates/"
TEMPLATE_URI = f"{TEMPLATES}{{name}}"
FILLED_URI = f"{TEMPLATE_URI}{{?model,dataset,platform,push}}"
MARKDOWN = "text/markdown"
TYPES = {".md": MARKDOWN, ".py": "text/x-python", ".sh": "text/x-shellscript", ".json": "application/json"}


@dataclass(frozen=True)
class Document:
    """A file: its entry in the resource list and its content. `path` is relative to the folder for `kind`."""

    kind: Kind
    path: str
    uri: str
    title: str
    description: str
    mime_type: str
    content: bytes

    @property
    def name(self) -> str:
        """Return a name that is unique among all documents."""
        return f"{self.kind}/{self.path}"

    @property
    def text(self) -> str:
        """Return the unchanged content as text."""
        return self.content.decode("utf-8")


def page_uri(page: str) -> str:
    """Return a page's URI, given its path in the references folder."""
    return f"gpuwarden://references/{page}"


def documents(own_profiles: Path | None = None, notes_file: Path | None = None) -> dict[str, Document]:
    """Return every document, keyed by its URI. A profile in the user's folder replaces a bundled profile
    with the same name.

    The user's notes are included unless they are empty or invalid.
    """
    found = dict(_shipped())
    if own_profiles is not None:
        found |= {d.uri: d for d in _read_folder("profiles", own_profiles)}
    if notes_file is not None:
        from gpuwarden.notes import Notes, load_notes

        try:
            notes = load_notes(notes_file)  # rejects apparent secrets
        except BadRequest:
            notes = Notes()
        if notes != Notes():
            content = notes.model_dump_json(exclude_none=True, exclude_defaults=True, indent=1).encode()
            about = "The user's notes on their setup: machines, folders, tracker and key locations."
            title, kind = "The user's notes", "application/json"
            found[NOTES_URI] = Document("notes", notes_file.name, NOTES_URI, title, about, kind, content)
    return found


def entry_text(key: str) -> str:
    """Return the page section that contains an entry. Raises NotFound."""
    from gpuwarden.knowledge.catalog import shipped

    catalogue = shipped()
    gotcha = catalogue.gotcha(key)
    page = catalogue.pages[gotcha.page]
    lines = page.body.splitlines()[gotcha.line - page.first :]
    end = next((n for n, line in enumerate(lines) if n and line.startswith("## ")), len(lines))
    see_also = "".join(f"See: {ENTRY_TEMPLATE.format(id=other)}\n" for other in gotcha.see)
    return "\n".join(lines[:end]).rstrip() + f"\n\nPage: {page_uri(gotcha.page)}\n{see_also}"


@lru_cache(maxsize=1)
def _shipped() -> dict[str, Document]:
    """Return the bundled documents. They are read only once, so that a listing and later reads are consistent."""
    kinds: tuple[Literal["skills", "references", "profiles"], ...] = ("skills", "references", "profiles")
    return {d.uri: d for kind in kinds for d in _read_folder(kind, data_dir(kind))}


def _read_folder(kind: Kind, root: Path) -> Iterator[Document]:
    """Yield the documents in a folder, except hidden files, links, large files and files that are not text."""
    for file in sorted(root.rglob("*")):
        parts = file.relative_to(root).parts
        known = kind == "skills" or file.suffix == ".md"
        if not known or any(part.startswith((".", "__")) for part in parts) or file.is_symlink() or not file.is_file():
            continue
        try:
            with file.open("rb") as stream:
                content = stream.read(MAX_BYTES + 1)
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if len(content) > MAX_BYTES:
            continue
        mime_type = TYPES.get(file.suffix, "text/plain")
        front = front_matter(text) if mime_type == MARKDOWN else {}
        title = str(front.get("title") or front.get("name") or file.name)
        about = str(front.get("summary") or front.get("description") or "")
        path = "/".join(parts)
        uri = f"skill://{path}" if kind == "skills" else f"gpuwarden://{kind}/{path}"
        yield Document(kind, path, uri, title, about, mime_type, content)


def front_matter(text: str) -> dict[str, Any]:
    """Return a page's front matter, or an empty dict if it is missing or invalid.

    The page's own loader reports errors.
    """
    try:
        return read_front_matter(text, name="page").data
    except BadRequest:
        return {}
