"""Facts of a run of a shipped trainer: the repos, settings and pushes that its arguments ask for.

The text of a trainer says nothing of these: they are settings, and static reading ends at the command line. Its digest
says what the text does, so that the arguments alone decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuwarden.scripts.hub_references import RepoUse, is_repo_id
from gpuwarden.scripts.script_usage import Push, Setting, Uses
from gpuwarden.scripts.shipped_trainers import Trainer, given_settings, shipped_as

_CONFIG = "--config"
_OPTIONAL_CALLS = {"LoraConfig": "lora_rank", "BitsAndBytesConfig": "quantize"}
_OFF = frozenset({"", "0", "none", "false"})
_BUILT_IN_REWARDS = frozenset({"answer", "boxed"})


@dataclass(frozen=True)
class TrainerRun:
    """A shipped trainer with the settings that it was given, and what is wrong with these."""

    trainer: Trainer
    given: Mapping[str, str]
    problems: tuple[tuple[str, str], ...] = ()

    def value(self, name: str) -> str:
        """Return a setting as text: given, or the default; empty where the trainer has no such setting."""
        option = self.trainer.options.get(name)
        return self.given.get(name, str(option.default) if option else "")

    @property
    def renames(self) -> dict[str, str]:
        """Return the columns that `--columns` renames."""
        pairs = (part.partition("=") for part in self.value("columns").split(",") if "=" in part)
        return {old.strip(): new.strip() for old, _, new in pairs}


def run_of_trainer(text: str, env: Mapping[str, str] | None, args: Sequence[str]) -> TrainerRun | None:
    """Return the run of a script that is a shipped trainer; None for another script, and where a file has settings."""
    found = shipped_as(text)
    if found is None or any(word.partition("=")[0] == _CONFIG for word in args):
        return None
    words = list(args)
    for n, word in enumerate(words):  # a command names the script among its words
        if word.endswith(".py") and not any(w.startswith("--") for w in words[:n]):
            words = words[n + 1 :]
            break
    return TrainerRun(found, *given_settings(found, env or {}, words))


def as_run(uses: Uses, run: TrainerRun, here: Sequence[str] = ()) -> Uses:
    """Return what a shipped trainer uses when it is run so, with these files in its working folder."""
    local = frozenset((*here, run.value("out")))
    off = {call for call, name in _OPTIONAL_CALLS.items() if run.value(name) in _OFF}
    trainers = tuple(
        replace(t, kwargs={k: v for k, v in t.kwargs.items() if k != "peft_config"}) for t in uses.trainers
    )
    target = run.value("hub_model_id")
    return replace(
        uses,
        run=run,
        repos=tuple(dict.fromkeys(u for u in _repos(run) if is_repo_id(u.id, local))),
        calls=tuple(c for c in uses.calls if c.last not in off),
        trainers=trainers,
        settings=dict(_settings(run)),
        pushes=(Push(0, "--hub-model-id", target),) if target else (),
        renames=run.renames,
        reads=tuple((old, 0) for old in run.renames),
        row_functions=0,
        makes=frozenset(),
        reshaped=False,
    )


def _repos(run: TrainerRun) -> Iterator[RepoUse]:
    """Yield the repos that settings name. A path that is not a repo's id is left out by the caller."""
    value = run.value
    revision = value("revision") if value("revision") != "main" else None
    yield RepoUse(value("model"), "model", 0, revision=revision, trains="dataset" in run.trainer.options)
    for name in ("dataset", "eval_dataset"):
        split = value("split") if name == "dataset" else value("eval_split") or value("split")
        yield RepoUse(value(name), "dataset", 0, "data", config=value("dataset_config") or None, split=split or None)
    if value("eval_split") and not value("eval_dataset"):
        config = value("dataset_config") or None
        yield RepoUse(value("dataset"), "dataset", 0, "data", config=config, split=value("eval_split"))
    for name, role in (("teacher", "model"), ("base", "model"), ("chat_template_from", "tokenizer")):
        yield RepoUse(value(name), "model", 0, role)
    for reward in map(str.strip, value("reward").split(",")):
        if reward not in _BUILT_IN_REWARDS and ".py:" not in reward:
            yield RepoUse(reward, "model", 0)


def _settings(run: TrainerRun) -> Iterator[tuple[str, Setting]]:
    """Yield the settings under the names that transformers has for them, for the estimates."""
    micro = _whole(run.value("micro_batch")) or 1
    named = {
        "output_dir": run.value("out"),
        "max_steps": _whole(run.value("steps")) or None,
        "num_train_epochs": float(run.value("epochs") or 1),
        "max_length": _whole(run.value("max_length")),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": max(1, (_whole(run.value("batch_size")) or micro) // micro),
        "use_peft": run.value("lora_rank") not in _OFF,
        "load_in_4bit": run.value("quantize") == "4bit",
    }
    yield from ((n, Setting(v, 0, "the command line")) for n, v in named.items() if v is not None)


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None
