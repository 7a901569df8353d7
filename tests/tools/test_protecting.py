"""A renamed module keeps its protection: `.ci/run` runs its proofs and never runs a failed one again."""

from __future__ import annotations

import pytest

from paths import ROOT

TESTS = ROOT / "tests"


def test_every_name_among_those_that_protect_matches_a_module(pytestconfig: pytest.Config) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    assert conftest is not None
    modules = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")]
    lost = [name for name in conftest.PROTECTS if not any(module.startswith(name) for module in modules)]
    assert lost == []
