"""The runner as it is deployed: modules here, a single file on the machine."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gpuwarden.remote.runner_bundle import MODULES, one_file
from runner_kit import call, ended, runner_file, sh

SOURCES = sorted(path for path in MODULES.glob("*.py") if not path.name.startswith("__"))


def tops(tree: ast.Module) -> list[str]:
    """Return the names that a module defines."""
    made = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    stored = [n for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign)) for n in ast.walk(node)]
    return made + [n.id for n in stored if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


# ------------------------------------------------------------------------------------------------------- one file


def test_the_file_contains_every_module_once_and_is_reproducible() -> None:
    assert one_file() == one_file()
    headings = re.findall(rb"^# module: (\w+)$", one_file(), re.MULTILINE)
    assert sorted(headings) == [path.stem.encode() for path in SOURCES]


@pytest.mark.slow
def test_modules_share_one_namespace_without_conflicts() -> None:
    """In the file, all modules share one namespace."""
    makers = Counter(name for path in SOURCES for name in tops(ast.parse(path.read_text())))
    assert {name for name, count in makers.items() if count > 1} == set()
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert not [a.name for a in node.names if a.asname], f"{path.name} renames what it imports"
                own = isinstance(node, ast.ImportFrom) and str(node.module).startswith("gpuwarden.remote.runner.")
                assert own or not {a.name for a in node.names} & makers.keys(), f"{path.name} imports a module's name"


def test_the_file_is_its_modules_without_their_internal_imports() -> None:
    """Compare syntax trees, because only the parser can distinguish text from imports."""
    made = ast.parse(one_file()).body
    modules = [n for p in re.findall(r"^# module: (\w+)$", one_file().decode(), re.MULTILINE) for n in _kept(p)]
    assert [ast.dump(node) for node in made[2:]] == modules


def _kept(module: str) -> list[str]:
    body = ast.parse((MODULES / f"{module}.py").read_text()).body
    near = [isinstance(n, ast.ImportFrom) and str(n.module).startswith(("gpuwarden", "__future__")) for n in body]
    return [ast.dump(node) for node, skipped in zip(body, near, strict=True) if not skipped]


def test_module_lines_keep_their_numbers_below_the_heading() -> None:
    lines = one_file().decode().splitlines()
    for path in SOURCES:
        top = lines.index(f"# module: {path.stem}") + 1
        for number, line in enumerate(path.read_text().splitlines()):
            assert lines[top + number] in (line, ""), f"{path.name}:{number + 1}"


@pytest.mark.slow
def test_the_module_folder_and_the_file_give_equal_answers(folder: Path) -> None:
    call("start", folder, sh("echo hello; mkdir out; echo 1 > out/a", outputs=["out"]))
    ended(folder)
    for verb, request in (("logs", {"cursor": 0}), ("list", {"paths": ["out"]}), ("read", {"path": "out/a"})):
        for known in (request, {"path": "../status.json"}):
            answers = []
            for runner in (str(MODULES), runner_file()):
                argv = [sys.executable, "-I", "-S", runner, verb, str(folder)]
                done = subprocess.run(argv, input=json.dumps(known).encode(), capture_output=True, timeout=300)
                out = re.sub(rb'"taken_at": [0-9.]+', b"", done.stdout)
                answers.append((done.returncode, out, done.stderr))
            assert answers[0] == answers[1]


def test_the_module_folder_can_start_a_job(folder: Path) -> None:
    argv = [sys.executable, "-I", "-S", str(MODULES), "start", str(folder)]
    done = subprocess.run(argv, input=json.dumps(sh("exit 3")).encode(), capture_output=True, timeout=300, check=True)
    assert json.loads(done.stdout)["ok"] and ended(folder)["exit_code"] == 3


def test_a_crash_names_modules_and_their_line_numbers(folder: Path) -> None:
    argv = [sys.executable, "-I", "-S", runner_file(), "logs", str(folder)]
    done = subprocess.run(argv, input='{"cursor": "nonsense"}', capture_output=True, text=True, timeout=300)
    named = re.findall(r"^in (\w+\.py):(\d+)$", done.stderr, re.MULTILINE)
    assert [module for module, _ in named][-3:] == ["verbs.py", "verbs.py", "log.py"]
    numbers = re.findall(r'^  File ".*", line (\d+), in ', done.stderr, re.MULTILINE)
    shipped = one_file().decode().splitlines()
    in_modules = [(MODULES / module).read_text().splitlines()[int(number) - 1] for module, number in named]
    assert [shipped[int(number) - 1] for number in numbers] == in_modules
    assert done.stderr.splitlines()[-1].startswith("ValueError: "), "as ever"


# ------------------------------------------------------------------------------------------------------ requirements


@pytest.mark.slow
def test_the_runner_is_python_3_8_and_standard_library_only() -> None:
    tree = ast.parse(one_file(), feature_version=(3, 8))
    assert isinstance(tree.body[1], ast.ImportFrom) and tree.body[1].module == "__future__"
    names = {a.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {str(n.module).partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    stores = {"boto3", "botocore", "huggingface_hub"}  # only in the uploader, which runs with a Python that has them
    assert names - sys.stdlib_module_names == stores
    at_top = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert not any(store in ast.unparse(node) for node in at_top for store in stores)


@pytest.mark.slow
def test_the_runner_uses_no_later_python_at_runtime() -> None:
    """Annotations are not evaluated, but all other code must not subscript builtins or join types with `|`."""
    text = one_file().decode()
    assert not re.search(
        r"\.(removeprefix|removesuffix|is_relative_to)\(|functools\.cache\b|\bmatch \w+:$", text, re.MULTILINE
    )
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            inner = [n for n in ast.walk(node.value) if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name)]
            assert not [n for n in inner if n.value.id in {"list", "dict", "tuple", "set"}]  # type: ignore[attr-defined]


def test_the_runner_imports_no_slow_modules() -> None:
    heavy = "import sys; sys.argv=['x','poll']; import runpy; runpy.run_path(%r, run_name='other'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", heavy % runner_file()], capture_output=True, text=True)
    assert "json" in done.stdout.split(), done.stderr
    assert not {"subprocess", "urllib.request", "hashlib", "typing_extensions", "asyncio"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("verb", "request_"),
    [("start", {}), ("start", {"spec": {"argv": []}, "token": "t", "attempt": 1}), ("start", []), ("nonsense", {})],
)
def test_an_invalid_order_is_refused(folder: Path, verb: str, request_: object) -> None:
    answer = call(verb, folder, request_)
    assert (answer["ok"], answer["code"]) == (False, "bad_request")
    assert not (folder / "status.json").exists()
