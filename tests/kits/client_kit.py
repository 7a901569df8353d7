"""Fixtures for the tests with real clients: a checkout, the installed uv, and one question to each client."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from gpuwarden.interfaces.launch import Run
from gpuwarden.interfaces.manifests import ROOT
from model_server import SHELL, Asked, Model, Say, Step, Use
from real_agents import PATH, need_agent, said
from real_parts import need

SKILLS = ["checkpoint-and-teardown", "dataset-preflight", "gpu-training", "training-debug"]
DONE = Say("Nothing is billing.")
CODEX = pytest.mark.parametrize("of", ["", "a-model-without-scripts"])
GEMINI = "gemini-2.5-flash"


@pytest.fixture(name="checkout", scope="module")
def checkout_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Check out only the files that git tracks."""
    root = tmp_path_factory.mktemp("a checkout") / "gpuwarden"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    for name in filter(None, listed.stdout.split("\0")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name, follow_symlinks=False)
    return root


@pytest.fixture(name="hub", scope="module")
def hub_fixture(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commit the checkout to the repository that the README names, in a folder that stands in for GitHub."""
    hub = tmp_path_factory.mktemp("a hub")
    repository = hub / "gpuwarden" / "gpuwarden.git"
    own = ["-c", "user.name=tests", "-c", "user.email=tests@example.com", "-c", "core.autocrlf=false"]
    git = ["git", *own, f"--git-dir={repository}", f"--work-tree={checkout}"]
    subprocess.run(["git", "init", "--quiet", "--bare", repository], check=True)
    for words in (["config", "uploadpack.allowFilter", "true"], ["add", "--all"], ["commit", "--quiet", "-m", "all"]):
        subprocess.run([*git, *words], cwd=checkout, check=True)
    return hub


def archived(hub: Path, folder: Path) -> Path:
    """Unpack the archive that GitHub creates for a release. Gemini installs the archive if a release has one."""
    archive = ["git", "-C", str(hub / "gpuwarden" / "gpuwarden.git"), "archive", "--format=tar", "HEAD"]
    folder.mkdir()
    made = subprocess.run(archive, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=made, check=True)
    return folder


def documented(client: str) -> list[list[str]]:
    """Return the README's commands for installing gpuwarden in a client."""
    text = (ROOT / "README.md").read_text("utf-8").replace("\\\n", " ")
    line = next(row for row in text.splitlines() if row.startswith((f"{client} plugin", f"{client} extensions")))
    return [shlex.split(command) for command in line.split("&&")]


def with_hub(folder: Path, hub: Path, env: dict[str, str]) -> dict[str, str]:
    """Put a git wrapper first on the PATH that reads GitHub repositories from the folder `hub`."""
    real = shutil.which("git")
    (folder / "git").write_text(f'#!/bin/sh\nexec {real} -c "url.file://{hub}/.insteadOf=https://github.com/" "$@"\n')
    (folder / "git").chmod(0o755)
    # Keep Gemini from reaching the real GitHub.
    return env | {"GIT_TERMINAL_PROMPT": "0", "HTTPS_PROXY": "http://127.0.0.1:9"}


@pytest.fixture(name="uv_cache", scope="session")
def uv_cache_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Share one uv cache among all clients, because each of them has an empty home."""
    return tmp_path_factory.mktemp("uv")


def with_uv(folder: Path, cache: Path, env: dict[str, str]) -> dict[str, str]:
    """Put a wrapper around the real uv first on the PATH that records the environment it receives.

    Clients pass on only part of their environment, so the wrapper sets the variables that uv needs on a closed network.
    """
    real = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), PATH]))
    need("uv", real is not None)
    kept = {n: os.environ[n] for n in ("SSL_CERT_FILE", "UV_INDEX_URL", "UV_DEFAULT_INDEX") if n in os.environ}
    given = {"UV_CACHE_DIR": str(cache), "UV_PYTHON": sys.executable, "UV_PYTHON_DOWNLOADS": "never", **kept}
    folder.mkdir()
    lines = ["#!/bin/sh", f'{{ pwd; env; }} > "{folder}/arrived.$$.txt"']
    lines += [f"export {name}='{value}'" for name, value in given.items()]
    (folder / "uv").write_text("\n".join([*lines, f'exec {real} "$@"']) + "\n")
    (folder / "uv").chmod(0o755)
    return env | {"PATH": f"{folder}:{env['PATH']}"}


def arrived(folder: Path) -> list[tuple[Path, dict[str, str]]]:
    """Return the working directory and environment of each uv call, in no particular order."""
    found = []
    for file in folder.glob("arrived.*.txt"):
        place, *rows = file.read_text().splitlines()
        found.append((Path(place), dict(row.split("=", 1) for row in rows if "=" in row)))
    return found


def patient(asked: Asked) -> Step:
    """Ask for the instances once the tool is available: Codex starts before a plugin's server has answered."""
    if (asked.results and '"ok":true' in asked.results[-1]) or len(asked.results) > 40:
        return DONE
    there = {"list_instances", "exec"} & {name.rpartition("__")[2] for name in asked.offered}
    return Use("list_instances", {}) if there and len(asked.results) % 2 else Use(SHELL, {"command": "sleep 0.5"})


def codex_model(home: Path, server: Model) -> None:
    """Configure Codex to use the model server."""
    given = ['model_provider = "given"', "[analytics]", "enabled = false", "[model_providers.given]", 'name = "given"']
    given += [f'base_url = "{server.url}/v1"', 'wire_api = "responses"', 'env_key = "OPENAI_API_KEY"']
    file = home / ".codex" / "config.toml"
    before = file.read_text() if file.exists() else ""
    file.write_text("\n".join([*given[:1], before, *given[1:]]) + "\n")


def ask_claude(env: dict[str, str], work: Path, *words: str) -> list[dict[str, Any]]:
    options = ["-p", "--output-format", "stream-json", "--verbose", *words]
    out = said(["claude", *options], env, work, stdin="Which machines bill?")
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def ask_codex(env: dict[str, str], work: Path, of: str) -> None:
    model_of = ["--model", of] if of else []
    said(["codex", "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", *model_of, "-"],
         env, work, stdin="Which machines bill?")  # fmt: skip


def gemini_model(home: Path) -> None:
    """Configure Gemini's login. An environment variable sets the address of its model."""
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
    (home / ".gemini" / "settings.json").write_text(json.dumps(settings))


def ask_gemini(env: dict[str, str], work: Path) -> None:
    words = ["-p", "Which machines bill?", "--approval-mode", "yolo", "--model", GEMINI]
    said(["gemini", *words], env | {"GEMINI_CLI_TRUST_WORKSPACE": "true"}, work)


@contextmanager
def codex_server(env: dict[str, str], work: Path) -> Iterator[Any]:
    """Run Codex's app server, as its front ends do, and yield a function that calls it by JSON-RPC."""
    app = subprocess.Popen(
        [need_agent("codex"), "app-server"], env=env, cwd=work, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert app.stdin is not None and app.stdout is not None
    numbers = iter(range(1, 100))

    def ask(method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = next(numbers)
        app.stdin.write(json.dumps({"id": number, "method": method, "params": params}) + "\n")  # type: ignore[union-attr]
        app.stdin.flush()  # type: ignore[union-attr]
        return next(r["result"] for r in map(json.loads, app.stdout) if r.get("id") == number)  # type: ignore[arg-type]

    try:
        ask("initialize", {"clientInfo": {"name": "tests", "version": "1"}})
        yield ask
    finally:
        app.kill()
        app.wait()
        app.stdin.close()
        app.stdout.close()


def trust(env: dict[str, str], work: Path) -> list[str]:
    """Trust every hook that Codex lists, as its `/hooks` page does; return their status afterwards."""

    def listed() -> list[dict[str, Any]]:
        return list(ask("hooks/list", {"cwds": [str(work)]})["data"][0]["hooks"])

    with codex_server(env, work) as ask:
        assert {hook["trustStatus"] for hook in listed()} == {"untrusted"}
        value = {hook["key"]: {"trusted_hash": hook["currentHash"]} for hook in listed()}
        ask("config/batchWrite", {"edits": [{"keyPath": "hooks.state", "value": value, "mergeStrategy": "upsert"}]})
        return [str(hook["trustStatus"]) for hook in listed()]


def tools_of(run: Run, env: Mapping[str, str]) -> int:
    """Start a server as a client does, and return the number of its tools."""

    async def count() -> int:
        server = StdioServerParameters(command=run["command"], args=run["args"], env={**env, **run.get("env", {})})
        async with Client(stdio_client(server), mode="legacy") as client:
            return len((await client.list_tools()).tools)

    return anyio.run(count)
