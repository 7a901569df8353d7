"""A pasted report is searched by title, the user's words, and the error; not by form, versions, code, or frames."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.knowledge import search, shipped
from gpuwarden.knowledge.report_parsing import MOST, MOST_WHOLE, gist
from gpuwarden.knowledge.search import MAX_QUERY

REPORT = """\
Loss turns into nan after two hours
- [x] I have read the guide
### System info
- `transformers` version: 5.1.0
- Platform: Linux-5.15.0-1040-x86_64
CUDA: 12.4
### What happens
I train a small model and after some time the loss is nan and never comes back.
from trl import SFTTrainer
args = SFTConfig(per_device_train_batch_size=4)
--num_generations 8 \\
Traceback (most recent call last):
  File "/home/someone/train.py", line 12, in <module>
    trainer.train(resume_from_checkpoint=checkpoint)
    ^^^^^^^^^^^^^
[rank0]: File "/opt/lib/trainer.py", line 99, in train
│ ❱ 1024 │   │   raise RuntimeError('DataLoader worker exited') │
 66%|######6   | 2/3 [00:01<00:00]
ValueError: loss is not finite
"""


def test_the_users_description_and_the_error_are_kept() -> None:
    assert gist(REPORT).splitlines() == [
        "Loss turns into nan after two hours",
        "I train a small model and after some time the loss is nan and never comes back.",
        "ValueError: loss is not finite",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "one line only",
        "import torch\nimport trl\nimport datasets\nimport peft\n",
        "a\n\nb\n\n\n",
        "--flag one \\\n--other two \\\n--third\n--fourth\n",
    ],
)
def test_a_short_or_code_only_text_is_unchanged(text: str) -> None:
    assert gist(text) == text


def test_the_start_and_the_error_of_a_long_report_are_kept() -> None:
    talk = "".join(f"Something else that I tried was number {n} of many.\n" for n in range(400))
    text = f"The run stops\n{talk}ValueError: Attempting to unscale FP16 gradients.\n"
    short = gist(text)
    assert len(short) <= MOST
    assert short.startswith("The run stops\n")
    assert short.endswith("ValueError: Attempting to unscale FP16 gradients.")


@pytest.mark.parametrize("at", ["begin", "end"])
def test_an_error_at_either_end_of_a_text_beyond_all_bounds_is_found(at: str) -> None:
    error = "ValueError: Attempting to unscale FP16 gradients."
    noise = "step done, all well\n" * (2 * MAX_QUERY // 20)
    text = f"{error}\n{noise}" if at == "begin" else f"{noise}{error}"
    assert search(shipped(), text)[0].id == "PREC-005"


def test_a_described_symptom_outranks_a_follow_up_line() -> None:
    summary = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    assert search(shipped(), summary)[0].id == "DIST-027"
    told = f"Loss is nan, stopping training\nAfter some steps the loss becomes NaN and the run stops.\n{summary}\n"
    assert [hit.id for hit in search(shipped(), told)][:2] == ["PREC-011", "DIST-027"]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=2_000))
def test_a_gist_never_exceeds_its_bound_or_the_text_length(text: str) -> None:
    assert len(gist(text)) <= max(len(text), MOST)


@pytest.mark.parametrize(
    "piece", ["-", "│ ", "a=1,", "9", " ", 'File "', "- [", "version 1", "torch 1.1 ", "=x", "rank0:"]
)
def test_long_lines_that_look_like_the_form_are_cut(piece: str) -> None:
    """A match that backtracks over such lines would take hours."""
    text = "\n".join(["title", *[piece * (600_000 // len(piece))] * 4, "end"])
    found = gist(text)
    assert found.startswith("title\n") and len(found) <= MOST_WHOLE + 1
