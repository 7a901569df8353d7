"""Read `profiles/*.md` strictly, and generate the tables in their prose.

The code reads only a profile's front matter. The prose does not repeat the facts in the front matter; it shows them in
blocks that `render_blocks` generates:

    <!-- generated:storage -->
    ...
    <!-- /generated -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from gpuwarden.core.errors import BadRequest, NotFound
from gpuwarden.core.profile import Profile, Sourced, UnknownFact
from gpuwarden.data import data_dir
from gpuwarden.frontmatter import MAX_CHARS, load_front_matter

_ID = re.compile(r"[a-z0-9][a-z0-9_-]*")
BY_HAND = (
    "gpuwarden has no provider for this platform, so it can't rent, get a price, read the meter, stop or release here. "
    "Rent and release in the console, and run jobs there as `ssh/ALIAS`; no gate then checks this platform's billing. "
    "`rehearsal/NAME` simulates the platform with pretend money."
)
BLOCK = re.compile(r"<!-- generated:([a-z]+) -->\n.*?<!-- /generated -->", re.DOTALL)


def profile_names(own: Path | None = None) -> list[str]:
    """Return the sorted ids of all profiles: the shipped profiles and the profiles in the user's folder `own`."""
    return sorted({file.stem for folder in _folders(own) for file in folder.glob("*.md") if _ID.fullmatch(file.stem)})


def load_profile(id: str, own: Path | None = None) -> Profile:  # noqa: A002
    """Return the profile `id`; the user's folder `own` takes precedence over the shipped profiles.

    Raises NotFound, or BadRequest with the file and the line.
    """
    file = profile_file(id, own)
    stamp: tuple[int, ...] = ()
    with suppress(OSError):
        info = file.stat()
        stamp = (info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino)
    profile = _load(file, *stamp)
    if profile.id != id:
        raise BadRequest(f"{file}: its id is {profile.id!r}", f"Name the file {profile.id}.md or write id: {id}.")
    return profile


def profile_file(id: str, own: Path | None = None) -> Path:  # noqa: A002
    """Return the path of the profile `id`. Raises NotFound."""
    if not _ID.fullmatch(id):
        raise NotFound(f"{id!r} is not a valid platform name", f"Platforms: {', '.join(profile_names(own))}.")
    for folder in _folders(own):
        file = folder / f"{id}.md"
        if file.is_symlink() or file.exists():  # also return an unreadable file, so that reading it raises the error
            return file
    raise NotFound(f"unknown platform {id!r}", f"Platforms: {', '.join(profile_names(own)) or 'none'}.")


@lru_cache(maxsize=64)  # parsing YAML takes tens of milliseconds, and every use case loads profiles many times
def _load(file: Path, *_stamp: int) -> Profile:
    return load_text(_read(file), str(file))


def load_text(text: str, name: str) -> Profile:
    """Read one profile; `name` appears in errors. Raises BadRequest with `name` and the line."""
    return load_front_matter(Profile, text, name=name)[0]


def render_blocks(text: str, name: str) -> str:
    """Return a profile's text with every generated block rendered from its front matter. Raises BadRequest."""
    text = text.replace("\r\n", "\n")
    profile, body, _ = load_front_matter(Profile, text, name=name)

    def block(match: re.Match[str]) -> str:
        if match[1] not in BLOCKS:
            raise BadRequest(f"{name}: unknown generated block {match[1]!r}", f"Blocks: {', '.join(BLOCKS)}.")
        lines = "\n".join(BLOCKS[match[1]](profile))
        return f"<!-- generated:{match[1]} -->\n{lines}\n<!-- /generated -->"

    return text.removesuffix(body) + BLOCK.sub(block, body)


def rewrite_blocks() -> int:
    """Render the generated blocks of the shipped profiles; return the number of changed files."""
    changed = 0
    for file in sorted(data_dir("profiles").glob("*.md")):
        text = _read(file)
        new = render_blocks(text, file.name)
        if new != text:
            file.write_text(new, "utf-8")
            changed += 1
    return changed


def _folders(own: Path | None) -> list[Path]:
    return [folder for folder in (own, data_dir("profiles")) if folder is not None]


def _read(file: Path) -> str:
    try:
        with file.open(encoding="utf-8") as stream:
            return stream.read(MAX_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{file}: can't be read as text: {error}", f"Correct or remove {file}.") from error


# ------------------------------------------------------------------------------------------------ generated blocks


def _summary(p: Profile) -> list[str]:
    rows = [("kind", p.kind), ("backend", p.backend), ("provider", p.provider or "none")]
    table = markdown_table(("what", "value"), [*rows, ("user", p.user or "yours")])
    return [*table, "", BY_HAND] if p.by_hand else table


def _storage(p: Profile) -> list[str]:
    head = (
        "tier",
        "path",
        "there",
        "stop",
        "terminate",
        "interruption",
        "bills when stopped",
        "bills when terminated",
        "note",
    )
    no_verb = "no such verb"
    rows = [
        (
            t.tier,
            f"`{t.path}`",
            t.present.replace("_", " "),
            no_verb if p.verbs.stop is None else _fate(t.survives.stop),
            no_verb if p.verbs.terminate is None else _fate(t.survives.terminate),
            _fate(t.survives.preemption) if p.spot.offered else "none sold",
            _fact(t.bills_when_stopped),
            _fact(t.bills_when_terminated),
            t.note,
        )
        for t in p.storage
    ]
    return [*markdown_table(head, rows), "", *_sources(p.storage)]


def _meter(p: Profile) -> list[str]:
    m, v = p.meter, p.verbs
    rows = [
        ("metered", _fact(m.metered)),
        ("a job uses up", "" if m.counts == "money" else m.counts.replace("_", " ")),
        ("compute stops billing after", ", ".join(m.stops_on) or "-"),
        ("something is still billed after", ", ".join(m.residue) or "-"),
        ("counted in steps of (s)", _fact(m.granularity_s) if m.metered else "-"),
        ("note", m.note),
        ("`stop` is called", v.stop or "no such verb"),
        ("`terminate` is called", v.terminate or "no such verb"),
        ("terminate needs a stop first", _fact(v.terminate_needs_stop)),
        ("can be undone", ", ".join(v.reversible) or "-"),
        ("on the verbs", v.note),
    ]
    return [*markdown_table(("what", "value"), [row for row in rows if row[1]]), "", *_sources((m, v))]


def _interruptions(p: Profile) -> list[str]:
    s = p.spot
    rows = [("sold as interruptible", _fact(s.offered))]
    if s.offered or "signal" in s.model_fields_set:
        rows += [("signal", _fact(s.signal)), ("grace (s)", _fact(s.grace_s)), ("then", _fact(s.then))]
        rows += [("restarts automatically", _fact(s.auto_resume))]
    table = markdown_table(("what", "value"), [*rows, *([("note", s.note)] if s.note else [])])
    lines = [*table, "", *_sources((s,))]
    u = p.unattended
    if u is None:
        return lines
    dates = {"none": "none", "stop": "the machine is stopped", "terminate": "the machine is ended"}
    dates["unreliable"] = "unreliable: it is accepted, but no effect was observed"
    date = _fact(u.end_date) if isinstance(u.end_date, UnknownFact) else dates[u.end_date]
    rows = [("can stop itself", _fact(u.self_stop)), ("at an end date", date), ("note", u.note)]
    table = markdown_table(("when unattended", "value"), [row for row in rows if row[1]])
    return [*lines, "", *table, "", *_sources((u,))]


def _surface(p: Profile) -> list[str]:
    clocks = [(c.trigger, _fact(c.after), c.effect) for c in p.danger_clocks]
    lines = (
        [*markdown_table(("danger clock", "after", "what happens"), clocks), "", *_sources(p.danger_clocks), ""]
        if clocks
        else []
    )
    return [*lines, *(f"- {line}" for line in p.conveniences)] or ["Nothing in particular."]


BLOCKS: dict[str, Callable[[Profile], list[str]]] = {
    "summary": _summary,
    "storage": _storage,
    "meter": _meter,
    "interruptions": _interruptions,
    "surface": _surface,
}


def _fact(value: object) -> str:
    if isinstance(value, UnknownFact):
        return f"unknown ({value.unknown})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _fate(value: bool | UnknownFact) -> str:
    return _fact(value) if isinstance(value, UnknownFact) else "kept" if value else "lost"


def _sources(blocks: Iterable[Sourced]) -> list[str]:
    found = dict.fromkeys(f"{block.source} ({block.verified})" for block in blocks)
    return ["Source: " + "; ".join(found) + "."]


def markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the lines of a Markdown table."""
    cells = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in cells]
