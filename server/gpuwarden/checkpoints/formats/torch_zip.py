"""torch.save's zip archives (.pt, .pth, .bin, .ckpt): CRCs, storages, and a pickle that is read, never run."""

from __future__ import annotations

import re

from gpuwarden.checkpoints import zips
from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful, Limits, short, some
from gpuwarden.checkpoints.pickles import allow_list, symbolic, torch_objects
from gpuwarden.checkpoints.pickles.code_runners import runs_code
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.core.evidence import Cause

NAME = "torch zip"
ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
LOAD = "tensors"
_LOOKED_INTO = 20
_SMALL = 1 << 20
_PLAIN = re.compile(r"(version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id|data/[0-9]+)")


def claims(name: str, head: bytes) -> bool:
    """Return true for torch's names with a zip signature; the older format has the same names without it."""
    return name.endswith(ENDINGS) and head[:2] == b"PK"


def read(source: Source, limits: Limits) -> Anatomy:
    """Read the archive's members and the pickle's tensors, and place each tensor inside its storage."""
    members = zips.members(source, limits)
    roots = {n.split("/", 1)[0] for n in members if "/" in n}
    if len(roots) != 1 or not all("/" in n for n in members):
        raise Broken("is a zip archive, but none of torch's: its members do not share one folder")
    root = roots.pop()
    if f"{root}/data.pkl" not in members:
        raise Broken("is a zip archive without data.pkl: none of torch's, or its end was lost")
    inside = {n[len(root) + 1 :]: m for n, m in members.items()}
    found = Anatomy(NAME)
    foreign = [n for n in inside if n != "data.pkl" and not _PLAIN.fullmatch(n)]
    if foreign:
        _other_pickles(found, source, [inside[n] for n in foreign], limits)
        found.doubts.append(f"has members that torch does not write: {some(foreign)}")
    for m in members.values():
        if m.stored:
            found.spans.append(zips.span(m))
        else:
            found.doubts.append(f"member {short(m.name, 60)} is compressed; torch does not do that")
    order = zips.read(source, inside["byteorder"], 16) if "byteorder" in inside else b"little"
    if order not in (b"little", b"big"):
        raise Broken(f"states the unknown byte order {short(order, 20)}")
    found.big_endian = order == b"big"
    data = zips.read(source, inside["data.pkl"], limits.pickle)
    tree = symbolic.Machine(data, limits, names=allow_list.of_file(source.name)).run()
    if tree.end != inside["data.pkl"].size:
        found.problems.append("bytes follow the end of its pickle")
    stored = {n[5:]: (m.start, m.size) for n, m in inside.items() if n.startswith("data/") and m.stored}
    torch_objects.fill(found, tree, stored, source.name)
    return found


def _other_pickles(found: Anatomy, source: Source, members: list[zips.Member], limits: Limits) -> None:
    """Report other pickles as doubts: torch does not unpickle them, but other programs may."""
    for member in members[:_LOOKED_INTO]:
        try:
            data = zips.read(source, member, _SMALL)
            named = symbolic.Machine(data, limits).run().named
        except (Broken, Doubtful):
            continue
        evil = [n for n in named if runs_code(n)]
        if evil:
            found.refute(
                f"member {short(member.name, 60)} would run code when unpickled: {some(evil)}", Cause.RUNS_CODE
            )
