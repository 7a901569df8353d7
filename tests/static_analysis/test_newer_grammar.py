"""A script is parsed with the grammar of the Pythons that its header allows, whichever Python runs gpuwarden."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from counting import lines_run
from gpuwarden.core.models import Known
from gpuwarden.core.readiness import Readiness
from gpuwarden.core.rules import Severity
from gpuwarden.lifecycle.submission.needs import needs_of_job
from gpuwarden.remote.host.interpreter import uv_run
from gpuwarden.rules.pf_src_001_script_parses import script_parses
from gpuwarden.static_analysis.newer_grammar import newer_constructs, newest, parse_newer
from gpuwarden.static_analysis.script import Header, parse, read_script, start_header, versions_allowed
from newer_python import NewerPython, newer_python, plain
from real_parts import need
from rule_kit import script, submit

HEADER = '# /// script\n# requires-python = "{}"\n# dependencies = ["torch"]\n# ///\n'

# Newer source, its equivalent in Python 3.11, and the release that it requires.
SPACED = "x = f'{a!s }'"  # ruff accepts it for every release
BARE = "x = f'{a['b'] for a in b}'"  # ruff accepts it
DEEP = "x = f'{a:{b:{c:{d}}}}'"  # ruff accepts it
READ = [
    ("def f[T: (int, str), *Ts, **P](x: T) -> T: ...", "def f(x: T) -> T: ...", (3, 12)),
    ("async def f[T](): ...", "async def f(): ...", (3, 12)),
    ("class A[\n    T,\n](B):\n    x = 1", "class A(B):\n    x = 1", (3, 12)),
    ("class A[T]: x = 1", "class A: x = 1", (3, 12)),
    ("type X[T: int] = list[T]", "X = list[T]", (3, 12)),
    ("if a: type type = int", "if a: type = int", (3, 12)),
    ("def f[T: x[f'{d['a']}'], U: '['](): ...", "def f(): ...", (3, 12)),
    ("type \u2118[T\u0303] = f'{d['a']}'", "\u2118 = f'{d[\"a\"]}'", (3, 12)),
    ("type X = a; type Y[T] = b; z = c", "X = a; Y = b; z = c", (3, 12)),
    ('x = f"{d["a"]}"', "x = f\"{d['a']}\"", (3, 12)),
    ('x = f"{f"{f"{1}"}"}"', 'x = f"""{f"{f\'{1}\'}"}"""', (3, 12)),
    ("x = f'{\n  a  # why\n}'", "x = f'{a}'", (3, 12)),
    ('x = f"{d["a"]!r:>{w["b"]}.2f} {{}} \\N{EM DASH}"', "x = f\"{d['a']!r:>{w['b']}.2f} {{}} \\N{EM DASH}\"", (3, 12)),
    ("x = rf'\\d{a['b']}' 'c' f'{e}'", "x = rf'\\d{a[\"b\"]}' 'c' f'{e}'", (3, 12)),
    ('x = f"{d["a"] = }"', "x = f'''d[\"a\"] = {d['a']!r}'''", (3, 12)),
    (SPACED, "x = f'{a!s}'", (3, 12)),
    ("class A[T = int, *Ts = *tuple[int]]: ...", "class A: ...", (3, 13)),
    ("try: f()\nexcept A, B: g()", "try: f()\nexcept (A, B): g()", (3, 14)),
    ("try: f()\nexcept* A, B.c(d, e): g()", "try: f()\nexcept* (A, B.c(d, e)): g()", (3, 14)),
    ("lazy import torch", "import torch", (3, 15)),
    ("lazy from torch import (nn,\n optim)", "from torch import (nn,\n optim)", (3, 15)),
]
NOT_READ = [
    "def f[](): ...",
    "def f[T,, U](): ...",
    "def f[*T: int](): ...",
    "def f[T: ](): ...",
    "def f[T(): ...",
    "class A[1]: ...",
    "class A[if]: ...",
    "type X",
    "type X[T]",
    "type X[T] == 1",
    "type X = a = b",
    "type X = a, b",
    "type X = yield",
    "type X[T]: int = a",
    "type X[T][U] = a",
    "def f[T: (yield), U: a := b](): ...",
    "try: f()\nexcept A, B as e: g()",
    "try: f()\nexcept A, *B: g()",
    "try: f()\nexcept **A, B: g()",
    "x = f'{}'",
    "x = f'{a['",
    "x = f'{a['b']'",
    "x = f'{a!}'",
    "x = f'}'",
    "x = f'{a['b')}'",
    BARE,
    DEEP,
    "x = t'a' 'b'",
    "x = 'a\n'",
    "lazy x",
    "lazy def f(): ...",
]  # fmt: skip
PLAIN = [
    "type = 3\ntype[1] = 2\ntype: int = 4\ntype(x)\nlazy = type\nlazy.x = 1\nprint(type, lazy)\n",
    "x = {lazy: type}\ny = x[lazy: type]\nz = lambda: type\n",
    "try: f()\nexcept (A, B) as e: g()\nexcept A: h()\nexcept: i()\n",
    'x = f\'{a!r:^{w}.{p}} {b:%H:%M} {{c}} {d=} {e["f"]}\' f"""{g[\'h\']}\n{i}"""\n',
    "x = [*a, b]\ny = {**a, 'b': [c for c in d]}\nz = f(*[c for c in d])\nw = (*a, [b for c in d])\n",
    "def f(a=[1]): ...\nclass B(A[int]): ...\nx = rb'\\'' b'' Rb'a'\n",
]


@pytest.mark.parametrize(("source", "older", "version"), READ)
def test_newer_grammar_is_read(source: str, older: str, version: tuple[int, int]) -> None:
    tree, found = parse_newer(f"a = 1\n{source}\nb = 2\n")
    expected = ast.parse(f"a = 1\n{older}\nb = 2\n")
    assert ast.dump(tree) == ast.dump(expected)
    last = newest(found)
    assert last is not None and last.version == version
    assert last.line == 2 if "\n" not in source else last.line >= 2
    end = tree.body[-1]
    assert end.lineno == source.count("\n") + 3, "lines are those of the script"


@pytest.mark.parametrize("source", ['x = t"a{b}" t"{c["d"]}"', "x = [*a for a in b]", "x = {**a for a in b if f(*a)}"])
def test_constructs_without_older_syntax_become_unknown_calls(source: str) -> None:
    tree, _ = parse_newer(source)
    [assigned] = tree.body
    assert isinstance(assigned, ast.Assign) and isinstance(assigned.value, ast.Call)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert names >= {"a", "b"} or names >= {"b", "c"}


@pytest.mark.parametrize("source", NOT_READ)
def test_an_ordinary_syntax_error_stays_an_error(source: str) -> None:
    found = read_script(source)
    assert found.error is not None and not found.newer
    pinned = read_script(HEADER.format(">=3.12") + source)
    assert pinned.error is not None and not pinned.newer


@pytest.mark.parametrize("source", PLAIN)
def test_older_grammar_is_parsed_unchanged(source: str) -> None:
    tree, found = parse_newer(source)
    assert not found and ast.dump(tree) == ast.dump(ast.parse(source))
    assert newer_constructs(source) == () == parse(source)[1]


# ---------------------------------------------------------------------------------------------------- other parsers


@pytest.mark.slow
def test_ruff_agrees_on_the_releases(tmp_path: Path) -> None:
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    need("ruff", ruff is not None)
    assert ruff is not None
    for n, (source, _, _) in enumerate(READ):
        (tmp_path / f"read{n}.py").write_text(source + "\n")
    for n, source in enumerate(NOT_READ):
        (tmp_path / f"not{n}.py").write_text(source + "\n")

    def rejected(version: tuple[int, int]) -> set[str]:
        asked = [ruff, "check", "--isolated", "--no-cache", "--select", "F633", "--output-format", "json"]
        target = f"--target-version=py3{version[1]}"
        done = subprocess.run([*asked, target, "."], cwd=tmp_path, capture_output=True, timeout=300, check=False)
        listed = json.loads(done.stdout)
        return {Path(f["filename"]).stem for f in listed if f["code"] == "invalid-syntax" or f["code"] is None}

    by_release = {(3, minor): rejected((3, minor)) for minor in range(11, 16)}
    wrong = {f"not{n}" for n in range(len(NOT_READ))}
    for release, names in by_release.items():
        assert wrong <= names | {f"not{NOT_READ.index(taken)}" for taken in (BARE, DEEP)}, release
        needed = {f"read{n}" for n, (source, _, version) in enumerate(READ) if version > release and source != SPACED}
        assert names - wrong == needed, release


@pytest.fixture(scope="module")
def judge() -> Iterator[NewerPython]:
    program = newer_python()
    need("Python 3.12 or later", program is not None)
    process = NewerPython(str(program))
    yield process
    process.close()


NAMES = st.sampled_from(["a", "b.c", "d['e']", 'd["e"]', "f(x, *y)", "lambda_", "(lambda: g)", "-1", "{1: 2}", "[h]"])
QUOTES = st.sampled_from(["'", '"', "'''", '"""'])
SPECS = st.sampled_from(["", ":>10", "!r", "!s:{w}", ":{w['x']}.{p}", ": ", "!r "])
LITERALS = st.sampled_from(["", "text", "{{", "}}", "\\\\", "\\'", "é", "%", ":", "#", "\\N{EM DASH}", "!", "="])


@st.composite
def formatted(draw: st.DrawFn, inner: st.SearchStrategy[str], comments: bool) -> str:
    prefix, quote = draw(st.sampled_from(["f", "F", "rf", "fR"])), draw(QUOTES)
    between = st.sampled_from(["", " ", "\n"])
    fields = st.builds("{{{}{}{}{}}}".format, between, inner, between, SPECS)
    fields |= st.builds("{{{}{}}}".format, NAMES, st.sampled_from([" = ", "=!r", "=:>{w}"]))
    if comments:  # never with `{code=}`, whose text later Pythons show without comments
        fields = st.builds("{{ # why {}\n {} # '\n}}".format, inner, inner)
    return prefix + quote + "".join(draw(st.lists(LITERALS | fields, max_size=4))) + quote


EXPRESSIONS = st.booleans().flatmap(
    lambda comments: st.recursive(
        NAMES | st.sampled_from(["'a'", '"b"']), lambda inner: formatted(inner, comments), max_leaves=5
    )
)
BOUNDS = st.sampled_from(["", ": int", ": (a, b)", ":\n x[1, 2]", " = int", ": a = b", ": [", " ="])
PARAMETERS = st.lists(
    st.builds("{}{}{}".format, st.sampled_from(["", "*", "**", " "]), st.sampled_from(["T", "type", "if"]), BOUNDS),
    max_size=3,
).map(lambda parts: f"[{', '.join(parts)}]")
STATEMENTS = st.one_of(
    st.builds("x = {}\n".format, EXPRESSIONS),
    st.builds("x = ({}\n {})\n".format, EXPRESSIONS, EXPRESSIONS),
    st.builds("def f{}(x={}):\n    return x\n".format, PARAMETERS, EXPRESSIONS),
    st.builds("class A{}{}:\n    x = 1\n".format, PARAMETERS, st.sampled_from(["", "()", "(B, c=d)"])),
    st.builds("type X{} = {}\n".format, PARAMETERS | st.just(""), EXPRESSIONS),
    st.builds("if {}:\n    type type = {}; y = 2\n".format, EXPRESSIONS, EXPRESSIONS),
    st.builds("{} {}\n".format, EXPRESSIONS, EXPRESSIONS),
)


@pytest.mark.prove
@given(st.lists(STATEMENTS, min_size=1, max_size=4).map("".join))
@settings(max_examples=400, deadline=None)
@example("x = f'{a['b']:{'c'}}' # d\ny = 1\n")
def test_a_newer_python_reads_the_same(judge: NewerPython, source: str) -> None:
    theirs = judge.tree(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = json.loads(json.dumps(plain(parse_newer(source)[0])))
    except (SyntaxError, ValueError):
        ours = None
    assert ours == theirs


PIECES = st.sampled_from(
    ["type ", "X", "[", "]", "(", ")", "{", "}", "=", ":", ",", "*", "**", "for ", "in ", "lazy ", "import ", "except ",
     "def ", "class ", "f'", "'", '"', 'f"', "t'", "'''", 'f"""', "\\", "\n", "\r", "    ", "#", "!r", "\\N{", "1",
     "\0", "lambda ", "as ", "async ", ";", "é", "\f", "_newer0_1"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=60))
@settings(deadline=None)
def test_arbitrary_text_never_breaks_the_reader(source: str) -> None:
    found = read_script(source)
    assert found.error is None or "\n" not in found.error
    newer_constructs(source)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        lambda times: "x = f'{f'" * times,
        lambda times: "x = f'{a['b']}'\n" * times,
        lambda times: "x = " + "f'{a['b']}' " * times,
        lambda times: "def f[T](): ...\n" * times,
        lambda times: "class A[" + "T, " * times + "]: ...",
        lambda times: "x = " + "[" * times,
        lambda times: "x = [" + "*a, " * times + "@]",
        lambda times: "except " * times,
        lambda times: "x = f'" + "{a:" * times,
        lambda times: "x = f'" + "{{" * times,
        lambda times: "type X=a;" * times,
        lambda times: "a: type X=" * times,
        lambda times: "except a;" * times,
        lambda times: "except lambda:" * times,
        lambda times: "def f[" * times,
        lambda times: "[*" * times + "]" * times,
        lambda times: "type X = a\n" + "".join(f"_newer{n}_ = 1\n" for n in range(times)),
    ],
    ids=range(17),
)
def test_the_work_grows_in_proportion_to_the_text(source: Callable[[int], str]) -> None:
    read_script(source(10_000))  # quadratic cost would exceed the test's time limit
    assert lines_run(lambda: read_script(source(200))) < 2.5 * lines_run(lambda: read_script(source(100)))


# ----------------------------------------------------------------------------------------------------- requires-python


@pytest.mark.parametrize(
    ("python", "body", "values"),
    [
        (">=3.10,<3.12", "type X = int", ["line 5", "`type`", "3.12"]),
        ("==3.13.*", "try: a\nexcept B, C: d", ["line 6", "`except`"]),
        ("<=3.11", 'x = f"{d["a"]}"', ["3.12"]),
        ("<3.10", "match x:\n  case 1: y", ["'<3.10'", "3.9"]),
        (">=3.12", "def f(:", []),
        (">=3.12", "type X =", []),
    ],
    ids=["type", "except", "quotes", "match", "def", "type without a value"],
)
def test_grammar_unsupported_by_every_header_python_is_refused(python: str, body: str, values: list[str]) -> None:
    [found] = script_parses.run(script(HEADER.format(python) + body))
    assert found.severity is Severity.ERROR
    assert not [value for value in values if value not in found.message]


def test_unknown_newer_grammar_is_a_warning() -> None:
    [found] = script_parses.run(script(HEADER.format(">=3.16") + "x = @"))
    assert found.severity is Severity.WARNING
    [found] = script_parses.run(script(HEADER.format(">=3.15") + "x = @"))
    assert found.severity is Severity.ERROR


@pytest.mark.parametrize(("python", "warned"), [(">=3.12", False), (">=3.13,<4", False), (">=3.10", True)])
def test_a_header_that_allows_an_earlier_python_is_warned_of(python: str, warned: bool) -> None:
    facts = script(HEADER.format(python) + "def f[T](): ...\nimport torch")
    found = [*script_parses.run(facts)]
    assert [f.severity for f in found] == [Severity.WARNING] * warned
    assert facts.script is not None and facts.script.third_party == ("torch",), "all rules run on it"
    there = submit(spec=facts.spec, script=facts.script, readiness=Known(Readiness(python="3.13.1")))
    assert not [*script_parses.run(there)], "the place's own Python is compared by PF-PLACE-003"


def test_a_script_starts_with_a_python_that_reads_it() -> None:
    body = "type X = int\n"
    assert start_header("x = 1\n") is None and uv_run("x = 1\n") == ("run", "--quiet", "--script")
    assert start_header(body) == Header((), ">=3.12")
    assert uv_run(body) == ("run", "--quiet", "--python", ">=3.12", "--script")
    text = HEADER.format(">=3.10") + body
    assert start_header(text) == Header(("torch",), ">=3.10,>=3.12")
    assert uv_run(text)[2:4] == ("--python", ">=3.10,>=3.12")
    text = HEADER.format(">=3.13") + body
    assert start_header(text) == Header(("torch",), ">=3.13") and "--python" not in uv_run(text)
    assert start_header(text + "def (") == Header(("torch",), ">=3.13")
    facts = script(body)
    assert needs_of_job(facts.spec, facts.script, (), ()).requires_python == ">=3.12"


def test_header_requirements_give_the_allowed_releases() -> None:
    assert versions_allowed(Header((), ">=3.11,<3.13")) == [(3, 11), (3, 12)]
    assert versions_allowed(Header((), "==3.12.4")) == versions_allowed(Header((), "<=3.12,>3.11.99")) == [(3, 12)]
    assert versions_allowed(Header((), "nonsense")) == versions_allowed(Header((), "<3")) == []
