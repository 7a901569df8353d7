"""The allocator's rules, the replay of a traced step at full depth, and traced peaks compared with published ones."""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.checkpoints.load import run_child
from gpuwarden.core.hardware import GPUS
from gpuwarden.interfaces.cli.main import run as command
from gpuwarden.static_analysis.estimate import traced as module
from gpuwarden.static_analysis.estimate.allocator import MIB, Block, CachingAllocator, CardFull
from gpuwarden.static_analysis.estimate.memory import GB, memory
from gpuwarden.static_analysis.estimate.replay import Peak, Segment, Trace, deepened
from gpuwarden.static_analysis.estimate.setup import Run
from gpuwarden.static_analysis.estimate.shape import shape_of
from gpuwarden.static_analysis.estimate.traced import CHILD, MEMORY, NotTraced, Traced, ends, tasks_of, trace, unproven
from published import Published, published_runs
from real_parts import amount
from wording import Wording

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 2048, "tie_word_embeddings": False,
}  # fmt: skip
HAS_TORCH = bool(importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"))
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch and transformers are not installed")


def a_run(**more: object) -> Run:
    shape = shape_of(CONFIG)
    assert shape is not None
    settings = {"batch": 2, "length": 512, "padded": False, "checkpointing": True, "weights": "half", **more}
    return Run.model_validate({"params": round(shape.parameters), "shape": shape, **settings})


def test_small_tensors_share_a_segment_and_large_tensors_do_not() -> None:
    allocator = CachingAllocator()
    allocator.take(1)
    allocator.take(MIB)
    assert (allocator.allocated, allocator.reserved) == (512 + MIB, 2 * MIB)
    allocator.take(MIB + 1)
    assert allocator.reserved == 22 * MIB, "a tensor of 1 to 10 MiB begins a segment of 20 MiB"
    allocator.take(25 * MIB)
    assert allocator.reserved == (22 + 26) * MIB, "from 10 MiB on a segment is as large, in steps of 2 MiB"


def test_a_freed_block_is_used_again_and_merged_with_its_neighbours() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.take(4 * MIB) for _ in range(3))
    assert allocator.reserved == 20 * MIB
    allocator.give(first)
    allocator.give(third)
    assert allocator.take(6 * MIB).address > second.address, "the third block and the rest are one"
    allocator.give(second)
    allocator.take(8 * MIB)
    assert allocator.reserved == 20 * MIB, "the first and the second are one"


def test_a_full_card_frees_unused_segments_before_refusing() -> None:
    allocator = CachingAllocator(limit=40 * MIB)
    allocator.give(allocator.take(30 * MIB))
    allocator.take(36 * MIB)
    assert (allocator.reserved, allocator.most_reserved, allocator.emptied) == (36 * MIB, 36 * MIB, 1)
    with pytest.raises(CardFull):
        allocator.take(12 * MIB)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30 * MIB)), max_size=60))
def test_live_blocks_never_overlap_and_all_memory_is_returned(steps: list[tuple[bool, int]]) -> None:
    allocator = CachingAllocator()
    living: list[Block] = []
    for takes, number in steps:
        if takes or not living:
            living.append(allocator.take(number))
        else:
            allocator.give(living.pop(number % len(living)))
        places = sorted((block.address, block.address + block.size) for block in living)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        assert sum(block.size for block in living) == allocator.allocated <= allocator.reserved
    for block in living:
        allocator.give(block)
    assert allocator.allocated == 0
    allocator.limit = 0
    with pytest.raises(CardFull):
        allocator.take(1 << 40)
    assert allocator.reserved == 0, "every segment is one free block again"


def test_the_middle_layer_is_repeated_with_its_neighbours() -> None:
    """Each layer allocates one tensor that the next layer frees, and one that its own backward pass frees."""
    step = [
        Segment(
            part="forward", layer=at, events=(("f", at, 0, 8), ("f", at, 1, 4), ("f", at - 1, 0, 0))[: 3 if at else 2]
        )
        for at in range(5)
    ]
    step.append(Segment(part="head", layer=-1, events=(("f", 4, 0, 0),)))
    step += [Segment(part="backward", layer=at, events=(("f", at, 1, 0),)) for at in reversed(range(5))]
    events = list(deepened(step, 5, 9))
    taken = [name for name, size in events if size]
    assert taken == [("f", at, number) for at in range(9) for number in (0, 1)]
    assert sorted(name for name, size in events if not size) == sorted(taken)
    assert [name[1] for name, size in events if not size and name[2] == 1] == list(reversed(range(9)))


def test_tensors_that_outlive_the_layers_are_freed_in_every_layer() -> None:
    step = [Segment(part="forward", layer=at, events=(("f", at, 0, 8),)) for at in range(5)]
    step.append(Segment(part="between", layer=-1, events=tuple(("f", at, 0, 0) for at in range(5))))
    events = list(deepened(step, 5, 9))
    assert {name for name, size in events if not size} == {("f", at, 0) for at in range(9)}


def test_holes_count_in_part_and_not_on_a_full_card() -> None:
    low, high = ends([Peak(100, 140, full=False), Peak(110, 150, full=False)])
    assert low == pytest.approx(0.985 * 120) and high == pytest.approx(1.06 * 150)
    assert ends([Peak(100, 140, full=True)])[0] == pytest.approx(98.5)


@pytest.mark.parametrize(
    "more",
    [
        {"padded": True},
        {"method": "qlora"},
        {"optimizer": "adamw_8bit"},
        {"gpus": 2},
        {"weights": None},
        {"checkpointing": None},
        {"checkpointing": False},
        {"shape": None},
        {"own_loss": True},
    ],
    ids=lambda more: "{}={}".format(*next(iter(more.items()))),
)
def test_only_compared_settings_are_traced(more: dict[str, object], wording: Wording) -> None:
    assert not unproven(a_run()) and not unproven(a_run(method="lora"))
    found = unproven(a_run(**more))
    assert found
    wording(found)


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("import sys; sys.exit(3)", [3]),
        ('print(\'{"unable": "no such model"}\\n\' * 3)', ["no such model"]),
        ("print('{\"by\": 1}\\n' * 3)", []),
    ],
    ids=["fails", "unable", "nonsense"],
)
def test_a_failing_trace_process_raises_not_traced(
    code: str, values: list[object], monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    with pytest.raises(NotTraced) as refused:
        trace(a_run(method="lora"), CONFIG, (sys.executable, "-c", code))
    wording(refused, *values)


def test_a_missing_torch_raises_not_traced(monkeypatch: pytest.MonkeyPatch, wording: Wording) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(NotTraced) as refused:
        trace(a_run(), CONFIG)
    wording(refused)


@needs_torch
@pytest.mark.prove
@pytest.mark.parametrize("more", [{}, {"method": "lora", "accumulate": 4}])
def test_repeated_layers_need_the_same_memory_as_traced_layers(
    more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(**more)
    repeated = trace(run, CONFIG)
    monkeypatch.setattr(module, "DEPTH", 8)
    whole = trace(run, CONFIG)
    assert {t.depth for t in repeated.traces} == {5} and {t.depth for t in whole.traces} == {8}
    assert repeated.peaks() == whole.peaks()


@needs_torch
@pytest.mark.prove
def test_the_command_traces_a_packed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["estimate", "--gpu", "t4", "--batch-size", "2", "--max-length", "512", "--checkpointing", "--json"]
    assert command([*words, "--packed", str(tmp_path)]) == 0
    packed = json.loads(capsys.readouterr().out)
    assert command([*words, str(tmp_path)]) == 0
    padded = json.loads(capsys.readouterr().out)
    assert (packed["level"], padded["level"]) == ("traced", "formula")
    assert packed["cards"][0]["fit"] == "fits"


def at_home(found: Published) -> bool:
    """Return whether a run had been examined when the constants in `traced` were chosen."""
    size = (found.model, found.run.length, found.run.trains_embeddings)
    fitted = {("qwen-7b", 1024, False), ("qwen-7b", 4096, False), ("qwen-14b", 2048, False)}
    return found.source == "fms-acceleration" or found.model == "qwen-1.8b" or size in fitted


@needs_torch
@pytest.mark.long
@pytest.mark.prove
@pytest.mark.endurance
def test_traced_estimates_match_most_published_peaks() -> None:
    """All comparable runs, most in three variants, in one child process. The formula's intervals are wider."""
    runs = [r for r in published_runs() if r.peak_gb and r.counted and not unproven(r.run)][:: amount(3, 1)]
    tasks = {json.dumps(task): task for r in runs for task in tasks_of(r.run, r.config)}
    answers, why = run_child(json.dumps({"memory": MEMORY, "tasks": list(tasks.values())}), 3_000, CHILD)
    assert len(answers) == len(tasks), why
    traces = {text: Trace.model_validate(answer) for text, answer in zip(tasks, answers, strict=True)}
    groups: dict[bool, list[tuple[bool, bool, float, float]]] = {True: [], False: []}
    for found in runs:
        peak = found.peak_gb or 0.0
        known = Traced(found.run, tuple(traces[json.dumps(task)] for task in tasks_of(found.run, found.config)))
        interval = known.interval(GPUS[found.gpu].gb)
        context = (0.0, 0.0) if found.counted == "occupied" else (0.35, 1.1)  # other counts exclude the context
        low, high = interval.low - context[0], interval.high - context[1]
        least, most = (end / GB for end in memory(found.run, found.counted or "occupied"))
        groups[at_home(found)].append((low <= peak <= high, least <= peak <= most, high / low, most / least))
        print(found.source, found.model, found.run.method, found.run.tokens, peak, low, high, least, most)
    assert len(groups[True]) >= amount(8, 25) and len(groups[False]) >= amount(9, 30)
    for rows in groups.values():
        traced, formula = (sum(row[at] for row in rows) for at in (0, 1))
        width, wider = (statistics.median(row[at] for row in rows) for at in (2, 3))
        print(f"{traced} and {formula} of {len(rows)} at {width:.3f} and {wider:.3f}")
        assert traced >= min(0.95 * len(rows), len(rows) - 1)
        assert width <= 1.25 and width < wider
