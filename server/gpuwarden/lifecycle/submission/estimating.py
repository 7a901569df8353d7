"""Estimate the GPU memory and the run time of a script or a model, without using a GPU or running a job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from anyio import to_thread

from gpuwarden.core.errors import BadRequest, NotFound, Unreachable
from gpuwarden.core.hardware import GPUS, Gpu, gpu_of
from gpuwarden.core.models import JobSpec
from gpuwarden.hub.client import HubClient, HubConfig
from gpuwarden.hub.details import read_repo
from gpuwarden.hub.preflight_facts import hub_facts, read_config
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.submission.bundling import with_trainer_package
from gpuwarden.static_analysis.estimate.memory import vram
from gpuwarden.static_analysis.estimate.parts import parts_of
from gpuwarden.static_analysis.estimate.setup import Interval, Run, run_of
from gpuwarden.static_analysis.estimate.shape import shape_of
from gpuwarden.static_analysis.estimate.time import duration
from gpuwarden.static_analysis.estimate.traced import NotTraced, trace, unproven
from gpuwarden.static_analysis.script import read_script

Fit = Literal["fits", "may_fit", "will_not_fit"]
_PIPELINE = "model_index.json"
_TRY_STEPS = "Run a few steps with the job's batch size and resolution, and measure the peak memory."


@dataclass(frozen=True)
class Card:
    """A GPU model and count, whether the run fits, and its duration in seconds."""

    gpu: Gpu
    count: int
    fit: Fit
    seconds: Interval | None


@dataclass(frozen=True)
class Estimate:
    """The memory needed on one GPU, the parts of that memory in bytes, and the result for each requested GPU.

    `not_traced` is the reason why the memory was computed with a formula; empty if the memory was traced.
    """

    model: str
    run: Run
    memory: Interval
    not_traced: str
    parts: dict[str, float]
    cards: tuple[Card, ...]


async def estimate(
    ctx: Context, what: str, args: Sequence[str], gpus: Sequence[str], settings: Mapping[str, Any]
) -> Estimate:
    """Return the estimate for a script file, a model on the Hub, or a folder that contains a model's config.json.

    `settings` override the script's settings. Raises NotFound for a model that can't be read, and BadRequest for an
    unknown GPU or a script that does not train a model.
    """
    cards = [card for name in gpus if (card := gpu_of(name))] or [(gpu, 1) for gpu in GPUS.values()]
    if unknown := [name for name in gpus if gpu_of(name) is None]:
        raise BadRequest(
            f"{unknown[0]!r} is not a known GPU",
            f"Known GPUs: {', '.join(GPUS)}. For several GPUs, use a form such as a100x4.",
        )
    most = max(count for _, count in cards)
    config = HubConfig.from_env(ctx.env)
    if what.endswith(".py"):
        model, run = await _of_script(ctx, Path(what), args, config, most)
    else:
        model, run = await _of_model(what, config, most)
    run = Run.model_validate({**run.model_dump(), **settings})
    traces, not_traced = None, unproven(run)
    if not not_traced:
        try:
            traces = await to_thread.run_sync(trace, run, await _described(model, config))
        except (NotTraced, NotFound, Unreachable) as why:
            not_traced = str(why)
    memory = traces.interval() if traces else vram(run)
    parts = parts_of(run)
    shown = {
        "weights": parts.weights,
        "gradients": parts.gradients,
        "optimizer": parts.states,
        "activations": parts.activations + parts.layer,
        "logits": parts.logits,
    }
    found = []
    for gpu, count in cards:
        # On a nearly full GPU, the allocator frees unused blocks; only a trace for that memory size accounts for this.
        low = traces.interval(gpu.gb).low if traces and memory.high > gpu.gb else memory.low
        fit: Fit = "will_not_fit" if low > gpu.gb else "may_fit" if memory.high > gpu.gb else "fits"
        found.append(Card(gpu, count, fit, duration(run.model_copy(update={"gpus": count}), gpu)))
    return Estimate(model, run, memory, not_traced, shown, tuple(found))


async def _of_script(ctx: Context, path: Path, args: Sequence[str], config: HubConfig, gpus: int) -> tuple[str, Run]:
    text = _read_text(path)
    if text is None:
        raise NotFound(f"the script {path} can't be read", "Specify the path of a Python script.")
    text = with_trainer_package(text, path.parent)
    script = read_script(text, {}, args)
    if script.error:
        raise BadRequest(f"the script can't be read: {script.error}", "Fix the script.")
    if not script.uses.trainers and any(name.partition(".")[0] == "diffusers" for name, _ in script.uses.imports):
        raise BadRequest("the memory that a diffusion model needs can't be estimated", _TRY_STEPS)
    spec = JobSpec(name="estimate", platform="local", script=text, args=tuple(args), outputs=())
    facts = await hub_facts(script, spec, lambda: config, clock=ctx.clock)
    model = facts.model if facts else None
    if model is None:
        raise BadRequest("the script does not train exactly one model from the Hub", "Specify the model's id instead.")
    if not model.parameters:
        raise NotFound(f"the size of {model.use.id} is unknown: its config.json can't be read", "Check the token.")
    rows = None
    if facts is not None and len(facts.data) == 1 and (data := facts.data[0]).config:
        wanted = data.use.split or "train"
        rows = next((s.rows for s in data.config.splits if s.name == wanted), None)
    return model.use.id, run_of(script.uses, model.parameters, rows, gpus, model.shape)


async def _of_model(what: str, config: HubConfig, gpus: int) -> tuple[str, Run]:
    described = await _described(what, config)
    shape = shape_of(described)
    if shape is None and {"image_size", "num_channels", "_class_name"} & described.keys():
        raise NotFound(f"{what} is an image model, so the memory that it needs can't be estimated", _TRY_STEPS)
    if shape is None:
        raise NotFound(f"the config.json of {what} can't be read, or describes no layers", "Estimate a script instead.")
    return what, Run(params=round(shape.parameters), shape=shape, bits=shape.bits, weights="half", gpus=gpus)


async def _described(what: str, config: HubConfig) -> dict[str, Any]:
    """Return the config.json of a folder or of a model on the Hub; empty if it can't be read."""
    text = _read_text(Path(what) / "config.json")
    if text is not None:
        try:
            described = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        return described if isinstance(described, dict) else {}
    if (Path(what) / _PIPELINE).is_file():
        return {"_class_name": "DiffusionPipeline"}
    async with HubClient(config) as hub:
        repo = await read_repo(hub, what, "model", most_files=2_000)
        if repo.status == "error":
            raise Unreachable(f"model {what!r} could not be read: {repo.why}", "Try again.")
        if not repo.exists:
            raise NotFound(f"model {what!r}: {repo.why}", "Specify a script, another model's id, or a folder.")
        if any(file.path == _PIPELINE for file in repo.files):
            return {"_class_name": "DiffusionPipeline"}
        return await read_config(hub, repo) or {}


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
