"""Compare the texts of an interface with the golden files in `tests/texts`, which `make texts` regenerates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paths import TESTS

TEXTS = TESTS / "texts"
BETWEEN = "\n---\n"
NUMBER = re.compile(r"(?<![A-Za-z<])\d[\d.,:]*(?<=\d)")


class Wording:
    """Compare the texts of one test with the golden file of its folder, or collect them for it."""

    def __init__(self, golden: list[str] | None, temporary: Path) -> None:
        self.golden = golden
        self.temporary = temporary
        self.texts: list[str] = []

    def __call__(self, said: str | BaseException | pytest.ExceptionInfo[BaseException], *values: object) -> None:
        """Compare a text or an error's message.

        Each of `values` must be in it. The golden file has `<1>`, `<2>` ... in their places, `<tmp>` for the tests'
        folder and `#` for numbers, so that it contains only wording.
        """
        whole = str(said.value if isinstance(said, pytest.ExceptionInfo) else said)
        text = re.sub(rf"{re.escape(str(self.temporary))}[^\s'\"`),;]*", "<tmp>", whole)
        for place, value in enumerate(values, 1):
            assert str(value) in whole
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(str(value))}(?![A-Za-z0-9])", f"<{place}>", text)
        text = NUMBER.sub("#", text)
        text = "\n".join(line.rstrip() for line in text.strip().splitlines())
        self.texts.append(text)
        if self.golden is not None:
            number = len(self.texts)
            assert [text] == self.golden[number - 1 : number], "another wording: if it is better, run `make texts`"


def file_of(nodeid: str) -> tuple[Path, str]:
    """Return a test's golden file and its key there."""
    module, _, name = nodeid.removeprefix("tests/").partition("::")
    folders = module.split("/")[:-1]
    folder = folders[1] if folders[0] == "interfaces" and len(folders) > 1 else folders[0]
    return TEXTS / f"{folder}.txt", f"{module.rsplit('/', 1)[-1].removesuffix('.py')}::{name}"


def read(file: Path) -> dict[str, str]:
    """Return a golden file's texts, keyed by test."""
    parts = re.split(r"^== (.*)\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE) if file.exists() else [""]
    return {key: text.rstrip("\n") for key, text in zip(parts[1::2], parts[2::2], strict=True)}


def write(file: Path, texts: dict[str, str]) -> None:
    """Write a golden file, sorted by test."""
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(f"== {key}\n{texts[key]}\n" for key in sorted(texts)), encoding="utf-8")


class Regenerating:
    """Collect the texts from all workers, and write them at the end."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.there: set[str] = set()
        self.ran: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Record all collected tests, before any are deselected."""
        if not any("::" in argument for argument in config.args):
            self.there |= {item.nodeid for item in items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test that ran and was not skipped: its old texts are removed."""
        if report.when == "call" and not report.skipped:
            self.ran.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the texts from a worker that has ended."""
        self.texts |= node.workeroutput["texts"]
        self.there |= set(node.workeroutput["there"])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Pass the texts to the controller, or write them. Old texts are kept if their test exists and did not run."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput |= {"texts": self.texts, "there": sorted(self.there)}
            return
        there, ran = ({file_of(nodeid) for nodeid in nodeids} for nodeids in (self.there, self.ran))
        modules = {(file, key.partition("::")[0]) for file, key in there}
        for file in {file for file, _ in there | ran}:
            kept = {
                key: text
                for key, text in read(file).items()
                if (file, key) not in ran and ((file, key) in there or (file, key.partition("::")[0]) not in modules)
            }
            fresh = {
                key: text for (home, key), text in ((file_of(n), t) for n, t in self.texts.items()) if home == file
            }
            if kept or fresh:
                write(file, kept | fresh)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--texts`."""
    parser.addoption("--texts", action="store_true", help="write tests/texts again with the texts of this run")


def pytest_configure(config: pytest.Config) -> None:
    """Collect texts if `--texts` is given."""
    if config.getoption("--texts"):
        config.pluginmanager.register(Regenerating(), "regenerating")


@pytest.fixture
def wording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wording]:
    """Compare the texts of an interface with the golden file of the test's folder."""
    regenerating = request.config.pluginmanager.get_plugin("regenerating")
    file, key = file_of(request.node.nodeid)
    texts = read(file).get(key)
    golden = None if regenerating else texts.split(BETWEEN) if texts is not None else []
    compared = Wording(golden, tmp_path_factory.getbasetemp())
    yield compared
    if regenerating and compared.texts:
        regenerating.texts[request.node.nodeid] = BETWEEN.join(compared.texts)
