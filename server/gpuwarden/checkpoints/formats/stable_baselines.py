"""Read Stable-Baselines3 archives (.zip), which contain torch archives and a JSON file with pickled settings."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import replace
from typing import Any, Final

from gpuwarden.checkpoints import zips
from gpuwarden.checkpoints.file_model import Anatomy, Broken, Limits, Span, some
from gpuwarden.checkpoints.formats import torch_zip
from gpuwarden.checkpoints.formats.json import parse
from gpuwarden.checkpoints.pickles import symbolic, torch_objects
from gpuwarden.checkpoints.pickles.allow_list import Names, canonical
from gpuwarden.checkpoints.pickles.nodes import Call, Global
from gpuwarden.checkpoints.safe_file import Source, Window

NAME = "stable-baselines3"
LOAD = "tensors"
_SETTINGS, _POLICY = "data", "policy.pth"
_TEXTS = ("_stable_baselines3_version", "system_info.txt")
_PICKLED = ":serialized:"
_UNITS = "stable_baselines3.common.type_aliases"
_FREQUENCY = (_UNITS, "TrainFreq")


class _Settings(Names):
    """The allowed classes and functions in pickled settings, including one named tuple."""

    def call(self, made: Call) -> str:
        """Return the reason why a call may be unsafe; "" if the call is harmless."""
        tuple_of_two = made.new and isinstance(made.func, Global) and canonical(made.func) == _FREQUENCY
        return "" if tuple_of_two else super().call(made)


# Classes from the library, Gymnasium and torch. Instances are created without calling the class.
_OWN = r"(stable_baselines3|sb3_contrib)(\.(?!type_aliases)\w+)+:\w+|gymnasium\.spaces\.\w+:\w+|torch\.optim\.\w+:\w+"
NAMES: Final = _Settings(
    records=re.compile(_OWN),
    enums=frozenset({(_UNITS, "TrainFrequencyUnit")}),
    values=frozenset({_FREQUENCY}),
)


def claims(name: str, head: bytes) -> bool:
    """Return true for an archive whose first member is named `data`; in torch's archives, `data` is in a folder."""
    return name.endswith(".zip") and head[:4] == b"PK\3\4" and head[26:28] == b"\4\0" and head[30:34] == b"data"


def read(source: Source, limits: Limits) -> Anatomy:
    """Read the archive's members: the pickled settings, without unpickling them, and each archive of tensors."""
    found = Anatomy(NAME)
    members = zips.members(source, limits)
    missing = [name for name in (_SETTINGS, _POLICY) if name not in members]
    if missing:
        raise Broken(f"lacks {some(missing)}")
    packed = [m.name for m in members.values() if not m.stored]
    if packed:
        found.doubt(f"has compressed members, which the library never writes: {some(packed)}")
    found.spans = [zips.span(m) for m in members.values() if m.stored and not m.name.endswith(".pth")]
    _settings(found, parse(zips.read(source, members[_SETTINGS], limits.json), found), limits)
    for m in members.values():
        if m.name.endswith(".pth") and m.stored:
            part = torch_zip.read(Window(source, m.start, m.size, m.name), limits)
            found.adopt(part)
            found.unproved += part.unproved
            prefix = m.name[: -len(".pth")]
            found.tensors += [replace(t, name=f"{prefix}.{t.name}", start=t.start + m.start) for t in part.tensors]
            found.spans += [Span(f"{m.name}/{s.label}", s.start + m.start, s.end + m.start, s.crc) for s in part.spans]
    others = [n for n in members if n not in (_SETTINGS, *_TEXTS) and not n.endswith(".pth")]
    if others:
        found.unproved.append(f"the content of {some(others)}")
    found.proved.append(f"all {len(members):,} members exist; they contain {len(found.tensors):,} tensors")
    return found


def _settings(found: Anatomy, settings: Any, limits: Limits) -> None:
    """Check every pickled setting. Stable-Baselines3 unpickles all of them when it loads the archive."""
    if not isinstance(settings, dict):
        raise Broken(f"{_SETTINGS} is not a JSON object")
    count = 0
    for name, value in settings.items():
        text = value.get(_PICKLED) if isinstance(value, dict) else None
        if not isinstance(text, str):
            continue
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as why:
            raise Broken(f"setting {name} is not valid base64") from why
        tree = symbolic.Machine(raw, limits, names=NAMES).run()
        inner = Anatomy(NAME)
        torch_objects.judge(inner, tree, NAMES)
        found.problems += [f"setting {name} {line}" for line in inner.problems]
        found.doubts += [f"setting {name} {line}" for line in inner.doubts]
        found.causes += inner.causes
        count += 1
    found.proved.append(f"{count:,} pickled settings were read without running code")
