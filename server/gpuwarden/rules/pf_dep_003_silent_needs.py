from collections.abc import Iterator
from dataclasses import dataclass

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.ecosystem_tables import closure, listed
from gpuwarden.static_analysis.env_and_shell import installed
from gpuwarden.static_analysis.script_usage import Uses
from gpuwarden.static_analysis.static_eval import UNKNOWN
from gpuwarden.static_analysis.three_valued import truth
from gpuwarden.static_analysis.writes import LIGHTNING


@dataclass(frozen=True)
class _Need:
    """A package that a script needs but does not import. Any one of `names` suffices."""

    names: tuple[str, ...]
    why: str
    certain: bool = True


@rule(
    "PF-DEP-003",
    gate="submit",
    severity=Severity.ERROR,
    fix="Add the package to dependencies in the script's header.",
)
def silent_needs(facts: SubmitFacts) -> Iterator[Found]:
    """The header lists the packages that the script needs but does not import.

    Why: tokenizers, optimizers, metrics and trackers import helper packages only when they need them. A conversion
    script without sentencepiece and a detection script without albumentations both failed at unexpected points. If the
    need depends on an unknown condition, or the script survives without the package, the finding is a warning.

    Example:
        # dependencies = ["transformers>=5", "torch>=2.8"]
        from transformers import AutoModel
        AutoModel.from_pretrained("Qwen/Qwen3-0.6B", device_map="auto")

    Instead:
        # dependencies = ["transformers>=5", "torch>=2.8", "accelerate>=1.10"]
        from transformers import AutoModel
        AutoModel.from_pretrained("Qwen/Qwen3-0.6B", device_map="auto")

    """
    script = facts.script
    if script is None or script.error or script.header is None or not script.header.dependencies:
        return
    there = closure(listed(script.header.dependencies, installed(script.uses.shells, "pip")))
    for need in _needs(script.uses, {name for name, _ in script.uses.imports}):
        if not there & set(need.names):
            severity = None if need.certain else Severity.WARNING
            yield Found(f"{need.why} needs {' or '.join(need.names)}, which is not in dependencies", severity=severity)


def _needs(uses: Uses, imports: set[str]) -> Iterator[_Need]:
    modules = {i.partition(".")[0] for i in imports}
    last = {i.rpartition(".")[2] for i in imports}
    plain = (t for t in uses.trainers if t.last in {"Trainer", "Seq2SeqTrainer"})
    if modules & {"transformers", "trl"} and any(not t.name.startswith(LIGHTNING) for t in plain):
        yield _Need(("accelerate",), "the transformers Trainer")
    loads = [c for c in uses.calls if c.last == "from_pretrained"]
    if mapped := [c for c in loads if c.kwargs.get("device_map") is not None]:
        certain = any(c.certain and c.kwargs["device_map"] is not UNKNOWN for c in mapped)
        yield _Need(("accelerate",), "device_map", certain=certain)
    yield from _settings_need(uses)
    if small := [c for c in uses.calls if any(c.kwargs.get(f"load_in_{n}bit") is True for n in (4, 8))]:
        certain = any(c.certain for c in small)
        yield _Need(("bitsandbytes", "unsloth"), "loading in 4 or 8 bit", certain=certain)
    attention = [(str(c.kwargs.get("attn_implementation")), c.certain) for c in loads]
    if flash := [certain for name, certain in attention if name == "flash_attention_2"]:
        yield _Need(("flash-attn", "kernels"), 'attn_implementation="flash_attention_2"', certain=any(flash))
    if kernels := [certain for name, certain in attention if name.startswith("kernels-community")]:
        yield _Need(("kernels",), "a kernel from the Hub", certain=any(kernels))
    yield from _text_needs(uses, modules)
    yield from _vision_needs(uses, last)


def _settings_need(uses: Uses) -> Iterator[_Need]:
    reports = uses.setting("report_to")
    for name in reports if isinstance(reports, list) else [reports]:
        if isinstance(name, str) and name in {"wandb", "trackio", "tensorboard", "mlflow", "comet_ml", "swanlab"}:
            names = ("tensorboard", "tensorboardx") if name == "tensorboard" else (str(name).replace("_", "-"),)
            yield _Need(names, f'report_to="{name}"')
    optimizer = uses.setting("optim")
    if isinstance(optimizer, str):
        if ("8bit" in optimizer and "torch" not in optimizer) or optimizer.startswith("paged_"):
            yield _Need(("bitsandbytes",), f'optim="{optimizer}"')
        elif "galore" in optimizer or "apollo" in optimizer:
            yield _Need(("galore-torch", "apollo-torch"), f'optim="{optimizer}"')
    if uses.setting("use_vllm") is True:
        yield _Need(("vllm",), "use_vllm=True")
    if (used := truth(uses.setting("deepspeed"))) is not False:
        yield _Need(("deepspeed",), "deepspeed=", certain=used is True)


def _text_needs(uses: Uses, modules: set[str]) -> Iterator[_Need]:
    words = {w for shell in uses.shells for w in shell.words}
    if any("convert_hf_to_gguf" in w or "convert_lora_to_gguf" in w for w in words) or "llama_cpp" in modules:
        yield _Need(("sentencepiece",), "converting a tokenizer to GGUF", certain=False)
        yield _Need(("protobuf",), "converting a tokenizer to GGUF", certain=False)
    models = " ".join(r.id.lower() for r in uses.repos if r.type == "model")
    if any(n in models for n in ("t5", "mbart", "xlm-roberta", "deberta-v3", "llama-2", "mistral-7b-v0", "gemma")):
        yield _Need(("sentencepiece",), "this model family's tokenizer", certain=False)
    if any(n in models for n in ("deberta-v3", "llama-2")):
        yield _Need(("protobuf",), "this model family's tokenizer", certain=False)


def _vision_needs(uses: Uses, last: set[str]) -> Iterator[_Need]:
    if "detection" in uses.methods and any(
        "Detr" in n or "DETR" in n or "AutoModelForObjectDetection" in n for n in last
    ):
        yield _Need(("scipy",), "the matcher in DETR models")
        yield _Need(("timm",), "the backbone in DETR models", certain=False)
    if "MeanAveragePrecision" in last or any("mean_ap" in n for n in last):
        yield _Need(("pycocotools", "faster-coco-eval"), "MeanAveragePrecision from torchmetrics")
    if uses.methods & {"detection", "classification", "segmentation"}:
        yield _Need(("pillow",), "reading images")
    if any(r.id.startswith("timm/") for r in uses.repos):
        yield _Need(("timm",), "a model from timm/")
    metrics = [c for c in uses.calls if c.name == "evaluate.load" and c.args and isinstance(c.args[0], str)]
    if metrics := [c for c in metrics if c.args[0] in {"accuracy", "f1", "precision", "recall"}]:
        certain = any(c.certain for c in metrics)
        yield _Need(("scikit-learn",), 'evaluate.load("accuracy")', certain=certain)
