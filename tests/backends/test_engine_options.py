"""Options that an engine would misread as a second field, a variable, or another line."""

from __future__ import annotations

from typing import Any

import pytest

from gpuwarden.backends import _slurm_options
from gpuwarden.backends.base import load_backend
from gpuwarden.backends.slurm import SlurmBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import JobSpec

HOSTILE = ["ubuntu\nprivileged: true", "${{ secrets.HF_TOKEN }}", "a b", "--rm", "x,y", "", "x" * 501]
ENGINES = ["dstack/main", "sky/gcp", "kubernetes/here"]


def settled(platform: str, **options: Any) -> JobSpec:
    backend = load_backend(platform.partition("/")[0], SystemClock())
    return backend.settle(JobSpec(platform=platform, command=("true",), options=options))


@pytest.mark.parametrize("platform", ENGINES)
@pytest.mark.parametrize("image", HOSTILE)
@pytest.mark.attack("spending", "puts a secret of the project or a second field into the name of an image")
def test_a_hostile_image_name_is_refused(platform: str, image: str) -> None:
    with pytest.raises(BadRequest, match=r"options\.image"):
        settled(platform, image=image)


@pytest.mark.parametrize("platform", ENGINES)
@pytest.mark.parametrize(
    "image",
    [
        "python:3.12-slim",
        "docker:nvcr.io/nvidia/pytorch:24.05-py3",
        "localhost:5000/me/train@sha256:" + "0" * 64,
        "projects/deeplearning-platform-release/global/images/family/common-cu121",
    ],
)
def test_registry_and_cloud_image_names_are_accepted(platform: str, image: str) -> None:
    assert settled(platform, image=image).options["image"] == image


def test_azure_and_oracle_images_are_accepted() -> None:
    for image in ("/CommunityGalleries/AzureHPC/Images/ubuntu-hpc", "ocid1.image.oc1.iad.a|ubuntu"):
        assert settled("sky/azure", image=image).options["image"] == image


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_skypilot_instance_type_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=r"options\.instance_type"):
        settled("sky/gcp", instance_type=name)


@pytest.mark.parametrize(
    "name", ["1x_A100-80GB_SECURE", "4CPU--16GB--A100:1", "VM.Standard.E4.Flex$_4_16", "1x-RTX_4090-32-65536"]
)
def test_skypilot_instance_types_are_accepted(name: str) -> None:
    assert settled("sky/gcp", instance_type=name).options["instance_type"] == name


@pytest.mark.parametrize("gpu", ["a100:1,license:matlab", "a100,b", "a 100", "a100\n", "--wrap=x", ""])
@pytest.mark.attack("spending", "requests a license from Slurm under the name of a GPU")
def test_a_malformed_slurm_gpu_type_is_refused(gpu: str) -> None:
    with pytest.raises(BadRequest):
        SlurmBackend(SystemClock()).settle(JobSpec(platform="slurm/x", command=("true",), gpu=gpu))


@pytest.mark.parametrize("gpu", ["a100", "A100-SXM4-80GB", "nvidia_a100", "3090", "any"])
def test_slurm_gpu_types_are_accepted(gpu: str) -> None:
    assert any(
        w.startswith("--gres=gpu:")
        for w in _slurm_options.arguments(JobSpec(platform="slurm/x", command=("true",), gpu=gpu))
    )
