"""Every measurement and every tool runs at its smallest size."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from bench.__main__ import main

from gputrain.llama_cpp import SOURCE
from paths import ROOT
from real_parts import need

pytestmark = pytest.mark.slow
LONG = {"build_messages", "build_runtime_wording", "check_trainers", "picture", "rehearse_scripts", "ssh"}
BENCHES = sorted(path.stem for path in ROOT.glob("bench/[!_]*.py"))


def run(folder: Path, *argv: object, code: int = 0, **env: str) -> str:
    """Run a script in an empty folder; return its output."""
    command = [sys.executable, *map(str, argv)]
    path = os.pathsep.join([str(ROOT / "server"), os.environ.get("PYTHONPATH", "")])
    given = {**os.environ, "PYTHONPATH": path, "HF_HOME": str(folder / "hf"), **env}
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def marked(names: Iterable[str]) -> list[Any]:
    """Mark the slow scripts, so that only `make prove` runs them."""
    return [pytest.param(name, marks=[pytest.mark.prove] if name in LONG else []) for name in names]


@pytest.mark.parametrize("name", marked(BENCHES))
def test_a_measurement_prints_its_figures_and_their_references(name: str, tmp_path: Path) -> None:
    for program in ("sshd", "ssh", "scp", "rsync") if name == "ssh" else ():
        need(program, shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is not None)
    need("huggingface_hub", name != "hub" or find_spec("huggingface_hub") is not None)
    said = run(tmp_path, ROOT / "bench" / f"{name}.py", "--small")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines() if line.startswith("| ")
    ]
    assert all(len(row) == 4 and row[0] and row[1] for row in rows), rows
    assert len({(what, peer) for what, _, peer, _ in rows}) > 1 and any(float(ratio or 0) > 0 for *_, ratio in rows)


def test_the_summary_has_every_figure_and_reports_a_failed_measurement(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.py").write_text("print('about', '| a | 1 s | b 2 s | 0.50 |', sep='\\n')")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "_shared.py").write_text("raise SystemExit('no measurement')")
    assert main([], tmp_path) == 1
    table = capfd.readouterr().out.partition("peer or aim")[2]
    assert "| good         | a | 1 s | b 2 s | 0.50 |" in table and table.endswith("failed: bad\n")


# Each tool's arguments, and a part of its output. `EMPTY` is an empty folder.
EMPTY = "EMPTY"
TOOLS: dict[str, tuple[str, str]] = {
    "attacks": (f"{ROOT}/tests/backends/test_slurm_attacks.py -k pipe -p no:cacheprovider", "2 attacks, 2 cases"),
    "build_members": (f"--wheels {EMPTY} --only none", ""),  # a full run downloads wheels
    "build_messages": ("--list", "have an entry"),
    "build_runtime_wording": ("", "OOM-030 ^MemoryError$"),
    "build_signatures": (f"--wheels {EMPTY} --only none", ""),  # the same
    "check_advice": ("--help", "--wheels"),  # a full run downloads wheels
    "check_trainers": (f"--wheels {EMPTY} --only trl", "No matching distribution"),
    "corruption_matrix": ("--formats npy", "Against a manifest that was taken before, all"),
    "foreign_scripts": (f"check {EMPTY}", "0 internal errors"),
    "kube_apiserver": ("", "Install first"),  # a full run builds for ten minutes
    "measure_gpu": ("--table", "| not measured |"),
    "picture": ("demo.svg", ""),
    "public_logs": ("--help", "--mirror"),  # a full run downloads logs
    "readability": (f"{ROOT}/bench", "functions"),
    "rehearse_scripts": ("--only ^classify$ --most 0", "1 unchanged scripts: 1 passed"),
    "score_reports": (f"{ROOT}/tests/corpus/reports/blind-2026-11.jsonl", "in three"),
    "score_skew": (f"{ROOT}/tests/corpus/skew/open.jsonl", "likely right"),
    "seeded_faults": (f"--recorded --at {EMPTY}", "| no fault | 0 |"),
}
CODES = {"check_trainers": 2, "kube_apiserver": 1}


def test_every_tool_is_tested() -> None:
    others = {
        "build_site",
        "bundle",
        "llama_cpp",
    }  # tested in tests/docs/test_site.py, in tests/tools/test_bundle.py, and below
    assert {path.stem for path in ROOT.glob("tools/*.py")} == TOOLS.keys() | others


@pytest.mark.parametrize("name", marked(TOOLS))
def test_a_tool_runs(name: str, tmp_path: Path) -> None:
    need("torch", name != "rehearse_scripts" or find_spec("torch") is not None)
    words, said = TOOLS[name]
    (tmp_path / EMPTY).mkdir()
    env = {"PATH": ""} if name == "kube_apiserver" else {}
    assert said in run(tmp_path, ROOT / "tools" / f"{name}.py", *words.split(), code=CODES.get(name, 0), **env)
    assert name != "picture" or (tmp_path / "demo.svg").read_text("utf-8").startswith("<svg")


def test_an_existing_llama_cpp_build_is_found(tmp_path: Path) -> None:
    inner = f"{SOURCE.replace('-', '_').replace('==', '-')}/vendor/llama.cpp"
    kept = tmp_path / ".cache" / SOURCE.replace("==", "-") / inner
    (kept / "build-cpu" / "bin").mkdir(parents=True)
    for name in ("convert_hf_to_gguf.py", "build-cpu/bin/llama-quantize"):
        (kept / name).touch()
    said = run(tmp_path, ROOT / "tools" / "llama_cpp.py", HOME=str(tmp_path))
    assert said == f"{kept}:{kept / 'build-cpu'}\n"
