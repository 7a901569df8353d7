"""Build the documentation site into site/ from the guide, references, profiles, rules, formats and docstrings.

    python tools/build_site.py

Pages are written into build/pages/ and rendered by Zensical in strict mode. Then every link and anchor of the result is
checked. The exit code is 1 if there is a warning or a broken link. The site also has the skills as archives, with an
index from which clients can install them.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urldefrag

from gpuwarden.frontmatter import read_front_matter
from gpuwarden.knowledge.catalog import Gotcha, Page, read_tree

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
SITE = ROOT / "site"
PACKAGE = ROOT / "server" / "gpuwarden"
REPOSITORY = "https://github.com/gpuwarden/gpuwarden/blob/main/"
GUIDE = (
    "first-job",
    "your-cluster",
    "clients",
    "serving",
    "commands",
    "fan-out",
    "nodes",
    "platforms",
    "policy",
    "glossary",
    "architecture",
    "evidence",
    "corruption",
    "seeded-faults",
    "blind-set",
)
PROJECT = ("contributing", "evals", "changelog")
COPIED = {
    "README.md": "index.md",
    "SECURITY.md": "guide/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "evals/README.md": "project/evals.md",
    **{f"docs/{name}.md": f"guide/{name}.md" for name in GUIDE},
}
ASSETS = ("docs/demo.svg", "docs/icon.svg", "docs/pictures/now.png", "docs/pictures/job.png")
API = ("core/*.py", "*/base.py", "rules/facts.py", "checkpoints/file_model.py", "checkpoints/sealing/save_helper.py")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)((?:#[^)\s]+)?)\)")
HEADING = re.compile(r"^## +([A-Z][A-Z0-9-]*-\d{3})\b.*$", re.MULTILINE)
ID = re.compile(r"(?<![\w#\[`/-])([A-Z][A-Z0-9]*(?:-[A-Z]+)?-\d{3})(?![\w\]-])")
FILE = re.compile(r"`([a-z-]+\.md)`")
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
LOADS = {"tensors": "in a separate process", "parsed": "by parsing the complete file", "": "no"}
Nav = list[dict[str, object]]


def main() -> int:
    """Write the pages, render them and check the result."""
    shutil.rmtree(BUILD / "pages", ignore_errors=True)
    shutil.rmtree(SITE, ignore_errors=True)
    nav = Pages(BUILD / "pages").write()
    places = f'[project]\ndocs_dir = "pages"\nsite_dir = "site"\nnav = {toml(nav)}\n'
    config = BUILD / "zensical.toml"
    config.write_text((ROOT / "docs" / "zensical.toml").read_text("utf-8").replace("[project]\n", places, 1), "utf-8")
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean", "-f", config]
    code = subprocess.run(command, cwd=BUILD, check=False).returncode
    if not code:
        (BUILD / "site").rename(SITE)  # Zensical writes only to folders below its configuration file
        publish_skills(SITE)
    broken = [] if code else list(broken_links(SITE))
    for line in broken:
        print(line)
    return 1 if code or broken else 0


def publish_skills(site: Path) -> None:
    """Write an archive for each skill, and an index of the archives. The format is Agent Skills Discovery 0.2.0.

    Source: https://github.com/cloudflare/agent-skills-discovery-rfc
    """
    folder = site / ".well-known" / "agent-skills"
    folder.mkdir(parents=True)
    listed = []
    for page in sorted(ROOT.glob("skills/*/SKILL.md")):
        archive = folder / f"{page.parent.name}.zip"
        with zipfile.ZipFile(archive, "w") as packed:
            for file in sorted(f for f in page.parent.rglob("*") if f.is_file() and "__pycache__" not in f.parts):
                info = zipfile.ZipInfo(file.relative_to(page.parent).as_posix())  # with the same date in each build
                info.external_attr = (0o755 if os.access(file, os.X_OK) else 0o644) << 16
                packed.writestr(info, file.read_bytes(), zipfile.ZIP_DEFLATED)
        front = read_front_matter(page.read_text("utf-8"), name=page.parent.name).data
        listed.append({
            "name": front["name"], "type": "archive", "description": front["description"], "url": archive.name,
            "digest": f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}",
        })  # fmt: skip
    index = {"$schema": "https://schemas.agentskills.io/discovery/0.2.0/schema.json", "skills": listed}
    (folder / "index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def toml(value: object) -> str:
    """Return a navigation tree in TOML's inline notation."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(k)} = {toml(v)}' for k, v in value.items())} }}"
    return json.dumps(value, ensure_ascii=False)


class Pages:
    """Writes the site's Markdown pages below `target`."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.catalogue, problems = read_tree(ROOT / "references")
        if problems:
            raise SystemExit("\n".join(map(str, problems)))
        references = {f"references/{page}": f"references/{page}" for page in self.catalogue.pages}
        profiles = {f"profiles/{p.name}": f"profiles/{p.name}" for p in sorted(ROOT.glob("profiles/*.md"))}
        self.places = (
            COPIED | references | profiles | {name: name for name in ASSETS} | {"profiles": "profiles/index.md"}
        )
        self.ids = {key: f"references/{entry.page}" for key, entry in self.catalogue.gotchas.items()}
        self.ids |= dict.fromkeys(HEADING.findall(self.catalogue.page("rules.md").body), "references/rules.md")

    def write(self) -> Nav:
        """Write every page; return the navigation."""
        for source, place in COPIED.items():
            self.put(place, self.relinked(COMMENT.sub("", (ROOT / source).read_text("utf-8")), source))
        for name in ASSETS:
            (self.target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.target / name)
        pages = [p for path, p in sorted(self.catalogue.pages.items()) if path != "rules.md"]
        return [
            {"Home": "index.md"},
            {"Guide": [{name.capitalize(): f"guide/{name}.md"} for name in (*GUIDE, "security")]},
            {"Handbook": [self.reference(p) for p in pages if "/" not in p.path]},
            {"Failures and fixes": [self.reference(p) for p in pages if "/" in p.path]},
            {"Platforms": self.profiles()},
            {"Rules": next(iter(self.reference(self.catalogue.page("rules.md")).values()))},
            {"Checkpoint formats": self.formats()},
            {"API": self.api()},
            {"Project": [{name.capitalize(): f"project/{name}.md"} for name in PROJECT]},
        ]

    def put(self, place: str, text: str) -> str:
        """Write one page; return its path in the site."""
        file = self.target / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
        return place

    def relinked(self, text: str, source: str) -> str:
        """Return the text of a repository file whose links, page names and ids point to the site's pages."""
        place = self.places[source]
        parts = FENCED.split(text)
        return "".join(p if n % 2 else self._linked(p, source, place) for n, p in enumerate(parts))

    def _linked(self, text: str, source: str, place: str) -> str:
        def link(match: re.Match[str]) -> str:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
            return f"]({relative(self.places[path], place) if path in self.places else REPOSITORY + path}{match[2]})"

        def page(match: re.Match[str]) -> str:
            path = f"references/{match[1]}"
            return f"[{match[1]}]({relative(path, place)})" if path in self.places else match[0]

        def entry(match: re.Match[str]) -> str:
            key = match[1]
            return f"[{key}]({relative(self.ids[key], place)}#{key.lower()})" if key in self.ids else key

        lines = LINK.sub(link, text).split("\n")
        return "\n".join(line if line.startswith("#") else ID.sub(entry, FILE.sub(page, line)) for line in lines)

    def reference(self, page: Page) -> dict[str, object]:
        """Write a page of the references; return its navigation entry."""
        source = f"references/{page.path}"
        body = COMMENT.sub("", page.body)
        for entry in (e for e in self.catalogue.gotchas.values() if e.page == page.path):
            block = re.compile(rf"(?<=^## {entry.id} )([^\n]*\n)\s*```yaml gotcha\n.*?^```$", re.DOTALL | re.MULTILINE)
            body = block.sub(lambda m, e=entry: m[1] + told(e), body, count=1)
        body = HEADING.sub(lambda m: f"{m[0]} {{ #{m[1].lower()} }}", body)
        links = [f"- <{url}>" if url.startswith("https") else f"- [`{url}`]({REPOSITORY}{url})" for url in page.sources]
        sources = "\n".join(["", "---", "", "Sources:", "", *links]) if links else ""
        text = f"# {page.title}\n\n*{page.summary}*\n\n{body}\n"
        return {page.title: self.put(self.places[source], self.relinked(text, source) + sources + "\n")}

    def profiles(self) -> Nav:
        """Write the platforms' pages and their index."""
        nav: Nav = ["profiles/index.md"]  # type: ignore[list-item]
        rows = ["# Platforms", "", "Storage, billing and deletion on each platform, and the source of each fact.", ""]
        for file in sorted(ROOT.glob("profiles/*.md")):
            source = f"profiles/{file.name}"
            front = read_front_matter(file.read_text("utf-8"), name=file.name)
            self.put(source, self.relinked(COMMENT.sub("", front.body), source))
            nav.append({str(front.data["title"]): source})
            rows.append(f"- [{front.data['title']}]({file.name}): `{front.data['id']}`, {front.data['kind']}")
        self.put("profiles/index.md", "\n".join(rows) + "\n")
        return nav

    def formats(self) -> str:
        """Write the page of checkpoint formats and folder layouts from their modules."""
        text = "# Checkpoint formats\n\nThe formats that `verify_checkpoint` reads. It never runs code from a file.\n"
        for kind, title in (("formats", "Files"), ("layouts", "Folders")):
            text += f"\n## {title}\n"
            for file in sorted((PACKAGE / "checkpoints" / kind).glob("[a-z]*.py")):
                module = import_module(f"gpuwarden.checkpoints.{kind}.{file.stem}")
                about, anchor = (module.__doc__ or "").strip(), f"{kind}-{file.stem.replace('_', '-')}"
                text += f"\n### {module.NAME} {{ #{anchor} }}\n\n{about}\n"
                text += f"\nLoaded: {LOADS[module.LOAD]}.\n" if kind == "formats" else ""
        return self.put("formats.md", text)

    def api(self) -> Nav:
        """Write a page for each module that a rule, a plug-in or a training script imports."""
        nav: Nav = []
        for file in sorted({f for pattern in API for f in PACKAGE.glob(pattern) if not f.name.startswith("_")}):
            name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
            if ast.get_docstring(ast.parse(file.read_text("utf-8"))):
                nav.append({name.removeprefix("gpuwarden."): self.put(f"api/{name}.md", f"::: {name}\n")})
        return nav


def relative(place: str, of: str) -> str:
    """Return the relative link from one page to another."""
    return posixpath.relpath(place, posixpath.dirname(of) or ".")


def told(entry: Gotcha) -> str:
    """Return an entry's facts as Markdown."""
    facts = {"Symptom": entry.symptom, "Cause": entry.cause, "Fix": entry.fix}
    parts = ["", *(f"**{name}.** {plain(text)}" for name, text in facts.items())]
    if entry.examples:
        lines = "\n".join(f"    {line}" for example in entry.examples for line in example.splitlines())
        parts.append(f'??? example "Log lines"\n\n    ```text\n{lines}\n    ```')
    see = f" See {', '.join(entry.see)}." if entry.see else ""
    sources = ", ".join(f"[{n}]({url})" for n, url in enumerate(entry.source, 1))
    parts.append(f"Verified {entry.verified}; source {sources}.{see}")
    return "\n\n".join(parts)


def plain(text: str) -> str:
    """Escape all Markdown characters in text, except in code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if n % 2 else re.sub(r"([\\*_\[\]<>#|])", r"\\\1", p) for n, p in enumerate(parts))


class Anchors(HTMLParser):
    """Reads a page's links and ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the ids, links and sources of a tag."""
        for key, value in attrs:
            if key in {"id", "name"} and value:
                self.ids.add(value)
            elif key in {"href", "src"} and value:
                self.links.add(value)


def broken_links(site: Path) -> Iterator[str]:
    """Yield `page: link` for every internal link or anchor of a built site without a target."""
    pages = {file: Anchors(file.read_text("utf-8")) for file in sorted(site.rglob("*.html"))}
    for file, page in pages.items():
        for link in sorted(page.links) if file.name != "404.html" else ():
            target, anchor = urldefrag(link)
            if re.match(r"[a-z]+:|//", target):
                continue
            there = file if not target else Path(os.path.normpath(file.parent / unquote(target)))
            there = there / "index.html" if there.is_dir() else there
            known = pages[there].ids if there in pages else set()
            if not there.exists() or (anchor and there in pages and unquote(anchor) not in known):
                yield f"{file.relative_to(site)}: broken link {link}"


if __name__ == "__main__":
    sys.exit(main())
