"""A log's failure is found in any form of traceback from any rank, apart from errors that the run recovered from."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import lines_run
from gpuwarden.interfaces.results.diagnosing import diagnose_log
from gpuwarden.knowledge import diagnose, search, shipped
from gpuwarden.knowledge.failure import Outcome, Reading, Weight, missing_name, read_failure
from gpuwarden.knowledge.log_lines import CHUNK, MAX_LOG, read_lines, read_log
from paths import CORPUS

LOGS = CORPUS / "logs"
HEALTHY = sorted((LOGS / "healthy").glob("*.log"))
FAILING = sorted((LOGS / "failing").glob("*.log"))
SCALE = "ValueError: Attempting to unscale FP16 gradients."
CHAIN = f"""\
step 10/100 loss 1.21
torch 2.13.0
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/amp/grad_scaler.py", line 260, in _unscale_grads_
    raise ValueError("Attempting to unscale FP16 gradients.")
{SCALE}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/job/train.py", line 7, in <module>
    main()
  File "/venv/lib/python3.11/site-packages/torch/optim/adamw.py", line 20, in step
    scaler.step(optimizer)
RuntimeError: the step was not
made
"""


def of_rank(rank: int, text: str) -> list[str]:
    return [f"[rank{rank}]: {line}" for line in text.splitlines()]


def raised(text: str) -> tuple[str, str]:
    found = read_failure(text).exception
    assert found is not None
    return found.type, found.message


def test_the_chain_frame_package_and_progress_are_read() -> None:
    failure = read_failure(CHAIN)
    assert failure.outcome is Outcome.FAILED
    assert failure.exception is not None
    assert (failure.exception.type, failure.exception.message) == ("RuntimeError", "the step was not made")
    assert (failure.exception.package, failure.exception.version) == ("torch", "2.13.0")
    assert failure.exception.frame.endswith("adamw.py:20 in step")
    assert [one.message for one in failure.chain] == ["Attempting to unscale FP16 gradients."]
    assert failure.progress is not None and failure.progress.text == "step 10/100 loss 1.21"
    assert failure.query == "RuntimeError: the step was not made torch"


def test_interleaved_ranks_are_separated() -> None:
    one, two = of_rank(0, CHAIN), of_rank(1, CHAIN.replace("FP16", "FP32"))
    mixed = "\n".join(line for pair in zip(one, two, strict=True) for line in pair)
    failure = read_failure(mixed)
    assert failure.ranks == 2
    assert failure.exception is not None and failure.exception.rank == "0"
    assert [one.message for one in failure.chain] == ["Attempting to unscale FP16 gradients."]


@pytest.mark.parametrize(
    "prefix", ["[rank3]: ", "[default1]:", "(RayTrainWorker pid=77, ip=10.0.0.2) ", "2026-11-21T10:00:00.123Z ", "7: "]
)
def test_a_launchers_prefix_does_not_hide_a_traceback(prefix: str) -> None:
    text = "\n".join(prefix + line for line in CHAIN.splitlines())
    assert raised(text) == ("RuntimeError", "the step was not made")
    assert read_failure(text).chain != ()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "ValueError   Traceback (most recent call last)\nFile ~/x/trl/x.py:12, in f(a)\n\nValueError: no",
            "ValueError",
        ),
        ("│ /usr/lib/site-packages/trl/x.py:99 in train │\n╰─────╯\nRuntimeError: no", "RuntimeError"),
        ("E   KeyError: 'step'", "KeyError"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "torch.OutOfMemoryError"),
        (
            '  File "a.py", line 1, in <module>\nrequests.exceptions.ConnectTimeout: slow',
            "requests.exceptions.ConnectTimeout",
        ),
    ],
)  # fmt: skip
def test_other_exception_formats_are_read(text: str, kind: str) -> None:
    assert raised(text)[0] == kind


def test_an_error_followed_by_training_is_recovered_and_never_likely() -> None:
    text = f"{CHAIN}step 11/100 loss 1.20\nstep 12/100 loss 1.19\n"
    failure = read_failure(text)
    assert failure.outcome is Outcome.RUNNING and failure.exception is None
    assert [one.message for one in failure.recovered] == ["the step was not made"]
    assert diagnose(shipped(), text, failed=None) == ()
    assert all(found.certainty == "possible" for found in diagnose(shipped(), text, exit_code=1))
    killed = diagnose(shipped(), f"{text}Killed\n", exit_code=137)
    assert killed[0].id == "OOM-004" and "PREC-005" not in {found.id for found in killed}


def test_steps_of_another_rank_are_not_a_recovery() -> None:
    text = "\n".join((*of_rank(1, CHAIN), *of_rank(0, "step 11/100 loss 1.2\nstep 12/100 loss 1.1")))
    assert read_failure(text).outcome is Outcome.FAILED


@pytest.mark.parametrize(
    "sample",
    [
        "INFO:absl:tokens: ac ##me made skinny sleeve am ##36 ##7",
        "Wed 07 Sep 2022 07:50:24 - INFO - utils_squad1 -   tokens: [CLS] 是 由 哪 两 个 公 司 开 发 的 [SEP] 请 至",
        "2024-05-02 10:46:41 DEBUG data: what do we do if it fails? [SEP] I can ask",
    ],
)
def test_a_question_in_a_logged_sample_is_not_the_users(sample: str) -> None:
    log = "\n".join(["INFO:absl:Writing example 0 of 131884", sample, *(["INFO:absl:input_ids: 101 5982 0"] * 6)])
    assert Reading(log).failure.is_log
    assert diagnose_log(log).code == "nothing_failed"
    assert search(shipped(), log) == ()


def test_a_user_question_before_logger_lines_is_not_a_log() -> None:
    asked = "I get no progress after this, why?\nINFO:absl:Writing example 0 of 131884\nINFO:absl:input_ids: 101 0"
    assert not Reading(asked).failure.is_log


def test_a_warning_counts_only_without_a_worse_failure() -> None:
    warning = "UserWarning: os.fork() was called. No space left on device\n"
    assert {found.id for found in diagnose(shipped(), f"{warning}{SCALE}\n")} == {"PREC-005"}
    assert {found.certainty for found in diagnose(shipped(), warning)} == {"possible"}


def test_a_message_that_a_terminal_wrapped_is_matched_as_one() -> None:
    text = "╰─────╯\nRuntimeError: element 0 of tensors does not require grad and does \nnot have a grad_fn\n"
    assert diagnose(shipped(), text)[0].id == "CONV-003"


@pytest.mark.parametrize(
    ("log", "code", "want"),
    [
        ("bash: line 1: ./train.sh: cannot execute: required file not found", 127, ("UNI-026", "possible")),
        ("/usr/bin/env: 'python3\\r': No such file or directory", 127, ("UNI-026", "possible")),
        ("train.sh: 1: set: Illegal option -", 2, ("UNI-026", "possible")),
        ("step 1\nstep 2", 127, ("UNI-053", "possible")),
    ],
)
def test_a_shell_message_comes_before_its_exit_code(log: str, code: int, want: tuple[str, str]) -> None:
    first, *_ = diagnose(shipped(), log, exit_code=code)
    assert (first.id, first.certainty) == want


def test_the_exit_code_and_the_signal_are_read_from_the_log() -> None:
    failure = read_failure("step 1\n  exitcode  : -9 (pid: 7)\n  traceback : Signal 9 (SIGKILL) received by PID 7\n")
    assert (failure.outcome, failure.exit_code, failure.signal) == (Outcome.FAILED, -9, "SIGKILL")
    assert read_failure("step 1\n", 139).signal == "SIGSEGV"


def test_device_and_kernel_lines_are_collected() -> None:
    lines = [
        "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus",
        "Memory cgroup out of memory: Killed process 7",
    ]
    assert [line.text for line in read_failure("\n".join(lines)).device] == lines


@pytest.mark.parametrize(
    ("message", "want"),
    [
        (
            "SFTConfig.__init__() got an unexpected keyword argument 'max_seq_length'",
            ("keyword", "SFTConfig.__init__", "max_seq_length"),
        ),
        ("'Trainer' object has no attribute 'tokenizer'", ("attribute", "Trainer", "tokenizer")),
        ("module 'trl.core' has no attribute 'x'", ("attribute", "trl.core", "x")),
        ("cannot import name 'PPOTrainer' from 'trl' (/venv/x.py)", ("name", "trl", "PPOTrainer")),
        ("Can't get attribute 'Box' on <module 'trl.core' from '/venv/x.py'>", ("name", "trl.core", "Box")),
        ("No module named 'transformers.modeling_layers'", ("module", "", "transformers.modeling_layers")),
    ],
)  # fmt: skip
def test_a_name_missing_from_a_release_is_parsed(message: str, want: tuple[str, str, str]) -> None:
    found = missing_name(message)
    assert found is not None and (found.kind, found.owner, found.name) == want


# ------------------------------------------------------------------------------------------------- recorded logs


def test_there_are_enough_logs_of_successful_real_runs() -> None:
    assert sum(path.stem.startswith(("run_", "real_")) for path in HEALTHY) >= 40


@pytest.mark.parametrize("path", HEALTHY, ids=lambda p: p.stem)
def test_a_healthy_log_matches_no_entry(path: Path) -> None:
    text = path.read_bytes().decode()
    assert diagnose(shipped(), text, failed=None, limit=50) == ()
    reply = diagnose_log(text)
    assert (reply.code, reply.diagnoses) == ("nothing_failed", []), reply.failure
    assert [(hit.id, hit.how) for hit in search(shipped(), text)] == []


ANSWERS = [f"A car drives {n} km in two hours. How fast is it?\n{n}/2 km/h\nreward is 0.{n}" for n in range(140)]
TASKS = [f"# TASK 0 EVALUATION AFTER TASK {n}\nAverage Loss: 3.{n}, Accuracy: 0.8{n}, Samples: 974" for n in range(3)]


@pytest.mark.parametrize("lines", [["=== Epoch 1/8 ===", *ANSWERS, "=== Epoch 2/8 ==="], TASKS])
def test_model_answers_and_table_headings_get_no_hits(lines: list[str]) -> None:
    assert search(shipped(), "\n".join(lines)) == ()


@pytest.mark.parametrize("path", FAILING, ids=lambda p: p.stem)
def test_a_failed_log_is_read_as_failed(path: Path) -> None:
    failure = read_failure(path.read_bytes().decode())
    assert failure.outcome is Outcome.FAILED
    assert failure.exception is not None or path.stem.startswith("PREC-01")


def test_values_quoted_by_the_installed_trainer_are_read() -> None:
    """transformers 5.23 prints values in quotes. The lines are from fresh logs, with their numbers replaced."""
    lines = [line for line in (LOGS / "healthy" / "run_trainer_plain.log").read_text().splitlines() if "'loss'" in line]
    assert len(lines) >= 3 and "'loss': '" in lines[0]
    bad = "\n".join(line.replace(line.split("'loss': '")[1].split("'")[0], "nan", 1) for line in lines)
    assert diagnose(shipped(), bad, failed=None)[0].id == "PREC-011"


# ---------------------------------------------------------------------------------------------- any text, any size


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.text(max_size=2_000) | st.lists(st.sampled_from(CHAIN.splitlines()), max_size=60).map("\n".join))
def test_any_text_gives_a_consistent_reading(text: str) -> None:
    reading = Reading(text)
    assert all(reading.weight(at) in Weight for at in range(len(reading.lines)))
    numbers = [line.number for line in reading.lines]
    assert numbers == sorted(numbers)
    assert reading.failure.exception is None or reading.failure.exception.line in numbers


class Endless(io.RawIOBase):
    """A file with `size` bytes of log lines, generated while it is read."""

    def __init__(self, size: int) -> None:
        self.left = size

    def read(self, count: int = -1) -> bytes:
        line = b"step 10 loss 1.21 all is well and goes on\n"
        size = min(count, self.left)
        self.left -= size
        return (line * (size // len(line) + 1))[:size]


def test_a_long_file_takes_proportional_work_and_bounded_memory() -> None:
    def lines(chunks: int) -> int:
        return lines_run(lambda: texts.append(read_log(Endless(chunks * CHUNK))))  # type: ignore[arg-type]

    texts: list[str] = []
    assert lines(32) < 5 * lines(8)
    assert max(map(len, texts)) <= 1.2 * MAX_LOG


def test_a_failure_in_the_middle_of_a_long_file_is_found_at_its_line() -> None:
    half = b"step 10 loss 1.21 all is well and goes on\n" * 60_000
    whole = half + CHAIN.encode() + half
    text = read_log(io.BytesIO(whole))
    assert len(text) <= 1.2 * MAX_LOG < len(whole)
    at = [line.number for line in read_lines(text) if "raise ValueError" in line.text]
    assert at == [60_000 + 5]


def test_64_000_arbitrary_characters_take_proportional_work() -> None:
    rng = random.Random(3)
    pieces = [
        "Traceback (most recent call last):\n",
        '  File "a.py", line 3, in f\n',
        "[rank0]: ",
        "E ",
        "x.y" * 9,
        "\n",
        SCALE,
    ]
    read_failure("warm")
    for _ in range(6):
        half = "".join(rng.choice(pieces) * rng.randint(1, 900) for _ in range(60))[:32_000]
        assert lines_run(lambda: read_failure(2 * half)) < 2.5 * lines_run(lambda: read_failure(half))  # noqa: B023
