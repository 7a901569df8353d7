"""The commands of "Your cluster in five commands", run on a real Slurm cluster as a user types them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cli_kit import Cli
from paths import ROOT
from slurm_kit import Cluster

PAGE = (ROOT / "docs/your-cluster.md").read_text("utf-8")


def commands(section: str) -> list[list[str]]:
    """Return the commands of the last block of a section, one per `gpuwarden`, without comments."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    block = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[-1]
    lines = [part for line in block.splitlines() for part in line.split("&&")]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("section", ["Slurm", "Kubernetes", "SkyPilot"])
def test_each_cluster_block_has_the_five_steps(section: str) -> None:
    block = commands(section)
    assert all(words[0] == "gpuwarden" for words in block)
    assert [words[1] for words in block if words[1] not in {"teardown", "approve"}] == [
        "submit", "submit", "wait", "pull", "verify",
    ]  # fmt: skip


@pytest.mark.prove
def test_documented_slurm_commands_prove_the_job(
    run: Cli, train: Path, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(train.parent)
    run("notes", "set", "platforms.slurm/local.scratch", str(tmp_path / "scratch"))
    known = {"slurm/lab": "slurm/local"}
    for words in commands("Slurm"):
        code, reply = run(*(known.get(word, word) for word in words[1:]))
        assert code == 0, reply
        known |= {f"{reply[key][0]}...": reply[key] for key in ("receipt", "job_id") if reply.get(key)}
    assert (reply["verdict"], reply["problems"]) == ("proven", [])
