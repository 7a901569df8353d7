"""The strict front matter reader: the input that it accepts, and the location of errors in the rest."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from gpuwarden import frontmatter
from gpuwarden.core.errors import BadRequest
from gpuwarden.frontmatter import load_front_matter, parse_yaml, read_front_matter
from wording import Wording


class Page(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str
    on: bool = False
    tags: tuple[str, ...] = ()


def test_front_matter_gives_data_body_and_body_start_line():
    data, body, line = read_front_matter("---\nid: a\ntags: [x, y]\n---\n# Title\ntext\n", name="a.md")
    assert data == {"id": "a", "tags": ["x", "y"]}
    assert body == "# Title\ntext\n"
    assert line == 5


def test_windows_line_ends_and_a_byte_order_mark_read_the_same():
    text = "---\nid: a\n---\n# Title\n"
    assert read_front_matter("\ufeff" + text.replace("\n", "\r\n"), name="a.md") == read_front_matter(text, name="a.md")


@pytest.mark.parametrize(
    ("front", "value"),
    [
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("True", "True"),
        ("true", True),
        ("2026-08", "2026-08"),
        ("2026-08-20", "2026-08-20"),
        ("1:30", "1:30"),
        ("0o17", "0o17"),
        ("017", "017"),
        ("1_000", "1_000"),
        ("12", 12),
        ("-1.5", -1.5),
        ("1e3", "1e3"),
        (".inf", ".inf"),
        ("null", None),
        ("~", None),
        ("", None),
        ("'null'", "null"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_only_json_types_are_read_into_plain_scalars(front: str, value: object):
    data = read_front_matter(f"---\nid: {front}\n---\n", name="a.md").data
    assert data == {"id": value}
    assert type(data["id"]) is type(value)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        pytest.param("", "a.md:1:", id="empty"),
        pytest.param("id: a\n", "a.md:1:", id="no-head"),
        pytest.param("---\nid: a\n", "a.md:1:", id="not-closed"),
        pytest.param("---\n---\n", "a.md:2:", id="nothing"),
        pytest.param("---\n- a\n---\n", "a.md:2:", id="list"),
        pytest.param("---\nid: a\nid: b\n---\n", "a.md:3:", id="twice"),
        pytest.param("---\nx:\n  y: 1\n  y: 2\n---\n", "a.md:4:", id="twice-inside"),
        pytest.param("---\n1: a\n---\n", "a.md:2:", id="number-as-key"),
        pytest.param("---\n[a]: b\n---\n", "a.md:2:", id="list-as-key"),
        pytest.param("---\nid: &a 1\n---\n", "a.md:2:", id="anchor"),
        pytest.param("---\nid: 1\nx: *a\n---\n", "a.md:3:", id="alias"),
        pytest.param("---\nid: !!python/name:os.system x\n---\n", "a.md:2:", id="python-tag"),
        pytest.param("---\nid: !!timestamp 2026-01-01\n---\n", "a.md:2:", id="timestamp-tag"),
        pytest.param("---\nid: a\nb: \x07\n---\n", "a.md:3:", id="bell"),
        pytest.param("---\nid: äöü\nb: \x07\nc: 1\n---\n", "a.md:3:", id="bell-after-umlauts"),
        pytest.param("---\nid: \ud800\n---\n", "a.md:2:", id="surrogate"),
        pytest.param("---\nid: " + "[" * 20_000 + "\n---\n", "a.md:2:", id="too-deep"),
        pytest.param("---\nid: " + "x" * (1 << 20) + "\n---\n", "a.md:2:", id="too-long"),
    ],
)
def test_every_refusal_names_file_and_line(text: str, where: str, wording: Wording):
    with pytest.raises(BadRequest) as caught:
        read_front_matter(text, name="a.md")
    assert caught.value.message.startswith(where)
    wording(caught.value.message)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("text", "where"),
    [
        pytest.param("---\nid: a\nx: [1, 2\n---\n", "a.md:", id="open-list"),
        pytest.param("---\nid: a\n\tx: 1\n---\n", "a.md:3:", id="tab"),
        pytest.param('---\nid: "\\ud800"\n---\n', "a.md:2:", id="escaped-surrogate"),
        pytest.param("---\nid: a\n...\nb: 1\n---\n", "a.md:", id="two-documents"),
    ],
)
def test_every_yaml_library_error_names_file_and_line(text: str, where: str):
    with pytest.raises(BadRequest) as caught:
        read_front_matter(text, name="a.md")
    assert caught.value.message.startswith(where)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("front", "place"),
    [
        ("id: a\ncolour: red", "a.md:3: colour: "),
        ("id: a\n\ntags:\n  - x\n  - 7", "a.md:6: tags.1: "),
        ("id: a\non: yes", "a.md:3: on: "),
        ("id: a\non: 1", "a.md:3: on: "),
        ("on: true", "a.md:2: id: "),
    ],
)
def test_a_model_is_filled_without_coercion_and_errors_have_lines(front: str, place: str):
    with pytest.raises(BadRequest) as caught:
        load_front_matter(Page, f"---\n{front}\n---\n", name="a.md")
    assert caught.value.message.startswith(place) and ";" not in caught.value.message, "one fault"


def test_many_faults_are_counted_and_not_all_shown():
    front = "\n".join(f"k{i}: 1" for i in range(50))
    with pytest.raises(BadRequest, match=r"\b48\b") as caught:
        load_front_matter(Page, f"---\n{front}\n---\n", name="a.md")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "front", ["id: a\n" + "k" * 900 + ": 1", "k: 1\nk: 2".replace("k", "k" * 100), "? " + "k" * 9000]
)
def test_a_long_name_does_not_flood_the_error(front: str):
    with pytest.raises(BadRequest) as caught:
        load_front_matter(Page, f"---\n{front}\n---\n", name="a.md")
    assert len(caught.value.message) < 700


DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.text(st.characters(codec="utf-8", exclude_categories=["C"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), PLAIN, min_size=1, max_size=4))
def test_plain_data_round_trips(value: dict[str, object]):
    assert (
        read_front_matter(f"---\n{json.dumps(value, indent=1, ensure_ascii=False)}\n---\n", name="a.md").data == value
    )
    assert (
        read_front_matter(f"---\n{yaml.dump(value, Dumper=DUMPER, allow_unicode=True)}---\n", name="a.md").data == value
    )


@given(st.text())
def test_any_text_is_read_or_refused(text: str):
    refusal = None
    try:
        read_front_matter(f"---\n{text}\n---\n", name="a.md")
    except BadRequest as error:
        refusal = error.message
    assert refusal is None or refusal.startswith("a.md:")


def test_a_line_is_found_despite_path_steps_missing_in_the_file():
    parsed = parse_yaml("a:\n  b: 1\n", name="x", first_line=10)
    assert parsed.line_of(("a", "function-after", "b", "UnknownFact")) == 11
    assert parsed.line_of(("nowhere",)) == 10


@pytest.fixture(scope="module")
def plain() -> Iterator[ModuleType]:
    """The module as it is if PyYAML was built without libyaml."""
    spec = importlib.util.spec_from_file_location("plain_frontmatter", frontmatter.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "yaml.cyaml", None)
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        assert issubclass(module._Loader, yaml.scanner.Scanner)
        yield module


@pytest.mark.parametrize("escape", ["\\U00110000", "\\UFFFFFFFF", "\\ud800", "\\q"])
def test_an_invalid_escape_is_refused_with_and_without_libyaml(plain: ModuleType, escape: str):
    for module in (frontmatter, plain):
        with pytest.raises(BadRequest, match="x:1:"):
            module.parse_yaml(f'a: "{escape}"\n', name="x")


@given(st.text(alphabet=st.sampled_from("ab:-?[]{},'\"|>#&*! 1~\n\\"), max_size=20))
def test_libyaml_and_python_read_the_same_values(plain: ModuleType, text: str):
    def read(module: ModuleType) -> object:
        try:
            return module.parse_yaml(text, name="x").value
        except BadRequest:
            return BadRequest

    first, second = read(frontmatter), read(plain)
    assert BadRequest in (first, second) or first == second
