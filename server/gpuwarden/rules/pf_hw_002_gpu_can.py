from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

_AMPERE = 80
_FIRST_WITH_WHEELS = 75


@rule(
    "PF-HW-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use features that this GPU supports (fp16, sdpa), or choose an Ampere or newer GPU (A10G, L4, A100, H100).",
)
def gpu_can(facts: SubmitFacts) -> Iterator[Found]:
    """The GPU supports the features that the script uses.

    Why: bf16 and flash attention need compute capability 8.0. On a T4 (7.5) or V100 (7.0), they fail after the model
    has been loaded. trl configs use bf16 by default. If the script may run without flash attention, the finding is a
    warning.

    Example:
        submit_job(gpu="t4-small", script='SFTConfig(output_dir="out", bf16=True)')

    Instead:
        submit_job(gpu="t4-small", script='SFTConfig(output_dir="out", fp16=True, bf16=False)')

    """
    gpu, uses = facts.gpu, facts.uses
    if gpu is None or gpu[0].capability >= _AMPERE:
        return
    of_trl = any(c.name.startswith("trl.") and c.last.endswith("Config") for c in uses.calls)
    name = f"{gpu[0].name} (compute capability {gpu[0].capability / 10:g})"
    if uses.setting("bf16") is True or uses.setting("tf32") is True:
        what = "bf16" if uses.setting("bf16") is True else "tf32"
        yield Found(
            f"line {uses.line_of(what)} uses {what}, which {name} does not support",
            fix=f"Set fp16=True, {what}=False.",
        )
    elif uses.methods and of_trl and "bf16" not in uses.settings and uses.setting("fp16") is not True:
        yield Found(f"trl uses bf16 by default, which {name} does not support", fix="Set fp16=True, bf16=False.")
    if flash := [c for c in uses.calls if "flash_attention" in str(c.kwargs.get("attn_implementation"))]:
        severity = Severity.WARNING if all(c.unusual for c in flash) else None
        message = f"flash attention needs an Ampere or newer GPU, not {name}"
        yield Found(message, fix='Use attn_implementation="sdpa".', severity=severity)
    header = facts.script.header if facts.script else None
    pinned = any("torch" in d and ("<" in d or "==" in d) for d in (header.dependencies if header else ()))
    if gpu[0].capability < _FIRST_WITH_WHEELS and not pinned:
        yield Found(
            f"current torch wheels have no kernels for {name}",
            fix="Pin a torch release from 2025 with CUDA 12.6, or choose another GPU.",
        )
