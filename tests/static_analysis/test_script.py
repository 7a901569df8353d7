"""Reading a script never runs it and never fails because of its content."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counting import lines_run
from gpuwarden.core.errors import BadRequest
from gpuwarden.static_analysis import script
from gpuwarden.static_analysis.script import Header, read_header, read_script
from wording import Wording

HEADER = """\
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "numpy>=1.26",
#
#   "torch",
# ]
# ///
"""
DEEP = {
    "syntax": "def f(:\n",
    "brackets": "(" * 10_000 + ")" * 10_000,
    "minus": "x = " + "-" * 100_000 + "1",
    "dots": "a.b" + ".c" * 50_000,
    "nul": "\x00",
    "blocks": "if 1:\n" * 3_000,
}


def test_a_pep_723_header_is_read() -> None:
    assert read_header(HEADER + "import numpy\n") == Header(("numpy>=1.26", "torch"), ">=3.11")
    assert read_header(HEADER.replace("\n", "\r\n")) == Header(("numpy>=1.26", "torch"), ">=3.11")
    assert read_header("import numpy\n") is None
    assert read_header("# /// other\n# a = 1\n# ///\n") is None


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(HEADER + "import os\n" + HEADER, id="two"),
        pytest.param("# /// script\n# dependencies = [\n# ///\n", id="no TOML"),
        pytest.param('# /// script\n# dependencies = "torch"\n# ///\n', id="no list"),
        pytest.param("# /// script\n# requires-python = 3\n# ///\n", id="no text"),
        pytest.param("# /// script\n# dependencies = []\nimport torch\n", id="open"),
        pytest.param("# /// script\n# a" + ".a" * 10_000 + " = 1\n# ///\n", id="long line"),  # once took 400 MB
        pytest.param("# /// script\n" + "# a = 1\n" * 10_000 + "# ///\n", id="many lines"),
    ],
)
def test_a_broken_header_is_reported(text: str, wording: Wording) -> None:
    with pytest.raises(BadRequest) as refused:
        read_header(text)
    theirs = refused.value.__cause__
    wording(refused, *([theirs] if theirs else []))
    assert str(refused.value) in (read_script(text).error or "")


LINES = ["# /// script", "# ///", "#", "# a = 1", "x", "", "# /// x-1", "#x", "# /// ", "# /// a b", "\r", " # ///"]


@given(st.lists(st.sampled_from(LINES), max_size=12))
def test_header_blocks_match_the_reference_expression(lines: list[str]) -> None:
    reference = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    found = re.finditer(reference, "\n".join(lines) + "\n")
    assert [(kind, list(content)) for kind, content in script.header_blocks(lines)] == [
        (match["type"], match["content"].splitlines()) for match in found
    ]


IMPORTED = "from transformers import TrainingArguments\n"


@pytest.mark.parametrize(
    "text",
    [
        lambda times: "# /// script\n" * times,
        lambda times: "# /// script\n#\n" * times,
        lambda times: IMPORTED + "TrainingArguments(output_dir='x')\n" * times,
        lambda times: IMPORTED + "".join(f"TrainingArguments(a{n}=1)\n" for n in range(times)),
        lambda times: "t = f()\nt.train()\n" * times,
    ],
    ids=["headers", "spaced", "settings", "names", "variables"],
)
def test_the_work_grows_in_proportion_to_the_text(text: Callable[[int], str]) -> None:
    assert lines_run(lambda: read_script(text(100))) < 2.5 * lines_run(lambda: read_script(text(50)))


def test_a_byte_order_mark_is_ignored_as_python_does() -> None:
    assert read_script("\ufeffimport numpy\n").third_party == ("numpy",)


def test_third_party_imports_are_found_anywhere() -> None:
    text = "import os, numpy.linalg\nfrom . import x\ndef f():\n    from torch.nn import Linear\n    import json\n"
    assert read_script(text).third_party == ("numpy", "torch")


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_an_unparsable_script_gives_a_short_error_at_most(text: str) -> None:
    facts = read_script(text)
    assert facts.error is None or ("\n" not in facts.error and len(facts.error) < 300)


@given(st.text(max_size=400))
def test_arbitrary_text_never_raises_in_the_reader(text: str) -> None:
    read_script(text)
    read_script("# /// script\n# " + text + "\n# ///\n")
