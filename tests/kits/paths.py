"""Paths in this repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
KITS = TESTS / "kits"
CORPUS = TESTS / "corpus"
FIXTURES = TESTS / "fixtures"
