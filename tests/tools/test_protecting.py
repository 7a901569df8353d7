"""Rules for the whole suite: a renamed module keeps its protection in `.ci/run`, and tests read no running clock."""

from __future__ import annotations

import re

import pytest

from paths import ROOT

TESTS = ROOT / "tests"


def test_every_protecting_name_matches_a_test(pytestconfig: pytest.Config) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    assert conftest is not None
    modules = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")]
    named = [name.partition("::") for name in conftest.PROTECTS]
    assert [start for start, _, _ in named if not any(module.startswith(start) for module in modules)] == []
    tests = {file: (TESTS / file).read_text("utf-8") for file, _, test in named if test}
    assert [test for file, _, test in named if test and f"def {test}" not in tests[file]] == []


def test_tests_never_read_a_running_clock() -> None:
    clocks = re.compile(r"perf_" r"counter|process_" r"time|time\.time\(\)|mono" r"tonic\(")
    allowed = (TESTS / "kits/waiting.py", TESTS / "corpus")
    found = [path for path in TESTS.rglob("*.py") if clocks.search(path.read_text("utf-8", "replace"))]
    assert [path for path in found if not any(path.is_relative_to(one) for one in allowed)] == []
