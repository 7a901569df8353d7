"""Rewards for methods that generate: built-in functions, functions in a file, or a reward model."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain.hardware import Plan
from gputrain.outcome import Exit, Stop
from gputrain.rows import Data
from gputrain.settings import option
from gputrain.text import TextSettings, tokens


@dataclass
class GeneratingSettings(TextSettings):
    """Settings for methods that generate answers during training."""

    max_completion_length: int = option(512, "maximum tokens per answer", least=1)
    temperature: float = option(1.0, "temperature of generation", least=0.01, most=5)


@dataclass
class OnlineSettings(GeneratingSettings):
    """Settings for methods that score generated answers with rewards."""

    learning_rate: float = option(1e-6, "peak learning rate; use about 1e-5 with LoRA", least=0, most=1)
    reward: str = option("", "rewards, comma-separated: answer, boxed, file.py:function, or a reward model")
    generations: int = option(8, "number of answers to generate and compare for each prompt", least=2)
    steps_per_rollout: int = option(1, "optimizer steps per generated set of answers", least=1)
    beta: float = option(0.0, "weight of the penalty for the distance to the reference model", least=0)

    def check(self) -> None:
        """Raise Stop if a required setting is missing or settings contradict each other.

        Answers are not saved, so a run resumes exactly only from a step that generates new ones.
        """
        super().check()
        if not self.reward:
            raise Stop(Exit.CONFIG, "reward is not set", "pass --reward answer, boxed, file.py:function or a model")
        if self.save_steps % self.steps_per_rollout:
            message = f"save_steps {self.save_steps} is not a multiple of steps_per_rollout {self.steps_per_rollout}"
            raise Stop(Exit.CONFIG, message, "choose a multiple; otherwise a resumed run would differ")
        if self.batch_size % self.generations:
            message = f"batch_size {self.batch_size} is not a multiple of generations {self.generations}"
            raise Stop(Exit.CONFIG, message, "choose a multiple: each prompt's answers are compared in one batch")


def text_of(completion: Any) -> str:
    """Return the text of a completion, which is plain text or a conversation."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def reward_answer(completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    """Return, for each completion, 1 if it contains the row's answer and 0 if not."""
    return [float(str(a).strip() in text_of(c)) for c, a in zip(completions, answer, strict=True)]


def reward_boxed(completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    r"""Return, for each completion, 1 if its last \boxed{} is the row's answer and 0 if not."""
    found = [re.findall(r"\\boxed\{([^{}]*)\}", text_of(c)) for c in completions]
    return [float(bool(f) and f[-1].strip() == str(a).strip()) for f, a in zip(found, answer, strict=True)]


def reward_letters(completions: list[Any], **columns: Any) -> list[float]:
    """Return the proportion of letters in each completion, a reward for smoke runs that varies between answers."""
    return [sum(c.isalpha() for c in text_of(text)) / max(1, len(text_of(text))) for text in completions]


def load_rewards(settings: OnlineSettings, data: Data) -> list[Any]:
    """Return the reward functions and models.

    Raises:
        Stop: a reward can't be loaded, or the data lacks the column that the reward reads.

    """
    built_in: dict[str, Callable[..., list[float]]] = {
        "answer": reward_answer,
        "boxed": reward_boxed,
        "letters": reward_letters,
    }
    found: list[Any] = []
    for name in filter(None, (part.strip() for part in settings.reward.split(","))):
        file, colon, function = name.rpartition(":")
        if name in built_in:
            if name != "letters" and "answer" not in data.train.column_names:
                raise Stop(Exit.DATA, f"reward {name} needs the column answer", "rename one with --columns old=answer")
            found.append(built_in[name])
        elif colon and file.endswith(".py"):
            found.append(function_of(Path(file), function))
        else:
            found.append(name)
    return found


def function_of(file: Path, name: str) -> Any:
    """Load a function from a file."""
    try:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        return getattr(module, name)
    except Exception as error:
        raise Stop(Exit.CONFIG, f"reward {file}:{name} can't be loaded: {error}", "write file.py:function") from error


def check_prompts(settings: GeneratingSettings, tokenizer: Any, data: Data) -> None:
    """Raise Stop if a prompt and its answer together may be longer than max_length."""
    room = settings.max_length - settings.max_completion_length
    longest = max(tokens(tokenizer, prompt) for prompt in data.train["prompt"][:2000])
    if longest > room:
        message = f"a prompt has {longest} tokens; max_length minus max_completion_length is {room}"
        raise Stop(Exit.DATA, message, f"pass --max-length {longest + settings.max_completion_length}")


def rollout(settings: OnlineSettings, plan: Plan) -> dict[str, Any]:
    """Return the generation arguments. Each set of answers is used for a whole number of optimizer steps."""
    return {
        "num_generations": settings.generations,
        "max_completion_length": settings.max_completion_length,
        "steps_per_generation": plan.accumulate * settings.steps_per_rollout,
        "temperature": settings.temperature,
        "beta": settings.beta,
    }
