"""The list of public scripts is well formed, every kind of fault can be seeded, and the gate reads the result."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from foreign_faults import KINDS, controls
from foreign_kit import CORPUS, REPO, Job, Script, blocking, findings, scripts
from gpuwarden.core.rules import Severity

TEXT = """# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "trl>=1.16",
#     "peft",
#     "datasets",
#     "transformers>=5",
#     "accelerate",
#     "torch",
# ]
# ///
import argparse
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="out")
parser.add_argument("--push_to_hub", action="store_true")
args = parser.parse_args()
data = load_dataset("openai/gsm8k", "main", split="train").map(lambda row: {"text": row["question"]})
config = SFTConfig(output_dir=args.output_dir, learning_rate=2e-5, max_steps=100)
trainer = SFTTrainer(model="Qwen/Qwen2.5-0.5B", args=config, train_dataset=data, peft_config=LoraConfig())
trainer.train()
trainer.save_model(args.output_dir)
if args.push_to_hub:
    trainer.push_to_hub()
"""
BY_SIGNATURES = {"keyword that does not exist", "flag with a typo", "import that does not exist"}
BY_ESTIMATES = {"timeout too short"}


def test_the_script_list_is_valid_and_large_enough() -> None:
    listed = scripts()
    assert len(listed) >= 150
    assert len({s.name for s in listed}) == len(listed)
    assert all(re.fullmatch(r"[0-9a-f]{40}", s.commit) for s in listed)
    unseen = [s for s in listed if s.unseen]
    assert len(unseen) >= 20 and len({s.repo for s in unseen}) >= 12
    assert not {s.repo for s in unseen} & {s.repo for s in listed if not s.unseen}
    assert all(reason for s in listed for _, _, reason in s.refused)


def test_the_repo_table_covers_every_repo_named_by_the_jobs() -> None:
    table = json.loads((CORPUS / "foreign_hub.json").read_text(encoding="utf-8"))
    named = {a for s in scripts() for a in s.args if re.fullmatch(r"[\w-]+/[\w.-]+", a) and not a.startswith("out")}
    assert named - {REPO} <= table["models"].keys() | table["datasets"].keys()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_fault_changes_a_job_and_most_kinds_are_blocked(kind: str) -> None:
    platform, fault = KINDS[kind]
    push = ("--push_to_hub",) if platform == "hf-jobs" else ()
    outputs = ("/hub/models/me/model",) if push else ("out",)
    plain = Job(TEXT, ("--output_dir", "out", *push), outputs, platform=platform)
    assert not blocking(findings(plain))
    job = fault(plain, ast.parse(TEXT))
    assert job is not None and job != plain
    ast.parse(job.text)
    said = [f for f in findings(job) if f.severity in {Severity.ERROR, Severity.UNKNOWN, Severity.WARNING}]
    if kind not in BY_SIGNATURES | BY_ESTIMATES:
        assert blocking(said), said


def test_a_control_adds_no_refusal(tmp_path: Path) -> None:
    script = Script("a/b", "0" * 40, "train.py")
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/train.py").write_text(TEXT, encoding="utf-8")
    (control,) = controls([script], tmp_path)
    assert not blocking(findings(control.job))


def test_a_wrong_repo_is_seeded_into_a_model_flag() -> None:
    job = Job("parser.parse_args()", ("--model_name_or_path", "facebook/opt-125m", "--data", "x"))
    changed = KINDS["repo that does not exist"][1](job, ast.parse(job.text))
    assert changed is not None and changed.args == ("--model_name_or_path", "facebook/opt-125m-v9x", "--data", "x")


def test_a_script_that_still_saves_gets_no_fault() -> None:
    job = Job("trainer.save_model()\nbest = saver.save_checkpoint(model)")
    assert KINDS["nothing saved"][1](job, ast.parse(job.text)) is None
    job = Job("trainer.save_state()\ntrainer._save(folder, state_dict=state)")
    assert KINDS["nothing saved"][1](job, ast.parse(job.text)) is None


def test_a_keyword_is_added_before_a_calls_trailing_comment() -> None:
    header = '# /// script\n# dependencies = ["trl"]\n# ///\n'
    job = Job(header + 'SFTConfig(\n    output_dir="out",  # a folder\n    # hub_model_id="me/it"\n)\n')
    changed = KINDS["argument that was removed"][1](job, ast.parse(job.text))
    assert changed is not None
    [call] = [node for node in ast.walk(ast.parse(changed.text)) if isinstance(node, ast.Call)]
    assert [k.arg for k in call.keywords] == ["output_dir", "evaluation_strategy"]
    assert KINDS["argument that was removed"][1](Job(job.text.removeprefix(header)), ast.parse(job.text)) is None
