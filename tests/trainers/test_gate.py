"""The submit gate accepts every bundled trainer, submitted as an agent would, without warnings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.app import open_context
from gpuwarden.core.models import JobSpec
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.rehearsal.hub.server import HubServer
from hubserver import hub_server
from rulefacts import HF_TOKEN
from trainer_kit import SCRIPTS, shipped

pytestmark = pytest.mark.anyio
BASE, CHAT = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct"
REWARD = ["--columns", "solution=answer", "--reward", "answer"]
PAIRS = "rehearsal/text-pairs"
FLAGS = {
    "cpt": ["--model", BASE, "--dataset", "Salesforce/wikitext"],
    "distill": ["--model", CHAT, "--dataset", "trl-lib/DeepMath-103K", "--teacher", "Qwen/Qwen2.5-1.5B"],
    "dpo": ["--model", CHAT, "--dataset", "trl-lib/ultrafeedback_binarized"],
    "grpo": ["--model", CHAT, "--dataset", "trl-lib/DeepMath-103K", *REWARD],
    "image_classification": ["--model", "google/vit-base-patch16-224", "--dataset", "ethz/food101"],
    "kto": ["--model", CHAT, "--dataset", "trl-lib/kto-mix-14k"],
    "merge_and_gguf": ["--model", CHAT, "--types", "Q8_0"],
    "object_detection": ["--model", "PekingU/rtdetr_v2_r18vd", "--dataset", "rishitdagli/cppe-5"],
    "orpo": ["--model", CHAT, "--dataset", "argilla/distilabel-intel-orca-dpo-pairs", "--columns", "input=prompt"],
    "reward": ["--model", CHAT, "--dataset", "trl-lib/ultrafeedback_binarized"],
    "rloo": ["--model", CHAT, "--dataset", "trl-lib/DeepMath-103K", *REWARD],
    "sentence_embedding": ["--model", "google-bert/bert-base-uncased", "--dataset", PAIRS],
    "sft": ["--model", BASE, "--dataset", "trl-lib/Capybara"],
}
PLATFORMS: dict[str, dict[str, Any]] = {
    "rehearsal/runpod": {"gpu": "RTX 4090", "outputs": ["/workspace/out"], "durable_storage": True},
    "hf-jobs": {"gpu": "a10g-large", "outputs": ["/hub/models/rehearsal/tuned"]},
}
WHERE = {"rehearsal/runpod": ["--out", "/workspace/out"], "hf-jobs": ["--hub-model-id", "rehearsal/tuned"]}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with hub_server(tmp_path_factory.mktemp("hub")) as server:
        server.store.put("dataset", PAIRS, {"train.jsonl": json.dumps({"anchor": "a", "positive": "b"})})
        yield server


@pytest.fixture
def ctx(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    # uv installs a header's requirements on the machine; a dry run starts nothing, so any program of that name will do.
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.touch(0o755)
    policy = tmp_path / "policy.toml"
    caps = "[caps]\nper_job_usd = 50\nper_day_usd = 500\nper_instance_usd = 50\n"
    policy.write_text(f"{caps}[local]\nnetwork = true\nunsandboxed = true\n")
    env = {**hub.env, "HF_TOKEN": HF_TOKEN, "GPUWARDEN_HOME": str(tmp_path), "GPUWARDEN_POLICY": str(policy)}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(uv.parent), prepend=":")
    return open_context("cli", env=env)


async def remarks(ctx: Context, platform: str, script: str, flags: list[str]) -> list[Finding]:
    """Return a dry run's findings above severity info."""
    spec = {
        "name": "t",
        "platform": platform,
        "script": script,
        "args": [*flags, *WHERE[platform]],
        "timeout_s": 14_400,
    }
    spec |= {"secrets": ["HF_TOKEN"], "max_cost_usd": 40, **PLATFORMS[platform]}
    checked = await submit(ctx, JobSpec.model_validate(spec), dry_run=True)
    assert checked.receipt
    return [f for f in checked.findings if f.severity is not Severity.INFO]


@pytest.mark.prove
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("method", FLAGS)
async def test_a_trainer_passes_the_gate_without_findings(ctx: Context, method: str, platform: str) -> None:
    found = await remarks(ctx, platform, shipped(method), FLAGS[method])
    assert [(f.rule, f.message) for f in found] == []


async def test_every_trainer_is_covered() -> None:
    assert {p.stem for p in SCRIPTS.glob("*.py")} - {"check_staleness"} == set(FLAGS)


@pytest.mark.slow
async def test_a_changed_trainer_is_a_new_script(ctx: Context) -> None:
    text = "# one more line\n" + shipped("sft")
    found = await remarks(ctx, "rehearsal/runpod", text, FLAGS["sft"])
    assert [f.rule for f in found] == ["PF-REL-004"]
