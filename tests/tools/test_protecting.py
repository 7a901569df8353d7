"""A renamed module keeps its protection: `.ci/run` runs its proofs and never runs a failed one again."""

from __future__ import annotations

import pytest

from paths import ROOT

TESTS = ROOT / "tests"


def test_every_name_among_those_that_protect_matches_a_test(pytestconfig: pytest.Config) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    assert conftest is not None
    modules = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")]
    named = [name.partition("::") for name in conftest.PROTECTS]
    assert [start for start, _, _ in named if not any(module.startswith(start) for module in modules)] == []
    tests = {file: (TESTS / file).read_text("utf-8") for file, _, test in named if test}
    assert [test for file, _, test in named if test and f"def {test}" not in tests[file]] == []
