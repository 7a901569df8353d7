"""Read torch.save's zip archives (.pt, .pth, .bin, .ckpt): CRCs, storages, and a pickle, which is never run.

TorchScript and torch.package write archives with the same file extensions. A TorchScript archive contains tensors and a
program; a torch.package archive contains Python modules. Loading either archive runs code, so both are reported as
doubtful.
"""

from __future__ import annotations

import re

from gpuwarden.checkpoints import zips
from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful, Limits, Unread, short, some
from gpuwarden.checkpoints.pickles import allow_list, symbolic, torch_objects
from gpuwarden.checkpoints.pickles.code_runners import runs_code
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.core.evidence import Cause

NAME = "torch zip"
ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pth.tar", ".pt.tar", ".ckpt.tar")
LOAD = "tensors"
_LOOKED_INTO = 20
_SMALL = 1 << 20
_PLAIN = re.compile(r"(version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id|data/[0-9]+)")
_SCRIPT = re.compile(
    r"((constants|traced_inputs)(\.pkl|/[0-9]+)|code/.*|extra/.*|attributes\.pkl|model\.json|tensors/.*)"
)


def claims(name: str, head: bytes) -> bool:
    """Return true for torch's file extensions if the file begins like a zip archive. Older torch files do not."""
    return name.endswith(ENDINGS) and head[:2] == b"PK"


def read(source: Source, limits: Limits) -> Anatomy:
    """Read the archive's members and the pickle's tensors, and locate each tensor in its storage."""
    members = zips.members(source, limits)
    roots = {n.split("/", 1)[0] for n in members}
    root = roots.pop() if len(roots) == 1 else ""
    if f"{root}/data.pkl" not in members:
        return _not_of_torch_save(source, members, limits)
    inside = {n[len(root) + 1 :]: m for n, m in members.items()}
    found = Anatomy(NAME)
    script = "constants.pkl" in inside and any(n.startswith("code/") for n in inside)
    foreign = [n for n in inside if n != "data.pkl" and not _PLAIN.fullmatch(n)]
    if foreign:
        _other_pickles(found, source, [inside[n] for n in foreign], limits)
    if script:
        found.format = "torchscript"
        found.doubt("is a TorchScript archive: loading it runs the program inside it", Cause.NEEDS_CODE)
        foreign = [n for n in foreign if not _SCRIPT.fullmatch(n)]
    if foreign:
        found.doubt(f"has members that torch never writes: {some(foreign)}")
    _sums(found, source, inside, script)
    order = zips.read(source, inside["byteorder"], 16) if "byteorder" in inside else b"little"
    if order not in (b"little", b"big"):
        raise Broken(f"specifies the unknown byte order {short(order, 20)}")
    found.big_endian = order == b"big"
    data = zips.read(source, inside["data.pkl"], limits.pickle)
    tree = symbolic.Machine(data, limits, names=allow_list.of_file(source.name)).run()
    if tree.end != inside["data.pkl"].size:
        found.refute("bytes follow the end of its pickle", Cause.CONTRADICTION)
    if script:  # The pickle's classes are part of the program, which has already been recorded as a doubt.
        tree.named = {n: None for n in tree.named if n.module.split(".")[0] != "__torch__"}
    stored = {n[5:]: (m.start, m.size) for n, m in inside.items() if n.startswith("data/") and m.stored}
    torch_objects.fill(found, tree, stored, source.name, limits)
    return found


def _sums(found: Anatomy, source: Source, inside: dict[str, zips.Member], script: bool) -> None:
    """Add the spans that have a CRC. torch compresses only members that contain a program's source text."""
    packed = [n for n, m in inside.items() if not m.stored and not (script and _SCRIPT.fullmatch(n))]
    if packed:
        found.doubt(f"has compressed members, which torch never writes: {some(packed)}")
    stored = [m for m in inside.values() if m.stored]
    # With `torch.serialization.skip_data`, torch reserves space for the storages and omits their checksums.
    reserved = [m for n, m in inside.items() if n.startswith("data/") and m.stored and m.size and not m.crc]
    found.spans += [zips.span(m) for m in stored if not m.unchecked and m not in reserved]
    if reserved or any(m.unchecked for m in stored):
        found.warnings.append("was written without checksums: a changed byte goes undetected")
    if reserved and not reserved[0].unchecked:
        found.later.append(lambda: _filled(found, source, reserved))


def _filled(found: Anatomy, source: Source, reserved: list[zips.Member]) -> None:
    """Report storages whose reserved space was never written."""
    empty = [
        m.name
        for m in reserved
        if not any(any(source.at(m.start + at, min(_SMALL, m.size - at))) for at in range(0, m.size, _SMALL))
    ]
    if empty:
        found.refute(f"is incomplete: it was saved with skip_data, but {some(empty)} was never written")


def _not_of_torch_save(source: Source, members: dict[str, zips.Member], limits: Limits) -> Anatomy:
    """Return the findings about a torch.package archive. Raises Unread if another program wrote the archive."""
    if any(n.endswith("/.data/extern_modules") for n in members):
        found = Anatomy("torch package")
        found.doubt("is a torch.package archive: loading it runs the Python modules inside it", Cause.NEEDS_CODE)
        found.spans += [zips.span(m) for m in members.values() if m.stored]
        _other_pickles(found, source, [m for n, m in members.items() if n.endswith(".pkl")], limits)
        return found
    raise Unread("is a zip archive that torch.save did not write: it has no single root folder with data.pkl")


def _other_pickles(found: Anatomy, source: Source, members: list[zips.Member], limits: Limits) -> None:
    """Report other pickles in the archive that would run code. torch does not load them, but other programs may."""
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
