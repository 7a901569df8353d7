"""Rehearsals with the real libraries: correct scripts pass to the end, and faults that only a run shows are found."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

from first_step_faults import KINDS
from first_step_kit import SCRIPTS, rehearsed
from gpuwarden.remote.first_step import environment
from gpuwarden.remote.first_step.start import Order, rehearse
from gpuwarden.remote.host.interpreter import Installed
from gpuwarden.remote.sandbox import detect
from gpuwarden.remote.sandbox.words import Kind
from gpuwarden.static_analysis.script import Header
from real_parts import need

pytestmark = [pytest.mark.prove, pytest.mark.real]


@pytest.fixture(name="libraries", autouse=True)
def libraries_fixture() -> None:
    need("bubblewrap", detect.detect().kind is Kind.BUBBLEWRAP)
    need(
        "torch, transformers, trl and peft",
        all(map(importlib.util.find_spec, ("torch", "transformers", "trl", "peft"))),
    )


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo", "classify", "adapter_loop", "loop"])
def test_a_sound_script_passes(name: str) -> None:
    found = rehearsed((SCRIPTS / f"{name}.py").read_text())
    assert found.outcome == "passed" and found.reached[-1] == "end" and found.steps >= 1, found
    assert found.resumed is (None if "loop" in name else True) and found.files
    assert ("me/grpo" in found.pushed) is (name == "grpo")


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("loop", "folder that does not exist", "checkpoints/last"),
        ("loop", "loss without a gradient", "does not require grad"),
        ("adapter_loop", "column by a computed name", "s_x"),
        ("classify", "keyword in a dictionary", "lerning_rate_x"),
        ("dpo", "method that does not exist", "push_to_hubd"),
        ("grpo", "nothing to train", "requires a gradient"),
    ],
)
def test_a_fault_visible_only_at_runtime_is_found(name: str, kind: str, words: str) -> None:
    import ast

    text = (SCRIPTS / f"{name}.py").read_text()
    changed = KINDS[kind](text, ast.parse(text))
    assert changed is not None
    found = rehearsed(changed)
    assert found.outcome == "fault" and words in found.message, found


PLAIN = """\
import os, torch
net = torch.nn.Linear(4, 1).cuda()
step = torch.optim.AdamW(net.parameters(), lr=1e-3)
for batch in range(50):
    loss = net(torch.randn(8, 4, device="cuda")).square().mean()
    loss.backward()
    step.step()
os.makedirs("out", exist_ok=True)
torch.save(net.state_dict(), "out/last.pt")
"""


def test_pytorch_works_in_an_environment_made_by_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    need("uv", shutil.which("uv", path=path) is not None)
    nothing = Installed(python=".".join(map(str, sys.version_info[:3])), markers={})
    monkeypatch.setattr(environment, "installed_here", lambda header: nothing)
    torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    made = environment.environment_for(Header((torch,)), tmp_path / "environments", {**os.environ, "PATH": path})
    need("a package index with PyTorch", made.own)
    assert not list(Path(made.python).parent.glob("pip*"))
    assert rehearse(Order(PLAIN, own_environment=True), made.python).outcome == "passed"
    wrong = rehearse(Order(PLAIN.replace("(4, 1)", "(4, 1, biass=1)"), own_environment=True), made.python)
    assert (wrong.outcome, wrong.line) == ("fault", 2) and "biass" in wrong.message
