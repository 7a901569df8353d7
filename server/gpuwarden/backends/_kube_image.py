"""Derive a public image's Python version and packages from its name.

No image is downloaded. Only some widely used images whose tags contain their versions are recognized.
"""

from __future__ import annotations

import re
from typing import Final

from packaging.requirements import Requirement
from packaging.version import Version

from gpuwarden.core.readiness import Needs, Readiness, Uv
from gpuwarden.static_analysis.ecosystem_tables import canonical_name, read_requirement
from gpuwarden.static_analysis.script import Header, versions_allowed

_HUB: Final = r"(?:(?:docker\.io|index\.docker\.io|registry-1\.docker\.io)/)?"
_PYTHON: Final = re.compile(rf"{_HUB}(?:library/)?python:(\d+)\.(\d+)(?:\.\d+)?(?:-[\w.-]+)?(?:@sha256:\w+)?")
_UV: Final = re.compile(r"ghcr\.io/astral-sh/uv:(?:[\d.]+-)?python(\d+)\.(\d+)-[\w.-]+(?:@sha256:\w+)?")
_TORCH: Final = re.compile(rf"{_HUB}pytorch/pytorch:(\d+\.\d+\.\d+)-cuda[\w.-]+(?:@sha256:\w+)?")
_WITHOUT: Final = re.compile(
    rf"{_HUB}nvidia/cuda:[\d.]+-(?:base|(?:cudnn\d*-)?runtime)-[\w.]+(?:@sha256:\w+)?|{_HUB}(?:library/)?(?:ubuntu|debian|alpine|busybox)(?::[\w.-]+)?(?:@sha256:\w+)?"
)
_INSTALLERS: Final = frozenset({"pip", "setuptools", "wheel", "uv"})


def image_readiness(image: str, needs: Needs) -> Readiness:
    """Return the requirements that the image is known not to meet. Pods start scripts with `python3`, not with uv."""
    where = f"in the image {image}"
    if _WITHOUT.fullmatch(image):
        return Readiness(where=where, uv=Uv.UNUSED, no_python=True)
    lacking, python, modules = list[str](), "", tuple[str, ...]()
    if plain := _PYTHON.fullmatch(image) or _UV.fullmatch(image):
        python = f"{plain[1]}.{plain[2]}"
        allowed = versions_allowed(Header((), needs.requires_python))
        if allowed and (int(plain[1]), int(plain[2])) not in allowed:
            lacking.append(f"Python {needs.requires_python}")
        modules = () if "PYTHONPATH" in needs.env else needs.modules
        lacking += [text for text in needs.dependencies if (asked := _asked(text)) and asked.name not in _INSTALLERS]
    elif built := _TORCH.fullmatch(image):
        for text in needs.dependencies:
            asked = _asked(text)
            if asked and canonical_name(asked.name) == "torch" and Version(built[1]) not in asked.specifier:
                lacking.append(text)
    return Readiness(where=where, uv=Uv.UNUSED, python=python, unmet=tuple(lacking), no_modules=modules)


def _asked(text: str) -> Requirement | None:
    """Parse a requirement; None if it is invalid, or if it has an environment marker."""
    asked = read_requirement(text)
    return None if asked is None or asked.marker else asked
