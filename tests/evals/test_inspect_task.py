"""The Inspect task, run by the real Inspect with its mock model, in front of the real server."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from evals.scoring.surface import HERE
from evals.transcripts.load_inspect import claims
from evals.transcripts.loaders import read
from evals.transcripts.source import Source

from paths import KITS
from real_parts import need

pytestmark = pytest.mark.prove
RUN = """
    import json, sys
    from pathlib import Path

    import pytest  # the kit's neighbours want it
    from inspect_ai import eval
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    from evals.inspect_task import chosen, make_task
    from evals.harness.skill_pack import load_pack
    from evals_kit import CASE, RealServer

    def used(output):  # else the mock model counts tokens with tables from the network
        output.usage = ModelUsage(input_tokens=100, output_tokens=10, total_tokens=110)
        return output

    def call(tool, **args):
        return used(ModelOutput.for_tool_call("mockllm/model", tool, args))

    def say(text):
        return used(ModelOutput.from_content("mockllm/model", text))

    folder = Path(sys.argv[1])
    plans = {
        "good": [call("search_references", query="OOM"), call("list_instances"), say("Nothing is billing.")],
        "mute": [say("All is fine, trust me.")],
        "wild": [call("rent_the_moon"), call("check_job", job="x"), call("list_instances"), say("Nothing is billing.")],
        "loop": [call("list_instances")] * 40,
        "pack": [call("Skill", skill="gpu-training"), call("list_instances"), say("Nothing is billing.")],
    }
    class NoScenario(RealServer):
        def call(self, tool, args):
            raise OSError("the cloud is gone")

    found = {}
    for name, plan in [*plans.items(), ("dead", plans["good"])]:
        pack = load_pack("pack" if name == "pack" else "none")
        scene = NoScenario if name == "dead" else RealServer
        task = make_task({CASE.id: CASE}, scene, pack, folder / "run" / name)
        model = get_model("mockllm/model", custom_outputs=plan)
        (log,) = eval(task, model=model, log_dir=str(folder / "logs" / name), log_format="json", display="none")
        sample = log.samples[0]
        score = sample.scores.get("gpuwarden_evals") if sample.scores else None
        found[name] = {
            "status": log.status,
            "value": score and score.value,
            "why": score and score.explanation,
            "failing": score and score.metadata["failing"],
            "error": sample.error and sample.error.message,
            "log": log.location,
            "leaked": CASE.scenario.hidden in log.model_dump_json(),
        }
    (folder / "found.json").write_text(json.dumps(found))
"""


def test_inspect_plays_and_scores_like_our_runner(tmp_path: Path) -> None:
    need("inspect_ai", importlib.util.find_spec("inspect_ai") is not None)
    import json

    (tmp_path / "go.py").write_text(textwrap.dedent(RUN))
    path = os.pathsep.join([str(HERE.parent), str(KITS)])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "go.py"), str(tmp_path)], cwd=tmp_path, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["good"]["value"], found["good"]["why"]) == ("C", ""), found["good"]
    assert found["pack"]["value"] == "C"
    assert not any(each["leaked"] for each in found.values())
    assert found["mute"]["value"] == "I" and "ASKED" in found["mute"]["failing"]
    assert found["wild"]["value"] == "I" and found["wild"]["failing"] == ["H-SCHEMA"]
    assert found["loop"]["status"] == "success"
    record = (tmp_path / "run" / "loop" / "plumbing" / "1" / "transcript.jsonl").read_text()
    assert record.count('"type": "call"') == 8 and '"ended": "limit"' in record
    assert found["dead"]["value"] is None and "the cloud is gone" in found["dead"]["error"]
    assert found["dead"]["status"] == "error"
    log = Path(found["good"]["log"])
    assert claims(Source(log)), "our loader reads the log that Inspect wrote"
    (transcript,) = read(log, bare="gpuwarden")
    assert [c.tool for c in transcript.calls] == ["search_references", "list_instances"]


def test_the_task_is_found_by_its_path(tmp_path: Path) -> None:
    need("inspect_ai", importlib.util.find_spec("inspect_ai") is not None)
    done = subprocess.run(
        [sys.executable, "-m", "inspect_ai", "list", "tasks", "evals/inspect_task.py"], cwd=HERE.parent, timeout=300,
        check=False, capture_output=True, text=True, env={**os.environ, "INSPECT_LOG_DIR": str(tmp_path)},
    )  # fmt: skip
    assert "inspect_task.py@gpuwarden" in done.stdout, done.stderr[-2000:]
