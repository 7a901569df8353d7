"""Compute the digests of all inputs that affect a verdict. Runs with different digests are not comparable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from evals.scoring.cases import Case
from evals.scoring.surface import HERE

_PACK = ("skills", "references", "profiles", "server")
_CACHES = frozenset({"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"})


def of_value(value: Any) -> str:
    """Return the digest of a value's canonical JSON as sixteen hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_files(paths: Iterable[Path], root: Path) -> str:
    """Return the digest of the names, sizes and contents of files as sixteen hex digits."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def of_case(case: Case) -> str:
    """Return the digest of a case with its scenario, its checks and the invariants."""
    return of_value(asdict(case))


def of_prompt(case: Case) -> str:
    """Return the digest of an agent's instructions."""
    return of_value([case.prompt, case.profile])


def of_scenario(case: Case) -> str:
    """Return the digest of the description of a case's scenario."""
    return of_value(asdict(case.scenario))


def of_trial(case: Case) -> dict[str, str]:
    """Return the digests that a runner writes into `trial.json`."""
    return {"case": of_case(case), "prompt": of_prompt(case), "scenario": of_scenario(case), "scorer": of_scorer()}


@cache
def of_scorer() -> str:
    """Return the digest of everything in this folder that can change a verdict: the code and the tool definitions."""
    return of_files([*HERE.rglob("*.py"), HERE / "tools.json"], HERE)


def of_pack(root: Path) -> str:
    """Return the digest of a checkout's material under test: the skills, references, profiles and server."""
    files = (p for part in _PACK for p in (root / part).rglob("*") if p.is_file() and not _CACHES & set(p.parts))
    return of_files(files, root)
