"""The MCPB bundle: reproducible, without tests, and with a server that starts in the folder where it is unpacked."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from client_kit import tools_of
from gpuwarden import __version__
from gpuwarden.interfaces.manifests import ROOT, RUNTIME
from gpuwarden.interfaces.variables import SYSTEM, variables
from real_agents import PATH
from real_parts import need

BUNDLE = runpy.run_path(str(ROOT / "tools" / "bundle.py"))


def test_two_builds_are_identical_and_have_the_server_files(tmp_path: Path) -> None:
    one, two = (BUNDLE["main"](tmp_path / name) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes() and one.name == f"gpuwarden-{__version__}.mcpb"
    names = zipfile.ZipFile(one).namelist()
    assert {name.partition("/")[0] for name in names} == {*RUNTIME, "manifest.json", "start.py"}
    assert names == sorted(names) and not any("__pycache__" in name for name in names)


def test_the_form_has_every_variable_and_hides_secrets() -> None:
    manifest = BUNDLE["manifest"]()
    form, env = manifest["user_config"], manifest["server"]["mcp_config"]["env"]
    assert {n: f["sensitive"] for n, f in form.items()} == {
        v.name: v.secret for v in variables() if v.name not in SYSTEM
    }
    assert env == {"UV_PROJECT_ENVIRONMENT": ".venv"} | {name: f"${{user_config.{name}}}" for name in form}
    assert form["HF_TOKEN"]["sensitive"] and not any(f["required"] for f in form.values())


@pytest.mark.prove
@pytest.mark.parametrize("empty", ["", "${user_config.X}"])
def test_the_server_starts_from_an_unpacked_bundle(tmp_path: Path, empty: str) -> None:
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), PATH]))
    need("uv", uv is not None)
    folder = tmp_path / "an extension"
    with zipfile.ZipFile(BUNDLE["main"](tmp_path)) as archive:
        archive.extractall(folder)
    start: dict[str, Any] = BUNDLE["manifest"]()["server"]["mcp_config"]
    fields = {name: empty if "user_config" in value else value for name, value in start["env"].items()}
    args = [word.replace("${__dirname}", str(folder)) for word in start["args"]]
    (tmp_path / "home").mkdir()
    own = {"UV_PYTHON": sys.executable, "HOME": str(tmp_path / "home")}
    own["UV_PROJECT_ENVIRONMENT"] = str(tmp_path / "other projects")
    assert tools_of({"command": uv, "args": args, "env": fields}, {**os.environ, **own}) == 10
    assert (folder / ".venv").is_dir() and not (tmp_path / "other projects").exists()
