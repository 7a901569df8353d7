"""Modules in files beside a script are found where Python would find them, with the input that uploads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import FakeClock
from gpuwarden.core.errors import Refused
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import InputFile, JobSpec
from gpuwarden.lifecycle.submission.local_modules import local_modules
from gpuwarden.lifecycle.submission.submit import check_spec
from gpuwarden.static_analysis.script import read_script
from lifecycle_kit import WEALTHY, open_house

pytestmark = pytest.mark.anyio
HEADER = '# /// script\n# requires-python = ">=3.11"\n# dependencies = [{}]\n# ///\n'


def found(root: Path, text: str, *files: str, command: tuple[str, ...] = ()) -> dict[str, str]:
    spec = JobSpec(platform="local", command=command) if command else JobSpec(platform="local", script=text)
    listing = [InputFile(path=name, size=1, sha256="") for name in files]
    return dict(local_modules(root, spec, read_script(text, files=files), listing))


def put(root: Path, **files: str) -> None:
    for name, text in files.items():
        file = root / (name.replace("__", "/") + ".py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


def test_files_and_packages_next_to_the_script_are_followed(tmp_path: Path) -> None:
    put(tmp_path, mynet="import layers\nimport torch\n", layers="", other="", pack__init="", blocks__a="import other\n")
    (tmp_path / "pack" / "init.py").rename(tmp_path / "pack" / "__init__.py")
    text = "import torch, json, blocks.a\nfrom mynet import Net\nimport pack.sub\n"
    expected = {"mynet": "mynet.py", "layers": "layers.py", "pack": "pack", "blocks": "blocks"}
    assert found(tmp_path, text) == expected
    assert found(tmp_path, text, "mynet.py", "pack/__init__.py") == {"layers": "layers.py", "blocks": "blocks"}


def test_an_installed_package_is_not_a_local_module(tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "rows.jsonl").write_text("{}")
    assert found(tmp_path, "import datasets\n") == {}
    put(tmp_path, datasets__convert="")  # the package wins over a folder without __init__.py
    assert found(tmp_path, "import datasets\n") == {}
    put(tmp_path, mynet="")
    assert found(tmp_path, HEADER.format('"mynet"') + "import mynet\n") == {}
    assert found(tmp_path, HEADER.format("") + "import mynet\n") == {"mynet": "mynet.py"}
    assert found(tmp_path, "from .mynet import Net\n") == {}


def test_a_commands_program_imports_from_its_own_folder(tmp_path: Path) -> None:
    put(tmp_path, src__train="import mynet, above\n", src__mynet="", above="")
    text = (tmp_path / "src" / "train.py").read_text()
    command = ("python", "src/train.py", "--lr", "1")
    assert found(tmp_path, text, "src/train.py", command=command) == {"mynet": "src/mynet.py"}


@pytest.mark.attack("boundary", "links a module to a file outside of the working directory")
def test_files_outside_the_working_directory_are_not_read(tmp_path: Path) -> None:
    root = tmp_path / "here"
    root.mkdir()
    (tmp_path / "mynet.py").write_text("import secret_name\n")
    (root / "mynet.py").symlink_to(tmp_path / "mynet.py")
    assert found(root, "import mynet\n") == {}


async def test_the_refusal_includes_its_fix_as_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, mynet="class Net: ...\n")
    ctx = open_house(tmp_path / "home", FakeClock(), policy=WEALTHY)
    text = HEADER.format("") + "from mynet import Net\n"
    spec = JobSpec(platform="local", script=text, outputs=("out",), timeout_s=600, estimate_s=60)
    with pytest.raises(Refused) as refused:
        await check_spec(ctx, spec)
    found = {f.rule: f.fix for f in refused.value.findings if f.blocks}
    assert found == {"PF-IN-003": (do(Action.SET_ARGUMENT, name="inputs", add="mynet.py"),)}
    await check_spec(ctx, spec.model_copy(update={"inputs": ("mynet.py",)}))
