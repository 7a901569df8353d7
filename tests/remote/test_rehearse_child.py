"""The parts of a rehearsal that need no libraries: bounded loops, small configs, and verdicts on errors."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.hub.first_step_supplies import wanted
from gpuwarden.remote.first_step.child.data import _loaded
from gpuwarden.remote.first_step.child.handlers import saves, watch, watchers
from gpuwarden.remote.first_step.child.imports import AfterImport
from gpuwarden.remote.first_step.child.loops import MOST, counters, shorten
from gpuwarden.remote.first_step.child.main import ended
from gpuwarden.remote.first_step.child.record import Enough, Record, Stopped
from gpuwarden.remote.first_step.child.small_models import HEAD, HEADS, WIDTH, lowered, shrink
from gpuwarden.remote.first_step.child.trainers import EVALUATED, few
from gpuwarden.remote.first_step.child.verdict import is_code_error, judge, judge_caught, stopped
from wording import Wording

STEP = """
class Loss:
    def backward(self):
        record.steps += 1
done = []
"""


def run(body: str) -> list[Any]:
    """Run a shortened script in which each backward pass is a step, and return its notes."""
    record = Record({})
    names: dict[str, Any] = {"record": record, **counters(record)}
    exec(compile(shorten(ast.parse(STEP + body)), "script", "exec"), names)
    found: list[Any] = names["done"]
    return found


@pytest.mark.parametrize("path", ["/etc/gpuwarden.json", "../config.json", "a/../../config.json", "a\nb.json"])
def test_hub_file_names_outside_the_repo_are_rejected(path: str) -> None:
    assert not wanted(path) and wanted("config.json") and wanted("text_encoder/config.json")


@pytest.mark.parametrize(
    ("body", "rounds"),
    [
        ("for n in range(1000):\n    Loss().backward(); done.append(n)", 1),
        ("for e in range(9):\n    for n in range(1000):\n        Loss().backward(); done.append(n)", 1),
        ("while True:\n    Loss().backward(); done.append(1)", 1),
        ("def train():\n    Loss().backward()\nfor e in range(70):\n    train(); done.append(e)", 1),
        ("for n in range(1000):\n    done.append(n)\n    if n % 4 == 3: Loss().backward()", 4),
        ("for n in range(1000):\n    done.append(n)\n    if n > 5000: Loss().backward()", MOST),
        ("for n in range(200):\n    done.append(n)", 200),
        ("for n in []:\n    Loss().backward()\nelse:\n    done.append('end')", 1),
    ],
)  # fmt: skip
def test_a_loop_that_trains_ends_after_its_first_step(body: str, rounds: int) -> None:
    assert len(run(body)) == rounds


def test_a_shortened_script_keeps_its_lines() -> None:
    text = "x = 1\nfor n in range(9):\n    loss.backward()\nraise ValueError\n"
    tree = shorten(ast.parse(text))
    assert [node.lineno for node in tree.body] == [1, 2, 4]


def test_a_config_becomes_small_and_keeps_its_architecture() -> None:
    config = {
        "model_type": "qwen2_vl", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
        "num_hidden_layers": 80, "layer_types": ["full"] * 80, "vocab_size": 151_936, "tie_word_embeddings": True,
        "rope_scaling": {"mrope_section": [16, 24, 24]}, "head_dim": 128,
        "quantization_config": {"bits": 4}, "vision_config": {"depth": 32, "embed_dim": 1280},
    }  # fmt: skip
    small = shrink(config)
    assert small["vocab_size"] == 151_936 and small["tie_word_embeddings"] is True
    assert (small["hidden_size"], small["num_hidden_layers"], small["num_attention_heads"]) == (WIDTH, 2, HEADS)
    assert small["num_key_value_heads"] == 2 and len(small["layer_types"]) == 2
    assert sum(small["rope_scaling"]["mrope_section"]) * 2 == HEAD
    assert small["vision_config"] == {"depth": 2, "embed_dim": WIDTH} and "quantization_config" not in small


@pytest.mark.prove
@given(st.dictionaries(st.text(max_size=12), st.recursive(st.integers() | st.booleans() | st.text(), st.lists)))
def test_no_config_grows(config: dict[str, Any]) -> None:
    for name, value in shrink(config).items():
        assert type(value) is type(config[name])
        if isinstance(value, int) and not isinstance(value, bool):
            assert value <= config[name]


def judged(error: BaseException, *, made_up: bool = False, **order: Any) -> dict[str, Any]:
    record = Record(order)
    if made_up:
        record.replaced("dataset a/b", "rows made up from its columns", made_up=True)
    return judge(record, error, "script.py")


@pytest.mark.parametrize(
    ("error", "outcome", "certain"),
    [
        (TypeError("SFTConfig.__init__() got an unexpected keyword argument 'lerning_rate'"), "fault", True),
        (NameError("name 'modle' is not defined"), "fault", True),
        (ImportError("cannot import name 'SFTTrainer2' from 'trl'", name="trl"), "fault", True),
        (ValueError("'stepz' is not a valid SaveStrategy"), "fault", True),
        (KeyError("txet"), "fault", False),
        (RuntimeError("element 0 of tensors does not require grad"), "fault", False),
        (ModuleNotFoundError("No module named 'evaluate'", name="evaluate"), "stopped", False),
        (ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"), "stopped", False),
        (RuntimeError("No CUDA GPUs are available"), "stopped", False),
        (AssertionError("Torch not compiled with CUDA enabled"), "stopped", False),
        (OSError("We couldn't connect to 'https://huggingface.co' to load the files"), "stopped", False),
        (ConnectionError("no route"), "stopped", False),
        (FileNotFoundError(2, "No such file", "/data/rows.json"), "stopped", False),
        (FileNotFoundError(2, "No such file", "rows.json"), "fault", False),
        (MemoryError(), "stopped", False),
        (Stopped("the model a/b is not here"), "stopped", False),
    ],
)
def test_an_error_is_a_fault_unless_this_machine_explains_it(error: BaseException, outcome: str, certain: bool) -> None:
    found = judged(error)
    assert (found["outcome"], found.get("certain", False)) == (outcome, certain)


def test_a_missing_package_is_a_fault_where_the_header_was_installed() -> None:
    error = ModuleNotFoundError("No module named 'evaluate'", name="evaluate")
    assert judged(error, own_environment=True)["outcome"] == "fault"


def test_placeholder_rows_are_blamed_before_the_script() -> None:
    assert judged(KeyError("text"), made_up=True)["outcome"] == "stopped"
    assert judged(NameError("name 'x' is not defined"), made_up=True)["outcome"] == "fault"


def test_the_cause_of_an_error_decides_the_outcome() -> None:
    error = RuntimeError("the tokenizer was not loaded")
    error.__cause__ = ConnectionError("the Hub can't be reached")
    assert judged(error)["outcome"] == "stopped"


@pytest.mark.parametrize(("text", "found"), [("torch.save(x, y)", True), ("model(x)", False), ("save()", True)])
def test_calls_that_may_save_are_found(text: str, found: bool) -> None:
    assert saves(ast.parse(text)) is found


def test_a_library_is_patched_even_after_find_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_library_of_tests.py").write_text("speed = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    AfterImport({"slow_library_of_tests": lambda module: setattr(module, "speed", 2)}).install()
    assert importlib.util.find_spec("slow_library_of_tests") is not None
    library = importlib.import_module("slow_library_of_tests")
    monkeypatch.delitem(sys.modules, "slow_library_of_tests")
    assert library.speed == 2


class Net:
    """A library object, as used in a script."""

    def push_to_hub(self, name: str) -> None:
        """Refuse, as the Hub does."""
        raise ValueError(f"{name} is not a valid repo")

    def end(self) -> None:
        """End as a substitute does when its part is done."""
        raise Enough


@pytest.mark.parametrize(
    ("body", "noted"),
    [
        ("try:\n    net.push_to_hubd('a')\nexcept Exception:\n    print('failed')", "push_to_hubd"),
        ("try:\n    net.push_to_hub('a')\nexcept Exception as e:\n    print(e)", "valid repo"),
        ("try:\n    net.push_to_hub(final)\nexcept:\n    print(1)", "final"),
        ("try:\n    evaluate(net)\nexcept Exception:\n    print(1)\n    print(2)", "evaluate"),
        ("try:\n    int('x')\nexcept Exception:\n    print(1)", ""),  # a wrong value, which the script expects
        ("try:\n    ''.columns\nexcept Exception:\n    print(1)", ""),
        ("try:\n    import no_such_package\nexcept Exception:\n    print(1)", ""),
        ("try:\n    get_ipython()\nexcept NameError:\n    print(1)", ""),
        ("try:\n    get_ipython()\nexcept Exception:\n    notebook = False", ""),
        ("try:\n    net.push_to_hubd('a')\nexcept Exception:\n    print(1)\n    raise SystemExit", ""),
        ("def push_to_hub():\n    raise ConnectionError\ntry:\n    push_to_hub()\nexcept Exception:\n    print(1)", ""),
    ],
)
def test_a_caught_error_is_recorded_if_the_code_is_wrong_or_a_save_fails(body: str, noted: str) -> None:
    record = Record({})
    functions = watchers(record, lambda e: is_code_error(record, e), lambda e: not stopped(record, e))
    with contextlib.suppress(SystemExit):
        exec(
            compile(watch(ast.parse(body)), "script.py", "exec"), {"net": Net(), "print": lambda *a: None, **functions}
        )
    assert (record.caught is not None) is bool(noted) and noted in str(record.caught)
    if record.caught is not None:
        found = judge_caught(record, record.caught, "script.py")
        assert (found["outcome"], found["certain"]) == ("fault", False)


def test_a_bare_except_does_not_catch_the_end_of_a_rehearsal() -> None:
    text = "try:\n    net.end()\nexcept:\n    print(1)"
    with pytest.raises(Enough):
        exec(compile(watch(ast.parse(text)), "script.py", "exec"), {"net": Net(), **watchers(Record({}), bool, bool)})


SHAPES = RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x32 and 64x3)")
INDEX = IndexError("index 20 is out of range")


@pytest.mark.parametrize(
    ("script", "error", "explained"),
    [
        ("net(16, 1e-4, range(10_000))", SHAPES, False),
        ("nn.Linear(4096, 2)", SHAPES, True),  # the real width
        ("nn.Linear(2048, 2)", SHAPES, True),  # half the real width
        ("model.layers[20]", INDEX, True),  # a layer that is left out of the small model
        ("model.layers[40]", INDEX, False),  # a layer that the real model doesn't have, either
    ],
)
def test_a_wrong_shape_is_a_fault_unless_the_script_uses_a_real_model_size(
    script: str, error: Exception, explained: bool
) -> None:
    record = Record({})
    record.replaced("model a/b", "the same architecture, small, with random weights")
    config = {"hidden_size": 4096, "num_hidden_layers": 32, "vision_config": {"depth": 24}}
    record.sizes.update(lowered(config, shrink(config)))
    record.numbers = {
        n.value for n in ast.walk(ast.parse(script)) if isinstance(n, ast.Constant) and type(n.value) is int
    }
    found = judge(record, error, "script.py")
    assert (found["outcome"] == "stopped") is explained


@pytest.mark.parametrize(
    ("files", "unsaved", "outcome"),
    [
        (["out/similarity_evaluation_results.csv", "out/trainer_state.json"], "save_strategy='no'", "fault"),
        (["out/similarity_evaluation_results.csv", "out/model.safetensors"], "save_strategy='no'", "passed"),
        (["final"], "save_strategy='no'", "passed"),
        (["weights.json"], None, "passed"),  # the script saves by itself
    ],
)
def test_result_files_alone_do_not_count_as_a_saved_model(
    tmp_path: Path, files: list[str], unsaved: str | None, outcome: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    record = Record({})
    record.at("step")
    record.unsaved = unsaved
    assert ended(record, str(tmp_path), saving=True)["outcome"] == outcome


class Rows(list[int]):
    """The part of a dataset's interface that selects rows."""

    def select(self, indices: range) -> Rows:
        """Return some rows."""
        return Rows(self[i] for i in indices)


def test_evaluation_uses_few_rows_in_whole_groups() -> None:
    rows = Rows(range(64))
    assert len(few(rows, SimpleNamespace())) == EVALUATED
    assert len(few(rows, SimpleNamespace(num_generations=16))) == 16
    assert {name: len(some) for name, some in few({"a": rows, "b": Rows([1])}, SimpleNamespace()).items()} == {
        "a": EVALUATED, "b": 1,
    }  # fmt: skip
    assert few(None, SimpleNamespace()) is None


def test_unknown_feature_types_are_no_fault_of_the_script(wording: Wording) -> None:
    def unknown(types: Any) -> Any:
        raise TypeError("Audio.__init__() got an unexpected keyword argument 'stream_index'")

    library: Any = SimpleNamespace(Features=SimpleNamespace(from_dict=unknown))
    config = {"splits": {"train": {"rows": [{"a": 1}], "features": {"a": {"_type": "Audio", "stream_index": 1}}}}}
    record = Record({})
    with pytest.raises(Stopped) as error:
        _loaded(record, library, "o/set", config, {"split": "train"})
    wording(error, "o/set")
    assert judge(record, error.value, "script.py")["outcome"] == "stopped"
