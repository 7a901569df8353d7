"""Build architectures in a child process: read the task as JSON from stdin, and print one JSON line per model.

The installed version of transformers builds each model without weights, on torch's `meta` device, and compares tensor
names and shapes as it does when it loads a model. The child process opens no model files, runs no code from
repositories, and uses neither the network nor other programs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints.file_model import role
from gpuwarden.checkpoints.load_child import limit_memory

# Config keys that could select code, or a repository to load code from.
_LEFT_OUT = (
    "auto_map", "quantization_config", "_name_or_path", "name_or_path", "attn_implementation", "_attn_implementation",
    "_attn_implementation_internal", "experts_implementation", "_experts_implementation", "custom_pipelines",
)  # fmt: skip
_FORBIDDEN = ("socket.connect", "socket.getaddrinfo", "socket.bind", "subprocess.Popen", "os.system", "os.exec",
              "os.posix_spawn", "os.fork")  # fmt: skip
_SHOWN = 5


def main() -> None:
    """Build every model in the task. An error in one config does not prevent the other models from being built."""
    answer_each("models", lambda model: compare(model["config"], model["tensors"]))


def answer_each(tasks: str, work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """For each of the input's `tasks`, print the result of `work` or the reason why it failed."""
    given = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr
    limit_memory(int(given["memory"]))
    for task in given[tasks]:
        try:
            answer = work(task)
        except ImportError as why:
            answer = {"unable": f"{why.name} is not installed"}
        except Exception as why:  # transformers can raise any exception
            answer = {"unable": " ".join(f"{type(why).__name__}: {why}".split())[:200]}
        print(json.dumps(answer), file=out, flush=True)


def use_no_cache() -> None:
    """Use the working directory, which is empty, as the cache folder, so libraries can't read this machine's caches."""
    here = str(Path.cwd())
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HOME=here, TORCH_HOME=here)


def forbid(event: str, _: Any) -> None:
    """Raise PermissionError for an audit event that reports network access or the start of another program."""
    if event.startswith(_FORBIDDEN):
        raise PermissionError(f"{event} is not allowed here")


def compare(config: dict[str, Any], tensors: list[Any]) -> dict[str, Any]:
    """Build the architecture. Return the tensors that are missing, unexpected, or of a different shape."""
    use_no_cache()
    import torch
    import transformers

    sys.addaudithook(forbid)
    transformers.logging.set_verbosity(50)  # critical
    name = (config.get("architectures") or [""])[0]
    made = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not (isinstance(made, type) and issubclass(made, transformers.PreTrainedModel)):
        return {"unable": f"transformers {transformers.__version__} does not support architecture {str(name)[:60]!r}"}
    settings = transformers.AutoConfig.for_model(**harmless(config))
    state = {n: torch.empty(shape, dtype=torch.float32, device="meta") for n, shape in tensors}
    architecture: Any = made
    loaded = architecture.from_pretrained(
        None, config=settings, state_dict=state, output_loading_info=True, ignore_mismatched_sizes=True,
        device_map="meta", attn_implementation="eager", dtype=torch.float32,
    )  # fmt: skip
    built, info = loaded
    wrong = [f"{n} {list(ours)}, not {list(theirs)}" for n, ours, theirs in info["mismatched_keys"]]
    unexpected = set(info["unexpected_keys"])
    # The loader renames tensors before it matches them, so names are compared by role.
    roles = {role(n) for n in (*state, *built.state_dict()) if n not in unexpected}
    beyond = {n for n in unexpected if role(n) in roles}
    found = {
        "missing": info["missing_keys"], "wrong": wrong, "beyond": beyond, "unexpected": unexpected - beyond
    }  # fmt: skip
    lists = {what: sorted(names) for what, names in found.items()}
    return {
        "by": f"transformers {transformers.__version__}",
        **{what: [n[:200] for n in names[:_SHOWN]] for what, names in lists.items()},
        **{f"{what}_count": len(names) for what, names in lists.items()},
    }


def harmless(value: Any) -> Any:
    """Return the config without keys that select code, at any depth."""
    if isinstance(value, dict):
        return {k: harmless(v) for k, v in value.items() if k not in _LEFT_OUT}
    return [harmless(v) for v in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
