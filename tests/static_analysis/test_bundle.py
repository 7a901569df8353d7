"""A script and its package bundled in one file: running, restoring, and analyzing it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuwarden.core.errors import BadRequest
from gpuwarden.lifecycle.submission.bundling import script_file, with_trainer_package
from gpuwarden.static_analysis.bundle import bundled, shipped_files, shipped_package, split
from gpuwarden.static_analysis.script import parse_bundle, read_script
from gpuwarden.static_analysis.shipped_trainers import trainer, trainer_names

PACKAGE = {
    "gputrain": "",
    "gputrain.numbers": "def three():\n    return 3\n",
    "gputrain.sums": "from gputrain.numbers import three\n\n\ndef six():\n    return three() + three()\n\n\n"
    "def fail():\n    raise RuntimeError('as wanted')\n",
}
SCRIPT = '''# /// script
# dependencies = []
# ///
"""Prints a number.

from gputrain.sums import this is prose
"""

from __future__ import annotations

from gputrain.sums import fail, six as number

if __name__ == "__main__":
    print(number(), __doc__.splitlines()[0])
'''
CODE = "# ---- gputrain: the code of the package, which the loader above imports ----\n"
FORMS = {
    "plain": SCRIPT,
    "no last line end": SCRIPT.removesuffix("\n"),
    "Windows": SCRIPT.replace("\n", "\r\n"),
    "byte order mark": "\ufeff" + SCRIPT,
    "form feeds": 'x = "a\x0cb"; y = """\x0c\u2028"""\nimport gputrain.sums as s\nprint(s.six())',
    "in a function": "def main():\n    import gputrain.sums\n    print(gputrain.sums.six())\n\nmain()\n",
    "statements on one line": 'x = """\n"""; import gputrain.sums\nfrom gputrain.sums import six\nprint(six())\n',
    "a statement that ends there": "x = (\n1); import gputrain.sums\nfrom gputrain.sums import six\nprint(six())\n",
    "names of the loader": "compile = exec = open = vars = enumerate = None\nimport gputrain.sums\nimport builtins\n"
    "builtins.print(gputrain.sums.six())\n",
    "decorated": "import functools\n\n@functools.cache\ndef main():\n    from gputrain import sums\n"
    "    print(sums.six())\n\nmain()\n",
}


def together(script: str = SCRIPT, package: dict[str, str] | None = None) -> str:
    return bundled(script, ast.parse(script.removeprefix("\ufeff")), package or PACKAGE)


def run(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "job.py"
    file.write_bytes(text.encode())
    return subprocess.run([sys.executable, "-I", file], capture_output=True, text=True, cwd=tmp_path)


def test_a_bundle_runs_alone(tmp_path: Path) -> None:
    done = run(tmp_path, together())
    assert (done.stdout, done.stderr) == ("6 Prints a number.\n", "")


def test_a_traceback_shows_the_bundled_source_line(tmp_path: Path) -> None:
    done = run(tmp_path, together(SCRIPT + "    fail()\n"))
    assert "#|     raise RuntimeError('as wanted')" in done.stderr


@pytest.mark.parametrize("script", FORMS.values(), ids=FORMS)
def test_a_script_is_restored_and_runs(tmp_path: Path, script: str) -> None:
    text = with_trainer_package(script)
    bundle, _, _ = parse_bundle(text)
    assert bundle.script.removesuffix("\n") == script.removesuffix("\n")
    assert bundle.sources == shipped_package()
    assert run(tmp_path, together(script)).stdout.startswith("6")
    assert with_trainer_package(text) == text, "a bundle is not bundled again"


def test_a_script_without_the_package_is_not_changed() -> None:
    for text in ("import torch\n", 'x = """\nimport gputrain\n"""\n', "import gputrainer\n", "import gputrain as (\n"):
        assert with_trainer_package(text) == text


def test_a_script_whose_header_lists_the_package_is_unchanged() -> None:
    text = SCRIPT.replace("[]", '["gputrain>=1"]')
    assert with_trainer_package(text) == text


CHANGES: dict[str, Callable[[str], str]] = {
    "code at the end": lambda t: t + "import os\n",
    "another loader": lambda t: t.replace("sys.meta_path.insert(0, ", "print("),
    "another package": lambda t: t.replace("#: gputrain.sums\n", "#: torch\n"),
    "a hidden line": lambda t: t.replace("#|     return 3\n", "#|     return 3\rimport os\n"),
    "a second package above": lambda t: t.replace('"""\n\nfrom', f'"""\n\n{CODE}#: evil\n#| import os\n\nfrom'),
    "a second package with other line ends": lambda t: t.replace(
        '"""\n\nfrom', f'"""\n\n{CODE[:-1]}\r\n#: evil\r\n#| import os\r\n\nfrom'
    ),
    "Windows line ends": lambda t: t.replace("\n", "\r\n"),
    "the loader in a string": lambda t: t.replace("# ---- gputrain: import", '"""\n# ---- gputrain: import').replace(
        "# ---- end ----\n", '# ---- end ----\n"""\n'
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_package_modified_inside_the_bundle_is_an_error(change: Callable[[str], str]) -> None:
    text = change(together())
    assert text != together()
    assert read_script(text).error and with_trainer_package(text) == text


def test_bundled_package_code_is_analyzed() -> None:
    package = PACKAGE | {"gputrain.numbers": "import torch\n\n\ndef three():\n    open('three.txt', 'w')\n"}
    script = SCRIPT.replace("number(),", "number(), open('own.txt', 'w'),")
    facts = read_script(together(script, package))
    assert facts.third_party == ("torch",) and facts.error is None
    lines = {write.path: write.line for write in facts.uses.writes}
    assert "own.txt" in script.splitlines()[lines["own.txt"] - 1]
    assert lines["three.txt"] > script.count("\n")


HIDDEN = "import subprocess\n\nsubprocess.run(['true'])\n"


@pytest.mark.parametrize(
    ("script", "package"),
    [
        ("from gputrain.a import f\n", {"gputrain": HIDDEN, "gputrain.a": "def f(): pass\n"}),
        ("from gputrain import *\n", {"gputrain": "__all__ = ['evil']\n", "gputrain.evil": HIDDEN}),
        ("import gputrain\n__import__('gputrain.evil')\n", {"gputrain": "", "gputrain.evil": HIDDEN}),
        ("import gputrain.a\n", {"gputrain": "", "gputrain.a": "from .evil import g\n", "gputrain.evil": HIDDEN}),
    ],
)
def test_a_changed_package_is_analyzed_whole_and_marked(script: str, package: dict[str, str]) -> None:
    uses = read_script(together(script, package)).uses
    assert uses.shells and "the changed package gputrain" in uses.unseen


def test_a_lazy_import_of_a_shipped_module_is_analyzed() -> None:
    facts = read_script(with_trainer_package("def main():\n    from gputrain.text import lora\n\nmain()\n"))
    assert "peft" in facts.third_party and not facts.uses.unseen


def test_unreached_functions_of_the_shipped_package_are_ignored() -> None:
    facts = read_script(with_trainer_package("from gputrain.smoke import write_detector\n\nwrite_detector('m')\n"))
    assert "transformers" in facts.third_party and not {"peft", "PIL"} & set(facts.third_party)
    facts = read_script(with_trainer_package("from gputrain.smoke import smoke_pictures as made\n\nmade(None, None)\n"))
    assert "PIL" in facts.third_party, "through a function that it calls"
    facts = read_script(with_trainer_package("from gputrain import smoke\n\ngetattr(smoke, 'write_adapter')('m')\n"))
    assert "peft" in facts.third_party, "by a name in a string"


def test_names_shared_with_the_package_keep_the_scripts_meaning() -> None:
    script = "from gputrain.training import run\nfrom transformers import AutoModel\nMODEL = 'Qwen/Qwen3-0.6B'\n"
    uses = read_script(with_trainer_package(script + "AutoModel.from_pretrained(MODEL)\n")).uses
    assert [repo.id for repo in uses.repos] == ["Qwen/Qwen3-0.6B"]
    pushing = "def push(model):\n    model.push_to_hub('me/x')\n\npush(AutoModel.from_pretrained(MODEL))\n"
    assert "me/x" in {push.target for push in read_script(with_trainer_package(script + pushing)).uses.pushes}


@pytest.mark.parametrize("line", ["from gputrain.nosuch import x", "import gputrain.nosuch", "import gputrain.rows.x"])
def test_a_missing_package_module_is_an_error(line: str) -> None:
    assert "gputrain." in str(read_script(with_trainer_package(f"{line}\n")).error)


def test_future_imports_of_a_script_do_not_affect_the_package(tmp_path: Path) -> None:
    package = PACKAGE | {"gputrain.sums": "def six(x: int = 0): pass\n\n\nfail = six\n"}
    assert run(tmp_path, together(SCRIPT.replace("number()", "6, number.__annotations__"), package)).stdout == (
        "6 {'x': <class 'int'>} Prints a number.\n"
    )


def test_a_script_with_a_deeply_nested_header_is_unchanged() -> None:
    text = f"# /// script\n# x = {'[' * 900}{']' * 900}\n# ///\nimport gputrain.rows\n"
    assert with_trainer_package(text) == text


def test_a_broken_package_is_an_error() -> None:
    assert read_script(together(package=PACKAGE | {"gputrain.sums": "def (\n"})).error


def test_the_package_beside_a_script_is_used(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "gputrain").mkdir()
    for name, text in shipped_files().items():
        (tmp_path / "gputrain" / name).write_text(text)
    assert split(script_file(tmp_path, "job.py")).sources == shipped_package()
    (tmp_path / "gputrain" / "text.py").write_text("changed = 1")
    assert split(script_file(tmp_path, "job.py")).sources["gputrain.text"] == "changed = 1\n"


def test_unusual_characters_of_the_package_are_kept(tmp_path: Path) -> None:
    odd = 'A = "a\x0cb\u2028c"\r\nB = """1\r2"""\n\n\n'
    text = together(
        SCRIPT.replace("number()", "A.encode(), B.encode()").replace(
            "sums import fail, six as number", "odd import A, B"
        ),
        PACKAGE | {"gputrain.odd": odd},
    )
    assert split(text).sources["gputrain.odd"] == odd.replace("\r\n", "\n").replace("\r", "\n")
    assert run(tmp_path, text).stdout.startswith(r"b'a\x0cb\xe2\x80\xa8c' b'1\n2'")


def test_editor_files_in_the_package_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "gputrain").mkdir()
    (tmp_path / "gputrain" / "sums.py").write_text(PACKAGE["gputrain.sums"])
    (tmp_path / "gputrain" / ".#sums.py").symlink_to("nobody@nowhere")
    (tmp_path / "gputrain" / "._sums.py").write_bytes(b"\xff\x00")
    (tmp_path / "gputrain" / "folder.py").mkdir()
    assert split(script_file(tmp_path, "job.py")).sources == {"gputrain": "", "gputrain.sums": PACKAGE["gputrain.sums"]}


def test_a_package_linked_outside_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "__init__.py").touch()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "job.py").write_text(SCRIPT)
    (tmp_path / "work" / "gputrain").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadRequest):
        script_file(tmp_path / "work", "job.py")


@pytest.mark.parametrize("name", trainer_names())
def test_a_trainer_is_bundled_from_its_file_and_the_package(name: str) -> None:
    found = trainer(name)
    bundle = split(found.text)
    assert bundle.script == found.source and bundle.sources == shipped_package()
    assert with_trainer_package(found.source) == found.text
