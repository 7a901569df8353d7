"""The check that an engine's machines can start a job: definite problems refuse it; others warn or are unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.backends import ray as ray_backend
from gpuwarden.backends._kube_image import image_readiness
from gpuwarden.backends._ray_api import python_of
from gpuwarden.backends.ray import RayBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import Refused, Unreachable
from gpuwarden.core.models import JobSpec, Place
from gpuwarden.core.readiness import Needs, Uv
from gpuwarden.core.rules import Severity
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.submission.submit import check_spec
from slurm_kit import Cluster, login_node, train

pytestmark = pytest.mark.anyio


def header(*dependencies: str, python: str = ">=3.9", body: str = "print(1)") -> str:
    return f'# /// script\n# requires-python = "{python}"\n# dependencies = {json.dumps(dependencies)}\n# ///\n{body}\n'


async def found(ctx: Context, job: JobSpec, rule: str) -> list[tuple[Severity, str]]:
    """Return one rule's findings about a job, whether or not the job is refused."""
    try:
        findings = (await check_spec(ctx, job)).findings
    except Refused as refused:
        findings = refused.findings
    return [(f.severity, f.message) for f in findings if f.rule == rule]


# ------------------------------------------------------------------------------------------------------------ Slurm


@pytest.fixture
def ctx(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{cluster.env.get('PATH', '')}:/usr/bin:/bin")
    return login_node(tmp_path, cluster, monkeypatch)


@pytest.mark.slow
@pytest.mark.real
async def test_unmet_script_requirements_on_a_cluster_are_reported(ctx: Context, tmp_path: Path) -> None:
    [(severity, said)] = await found(ctx, train(script=header("no-such-thing>=1")), "PF-PLACE-003")
    assert severity is Severity.ERROR and "no-such-thing>=1" in said
    [(severity, said)] = await found(ctx, train(script=header(python=">=3.30")), "PF-PLACE-003")
    assert severity is Severity.ERROR and "Python >=3.30" in said
    assert not await found(ctx, train(script=header("pydantic")), "PF-PLACE-003")
    assert not await found(ctx, train(script=header(), gpu="h100"), "PF-PLACE-004"), "the partition's GPUs count"

    command = train(script=None, command=("no-such-program", "/no/such/train.yaml"))
    program, file = await found(ctx, command, "PF-PLACE-005")
    assert program[0] is file[0] is Severity.WARNING
    assert "/no/such/train.yaml" in program[1] and "no-such-program" in file[1]


# -------------------------------------------------------------------------------------------------------------- Ray

RAYLET = "/opt/ray/lib/python3.11/site-packages/ray/core/src/ray/raylet/raylet"


def node(*words: str, state: str = "ALIVE", **more: Any) -> dict[str, Any]:
    return {"cmdline": [*words], "raylet": {"state": state}, **more}


def summary(*nodes: object) -> tuple[int, Any]:
    return 200, {"data": {"summary": [*nodes]}}


@pytest.mark.parametrize(
    ("reply", "python"),
    [
        (summary(node(RAYLET, "--port=1"), node(RAYLET)), (3, 11)),
        (summary(node(RAYLET.replace("lib/python3.11", "lib64/python3.9"))), (3, 9)),
        (summary(node(RAYLET), node(RAYLET.replace("11", "12"), state="DEAD")), (3, 11)),
        (summary(node(RAYLET), node(RAYLET.replace("11", "12"))), None),
        (summary(node(RAYLET), node("/usr/bin/raylet")), None),
        (summary(node(RAYLET), node()), None),
        (summary(node(RAYLET), {"raylet": {"state": "ALIVE"}, "cmdline": [3]}), None),
        (summary(), None),
        (summary("odd", None), None),
        ((200, {"data": {"summary": {}}}), None),
        ((404, "not found"), None),
    ],
)
def test_a_ray_clusters_python_is_known_if_all_nodes_agree(
    reply: tuple[int, Any], python: tuple[int, int] | None
) -> None:
    assert python_of(reply) == python


async def test_only_definite_ray_cluster_gaps_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [summary(node(RAYLET))]

    async def ask(place: Place, method: str, path: str) -> tuple[int, Any]:
        if not replies:
            raise Unreachable("Ray does not answer", "Try again.")
        return replies[-1]

    monkeypatch.setattr(ray_backend, "ask", ask)
    backend, place = RayBackend(SystemClock()), Place(platform="ray/lab", run_root=str(tmp_path / "runs"))
    lacks = await backend.readiness(place, Needs(">=3.12", ("torch",)))
    assert (lacks.python, lacks.unmet, lacks.uv) == ("3.11", ("Python >=3.12",), Uv.UNUSED)
    assert not lacks.starts_header
    for needs in (
        Needs(">=3.11", ("torch",)),
        Needs(">=3.12"),  # started by the node's first Python, which is unknown
        Needs("nonsense", ("torch",)),
        Needs("", ("torch",), program="torchrun", files=("/no/such", f"{tmp_path}/other")),
    ):
        assert (await backend.readiness(place, needs)).starts_header
    files = (f"{place.run_root}/gone.yaml", f"{tmp_path}/elsewhere.yaml")
    assert (await backend.readiness(place, Needs(files=files))).no_files == files[:1], "the path that all share"
    replies.append(summary(node("/usr/bin/raylet")))
    assert (await backend.readiness(place, Needs(">=3.12", ("torch",)))).starts_header
    replies.clear()
    with pytest.raises(Unreachable):
        await backend.readiness(place, Needs(">=3.12", ("torch",)))


# ------------------------------------------------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize(
    ("image", "lacks"),
    [
        ("python:3.12-slim", ("torch>=2.8",)),
        ("docker.io/library/python:3.12.4", ("torch>=2.8",)),
        ("python:3.10-slim", ("Python >=3.11", "torch>=2.8")),
        ("ghcr.io/astral-sh/uv:python3.12-bookworm-slim", ("torch>=2.8",)),
        ("pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime", ("torch>=2.8",)),
        ("pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime", ()),
        ("pytorch/pytorch:latest", ()),
        ("python:latest", ()),
        ("python@sha256:00", ()),
        ("registry.example.org/python:3.12", ()),
        ("nvcr.io/nvidia/pytorch:25.01-py3", ()),
        ("team/train:3.10", ()),
    ],
)
def test_an_image_name_shows_unmet_requirements(image: str, lacks: tuple[str, ...]) -> None:
    needs = Needs(">=3.11", ("torch>=2.8", "pip", "numpy; platform_machine == 'arm64'", "not a requirement"))
    there = image_readiness(image, needs)
    assert (there.unmet, there.no_python) == (lacks, False) and image in there.where


@pytest.mark.parametrize(
    ("image", "none"),
    [
        ("ubuntu:22.04", True),
        ("debian", True),
        ("nvidia/cuda:12.4.1-cudnn-runtime-ubuntu22.04", True),
        ("nvidia/cuda:12.4.1-base-ubuntu22.04", True),
        ("nvidia/cuda:12.4.1-devel-ubuntu22.04", False),
        ("team/ubuntu:22.04", False),
    ],
)
def test_an_image_name_shows_whether_python_is_missing(image: str, none: bool) -> None:
    assert image_readiness(image, Needs()).no_python is none


def test_a_plain_image_lacks_the_commands_imports() -> None:
    needs = Needs(program="python", modules=("torch",))
    assert image_readiness("python:3.12", needs).no_modules == ("torch",)
    assert not image_readiness("python:3.12", Needs(modules=("torch",), env={"PYTHONPATH": "/data"})).no_modules
    assert not image_readiness("team/train", needs).no_modules
