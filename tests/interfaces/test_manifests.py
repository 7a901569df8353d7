"""The files that clients use to install this repository: current, one version, and accepted by a common linter."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gpuwarden import __version__
from gpuwarden.interfaces import launch
from gpuwarden.interfaces.cli.main import cli
from gpuwarden.interfaces.manifests import PLATFORMS, ROOT, RUNTIME, manifests, platforms_page, write_manifests
from gpuwarden.interfaces.variables import variables
from gpuwarden.providers.base import PROVIDERS
from real_parts import need

FILES = manifests()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
COPIED = ("pyproject.toml", "README.md", "LICENSE", "AGENTS.md")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that the manifests are generated from or point to."""
    root = tmp_path / "gpuwarden"
    root.mkdir()
    for name in COPIED:
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / "skills", root / "skills", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "docs").mkdir()
    for name in ("icon.svg", "platforms.md"):
        shutil.copy(ROOT / "docs" / name, root / "docs" / name)
    return root


@pytest.mark.parametrize("path", FILES)
def test_manifest_is_up_to_date(path: str) -> None:
    assert (ROOT / path).read_text("utf-8") == FILES[path], "run `python -m gpuwarden.interfaces.manifests`"


def test_the_table_of_variables_is_up_to_date() -> None:
    page = (ROOT / PLATFORMS).read_text("utf-8")
    assert page == platforms_page(), "run `python -m gpuwarden.interfaces.manifests`"
    assert {"AUTODL_TOKEN", "PRIME_TEAM_ID"} <= set(re.findall(r"`([A-Z_]+)`", page))


def test_every_version_follows_the_project(checkout: Path) -> None:
    assert write_manifests(checkout) == len(FILES) and write_manifests(checkout) == 0
    file = checkout / "pyproject.toml"
    file.write_text(file.read_text("utf-8").replace(f'version = "{__version__}"', 'version = "9.8.7"'), "utf-8")
    assert write_manifests(checkout) > 5
    for path in FILES:
        text = (checkout / path).read_text("utf-8")
        without = {"marketplace.json", "codex.json", "codex-hooks.json", "hooks.json"}  # they name no version
        assert __version__ not in text and ("9.8.7" in text or Path(path).name in without), path


def test_manifest_targets_exist() -> None:
    for path, text in FILES.items():
        table = json.loads(text)
        for key, value in {**table, **table.get("interface", {})}.items():
            if key in {"skills", "mcpServers", "hooks", "logo", "composerIcon"} and isinstance(value, str):
                assert (ROOT / value).exists(), (path, value)
    assert {name: (ROOT / "plugin" / name).readlink() for name in RUNTIME} == {n: Path("..", n) for n in RUNTIME}
    assert all((ROOT / name).exists() for name in RUNTIME)


def server_of(path: str) -> dict[str, Any]:
    return dict(json.loads(FILES[path])["mcpServers"]["gpuwarden"])


def test_plugins_start_the_server_from_their_own_folder_and_its_lock_file() -> None:
    frozen = ["--frozen", "--no-dev", "gpuwarden", "mcp", "--client"]
    claude, codex, gemini = (
        server_of(path) for path in ("plugin/.claude-plugin/plugin.json", "clients/codex.json", "gemini-extension.json")
    )
    assert claude["args"] == ["run", "--project", "${CLAUDE_PLUGIN_ROOT}", *frozen, "claude"]
    assert gemini["args"] == ["run", "--project", "${extensionPath}", *frozen, "gemini"]
    assert (codex["args"], codex["cwd"]) == (["run", *frozen, "codex"], "."), "Codex expands nothing in arguments"
    assert {s["command"] for s in (claude, codex, gemini)} == {"uv"}
    assert {s["env"]["UV_PROJECT_ENVIRONMENT"] for s in (claude, codex, gemini)} == {".venv"}


def test_every_other_client_fetches_the_version_of_this_checkout() -> None:
    source = f"git+{PROJECT['urls']['Source']}@v{__version__}"
    for path in ("clients/cursor.json", "agent-plugin/mcp.json"):
        entry = server_of(path)
        assert (entry["command"], entry["args"][:3]) == ("uvx", ["--from", source, "gpuwarden"]), path
    (package,) = json.loads(FILES["server.json"])["packages"]
    assert package["runtimeArguments"] == [{"type": "named", "name": "--from", "value": source}]


def test_published_name_is_set_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SOURCE", "gpuwarden=={version}")
    monkeypatch.setattr("gpuwarden.interfaces.manifests.SOURCE", launch.SOURCE)
    fetched = {p for p, text in manifests().items() if f'"gpuwarden=={__version__}"' in text}
    assert fetched == {"clients/cursor.json", "agent-plugin/mcp.json", "server.json"}
    assert not any("git+" in text for text in manifests().values())


@pytest.mark.parametrize("client", ["claude", "codex", "gemini", "cursor", "agent-plugin", "registry"])
def test_launch_arguments_of_each_client_are_accepted_by_the_mcp_command(client: str) -> None:
    command = cli.commands["mcp"]
    assert command.make_context("mcp", launch.serve(client)[2:]).params["client"] == client


def test_no_root_file_hides_the_codex_manifest() -> None:
    """Codex prefers a portable plugin.json in the root, which supports neither variables nor hooks."""
    assert not (ROOT / "plugin.json").exists() and not (ROOT / "mcp.json").exists()
    assert "BeforeTool" in json.loads(FILES["hooks/hooks.json"])["hooks"], "Gemini reads its hooks there"
    assert (
        json.loads(FILES[".codex-plugin/plugin.json"])["hooks"]
        and json.loads(FILES[".cursor-plugin/plugin.json"])["hooks"]
    ), "the others would read them too"


# ------------------------------------------------------------------------------------------------------- variables


def read_names(tree: ast.Module) -> set[str]:
    """Return the variables that a module reads with `env.get`, by literal name or by the name of a text constant."""
    constants = {
        t.id: n.value.value
        for n in tree.body
        if isinstance(n, ast.Assign | ast.AnnAssign) and isinstance(n.value, ast.Constant)
        for t in (n.targets if isinstance(n, ast.Assign) else [n.target])
        if isinstance(t, ast.Name)
    }
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.args]
    read = [n.args[0] for n in calls if n.func.attr == "get" and ast.unparse(n.func.value).rpartition(".")[2] == "env"]
    found = {a.value if isinstance(a, ast.Constant) else constants.get(ast.unparse(a)) for a in read}
    return {name for name in found if isinstance(name, str) and name.isupper()}


@pytest.mark.slow
def test_every_variable_that_the_code_reads_is_passed_on() -> None:
    not_set_by_people = {"HOME", "PATH", "LD_LIBRARY_PATH", "GPUWARDEN_REHEARSAL_CLOCK", "GPUWARDEN_REHEARSAL_INSTANCE"}
    known = {v.name for v in variables()} | not_set_by_people
    # Code for real and rehearsed machines, and for the folders of clients.
    elsewhere = {"host", "runner", "rehearsal", "setup"}
    package = ROOT / "server" / "gpuwarden"
    names = {path: read_names(ast.parse(path.read_text("utf-8"))) for path in package.rglob("*.py")}
    found = {path.name: read - known for path, read in names.items() if not elsewhere & set(path.parts)}
    assert {p: n for p, n in found.items() if n} == {}, "name them in the table of the module's docstring"
    assert len(set().union(*names.values())) > 15, "it saw the reads"


def test_every_account_key_is_passed_on_as_secret() -> None:
    by_name = {v.name: v for v in variables()}
    for name, module in PROVIDERS.usable():
        for key in module.ACCOUNT_KEYS[:1]:
            assert by_name[key].secret, name
            # SkyPilot's own client reads its token and doesn't support a file.
            assert not by_name[f"{key}_FILE"].secret if name not in {"hf_jobs", "sky", "sky_jobs"} else True
    assert by_name["WANDB_API_KEY"].secret and not by_name["GPUWARDEN_POLICY"].secret


def test_variables_that_make_the_policy_stricter_are_passed_on() -> None:
    assert {"GPUWARDEN_HOME", "GPUWARDEN_POLICY", "GPUWARDEN_CAPS_PER_JOB_USD"} <= {v.name for v in variables()}


def test_clients_get_variable_names_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [v.name for v in variables()]
    for name in names:
        monkeypatch.setenv(name, "a-value-of-this-shell")
    assert manifests() == FILES
    assert server_of("clients/codex.json")["env_vars"] == names
    given = server_of("gemini-extension.json")["env"]
    del given["UV_PROJECT_ENVIRONMENT"]
    assert given == {name: f"${{{name}:-}}" for name in given} and given.keys() <= set(names)
    secret = {v.name for v in variables() if v.secret and "USERNAME" not in v.name}
    assert (
        secret | {"GPUWARDEN_HOME", "GPUWARDEN_POLICY", "RUNPOD_API_KEY_FILE"} <= given.keys()
        and "HF_HOME" not in given
    )
    (package,) = json.loads(FILES["server.json"])["packages"]
    assert {v["name"]: v["isSecret"] for v in package["environmentVariables"]} == {
        v.name: v.secret for v in variables()
    }


def test_registry_entry_stays_within_the_registrys_limits() -> None:
    entry = json.loads(FILES["server.json"])
    assert 1 <= len(entry["description"]) <= 100
    assert all(len(v["description"]) <= 200 for v in entry["packages"][0]["environmentVariables"])
    assert f"<!-- mcp-name: {entry['name']} -->" in (ROOT / "README.md").read_text("utf-8")


def test_readme_without_the_registry_name_is_refused(checkout: Path) -> None:
    (checkout / "README.md").write_text("# gpuwarden\n", "utf-8")
    with pytest.raises(ValueError, match="mcp-name"):
        manifests(checkout)


@pytest.mark.slow
def test_skillsaw_reports_no_fault(checkout: Path) -> None:
    program = Path(sys.executable).parent / "skillsaw"
    need("skillsaw", program.exists())
    write_manifests(checkout)
    # Codex and Cursor read the hooks that their manifests name, not Gemini's.
    (checkout / ".skillsaw.yaml").write_text(
        "rules:\n  codex-hooks-valid:\n    extra-events: [BeforeTool]\n  cursor-hooks-valid:\n    enabled: false\n"
    )
    done = subprocess.run([program, "lint", "."], cwd=checkout, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "All checks passed" in done.stdout, done.stdout + done.stderr
    assert "cursor-plugin" in done.stdout and "mcp-registry" in done.stdout, "it saw what is here"
    (checkout / "plugin/.claude-plugin/plugin.json").write_text('{"name": 7}\n', "utf-8")
    broken = subprocess.run([program, "lint", "."], cwd=checkout, capture_output=True, text=True, timeout=300)
    assert "All checks passed" not in broken.stdout, "it would see a fault"
