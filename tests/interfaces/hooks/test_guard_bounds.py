"""The guard is cheap for any input, and blocks the call if it fails."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuwarden.interfaces.hooks.guard import limits
from gpuwarden.interfaces.hooks.guard.calls import judged
from gpuwarden.interfaces.hooks.guard.declared import table
from gpuwarden.interfaces.hooks.guard.limits import MOST_BYTES
from guard_kit import MOST_STEPS, RULES, shell, steps
from real_parts import amount
from wording import Wording

TANGLED = {
    "env": "env " * 20_000 + "ls",
    "sudo": "sudo " * 20_000,
    "substitutions": "$(" * 20_000 + ")" * 20_000,
    "echoes": "echo $(echo " * 3_000 + ")" * 3_000,
    "ifs": "if a; then " * 5_000 + "fi; " * 5_000,
    "brackets": "(" * 60_000,
    "pipes": "a|" * 16_000,
    "arrays": "a=(" * 40_000,
    "redirections": "<" * 131_000,
    "here-documents": "<<a " * 30_000,
    "quotes": "'\"" * 60_000,
    "words": "a " * 65_000,
    "semicolons": "a;" * 65_000,
    "doubled": "A=aaaaaaaaaa;" + "A=$A$A;" * 40 + "$A",
    "aliases": "alias a='b b'; alias b='a a'; a",
    "copies": "rsync --delete " + "out/ " * 20_000,
    "dashes": "curl -X POST " + "a." * 60_000,
    "code": "python -c '" + "vastai " * 15_000 + "'",
    "a word": "a" * 2_000_000,
    "snowmen": "\u2603" * 43_000,
    "targets": "cat <<E " + "".join(f">{i} " for i in range(2_900)) + "\n" + "x" * 60_000 + "\nE",
    "one target": "cat <<E " + ">a " * 2_900 + "\n" + "x" * 60_000 + "\nE",
    "a fed loop": "while read x; do " + "curl x; bash; " * 900 + "done <<E\n" + "vastai " * 9_000 + "\nE",
    "zeros": "\0" * 131_000,
    "cases": "$x=&" + "case [" * 20_000,
    "a here-string": "<<<a~" + "\nE\n&fi" * 20_000,
    "a here-document without an end": "env <<E\n" + "ssh h destroy ))" * 8_000,
    "a here-document in quotes": "echo '<<E'\n" + "case [" * 20_000 + "\nE",
    "a quoted one in quotes": "echo '<<\"E\"'\n" + "case [" * 20_000 + "\nE",
    "a here-document that is expanded": "cat <<E\n" + "$(case [" * 10_000 + "\nE",
    "two on a line": "cat <<'E' <<F\n\nE\n" + "$(case [" * 10_000 + "\nF",
    "functions": "f0() { ls; }; " + "".join(f"f{n + 1}() {{ f{n}; f{n}; }}; " for n in range(300)) + "f11; f300",
    "loops": "for a in 1 2 3 4 5 6 7 8 9; do " * 5 + "echo $a; " + "done; " * 5,
    "rounds": "for a in " + "x " * 39 + "; do " + "rm {a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}; " * 900 + "done",
    "braces": "rm " + "{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b} " * 3_000,
    "globs": "rm " + "*a" * 60_000,
    "many globs": "rm " + "~/*a*b*c*d*e*f/*/* " * 6_000,
    "suffixes": "x=" + "a" * 490 + "; echo " + "${x%*b*b*b} " * 10_000,
    "lines": "while read x; do rm $x; cp $x y; done <<E\n" + "a b\n" * 30_000 + "E",
    "arguments": "echo " + "a " * 20_000 + "| xargs -I{} rm {}",
    "many that may end": "".join(f"cat <<a{n} ;;\n" for n in range(290)) + ";\n" * 40_000 + "$\na0\na1",
}
UNREADABLE = [
    "env", "sudo", "substitutions", "pipes", "words", "doubled", "a word", "cases", "a here-string",
    "a here-document without an end", "a here-document in quotes", "a quoted one in quotes",
    "a here-document that is expanded", "two on a line", "many that may end",
]  # fmt: skip


@pytest.mark.attack("guard", "sends text that takes long to parse")
@pytest.mark.parametrize("name", TANGLED)
def test_tangled_text_stays_below_the_step_limit(name: str) -> None:
    assert steps(TANGLED[name]) < MOST_STEPS


@pytest.mark.attack("guard", "types 20,000 times `env` so that the guard's time runs out")
@pytest.mark.parametrize("name", UNREADABLE)
def test_text_beyond_the_limits_is_stopped_with_a_reason(
    name: str, record_property: Callable[[str, object], None], wording: Wording
) -> None:
    record_property("figure", f"{name} {steps(TANGLED[name]):,} steps")
    reason = shell(TANGLED[name], RULES)
    assert reason
    wording(reason)


def test_a_long_file_written_by_a_here_document_passes() -> None:
    row = "| a table | of `many` | marks | (and) | $(more) |\n"
    assert shell(f"cat > docs/table.md <<'EOF'\n{row * 2_000}EOF\n", RULES) is None
    plain = row.replace("$", "").replace("`", "")
    assert shell(f"cat > docs/table.md <<EOF\n{plain * 2_000}EOF\ngit add docs\n", RULES) is None


def test_parser_limit_counts_work_instead_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict on a text must not depend on how slow or busy the machine is."""
    text = "echo a 'b' c; " * 300
    assert shell(text, RULES) is None
    monkeypatch.setattr(limits, "MOST_LOOKS", 3)
    assert "too complex" in str(shell(text, RULES))
    assert not hasattr(limits, "time")


PIECES = [
    *"|&;<>(){}$`'\"\\=#!*?[]~ \n\t", "$(", "${", "<<E\n", "\nE\n", "<<<", "&&", "||", ";;", "if ", "fi", "then ",
    "done", "for i in ", "do ", "case ", "esac", "[[ ", "]]", "((", "))", "vastai ", "destroy ", "bash -c ", "eval ",
    "env ", "x=", "$x", "echo ", "ssh h ", "rm -rf ", "/data/gw", "python -c ", "function f ", "docker run ",
    "f() { ", "; }; ", "f ", "while read x; do ", "| xargs -I{} ", "${x%", "{a,b}", "find . -exec ", "jq . > ",
    "cp ", "> ",
]  # fmt: skip
FIELDS = ["command", "file_path", "edits", "old_string", "content", "x"]
TOOLS = ["Bash", "Edit", "Write", "apply_patch", "mcp__a__delete_pod", "mcp__x", "MCP:y", "", "Read"]
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), v, max_size=4)
)


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join), st.integers(1, 40))
def test_shell_fragments_never_crash_the_guard(text: str, times: int) -> None:
    shell(text * times, RULES)


@pytest.mark.prove
@pytest.mark.endurance
def test_shell_fragments_stay_below_the_step_limit() -> None:
    chance = random.Random(12)
    for _ in range(amount(250, 1_000)):
        before, unit, after = ("".join(chance.choices(PIECES, k=chance.randint(1, 6))) for _ in range(3))
        text = (before + unit * chance.choice([3, 30, 500, 3_000, 20_000]) + after)[:MOST_BYTES]
        assert steps(text) < MOST_STEPS, (before, unit, after, len(text))


@settings(deadline=None)
@example({"file_path": "/settings.json", "edits": True}, "MultiEdit")
@given(VALUES, st.sampled_from(TOOLS))
def test_malformed_calls_never_crash_the_guard(given_to_tool: object, tool: str) -> None:
    judged({"tool_name": tool, "tool_input": given_to_tool, "cwd": "/"}, RULES)


def process(argv: list[str], call: bytes, **more: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-E", "-P", *argv]
    return subprocess.run(command, input=call, capture_output=True, timeout=300, check=False, **more)


GUARD = ["-m", "gpuwarden.interfaces.hooks.guard"]
CALL = json.dumps({"tool_name": "Bash", "tool_input": {"command": "ls"}, "cwd": "/"}).encode()


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "guard.json"
    told = {"home": "", "files": [], "settings": [], "patterns": table()}
    file.write_text(json.dumps(told))
    return str(file)


@pytest.mark.attack("guard", "sends a call that the guard can't read")
@pytest.mark.parametrize("client", ["claude", "codex", "cursor"])
@pytest.mark.parametrize(
    "call", [b"", b"[]", b"{", b"\xff", b"7", b'{"a":' * 9_000, b'{"tool_input": {"command": "' + b"a" * 9_000_000]
)
def test_a_call_that_cannot_be_read_is_stopped(client: str, call: bytes, config: str) -> None:
    done = process([*GUARD, client, config], call)
    told = json.loads(done.stdout)["agent_message"] if client == "cursor" else done.stderr.decode()
    assert told.startswith("gpuwarden: ") and b"Traceback" not in done.stderr
    assert done.returncode == 2 or client == "cursor"


def test_guard_allows_a_harmless_call(config: str) -> None:
    assert process([*GUARD, "claude", config], CALL).returncode == 0


@pytest.mark.attack("guard", "removes a part of the guard")
@pytest.mark.parametrize(
    "missing", ["tree_sitter", "tree_sitter_bash", "sqlite3", "gpuwarden.interfaces.hooks.guard.judge"]
)
def test_guard_with_a_missing_module_fails_closed(missing: str, config: str) -> None:
    code = f"import sys, runpy; sys.modules[{missing!r}] = None; sys.argv[1:] = ['claude', {config!r}]; "
    done = process(["-c", code + "runpy.run_module('gpuwarden.interfaces.hooks.guard', run_name='__main__')"], CALL)
    assert done.returncode == 2 and done.stderr.startswith(b"gpuwarden: ")


@pytest.mark.attack("guard", "breaks the guard's configuration")
def test_invalid_or_missing_config_fails_closed(tmp_path: Path) -> None:
    (tmp_path / "guard.json").write_text("{}")
    for file in ("guard.json", "nowhere.json"):
        assert process([*GUARD, "codex", str(tmp_path / file)], CALL).returncode == 2
    assert process(GUARD, CALL).returncode == 2


@pytest.mark.slow
@pytest.mark.attack("guard", "makes the guard loop")
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limits")
def test_a_guard_that_loops_is_ended_by_the_system() -> None:
    code = "import gpuwarden.interfaces.hooks.guard.__main__ as g; g.MOST_CPU_S = 1; g.bounded()\nwhile True: pass"
    assert process(["-c", code], b"").returncode in {-signal.SIGXCPU, -signal.SIGKILL}
