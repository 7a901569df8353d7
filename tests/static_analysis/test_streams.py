"""A streamed dataset requires a number of steps only if a trainer trains on it."""

from __future__ import annotations

import pytest

from gpuwarden.static_analysis.script import read_script

HEAD = """
from functools import partial
from datasets import Dataset, interleave_datasets, load_dataset
from transformers import Trainer
from trl import SFTConfig, SFTTrainer
import lightning
"""
TRAINS = "SFTTrainer(model='m', args=SFTConfig(output_dir='out'), train_dataset={})\n"
STREAM = "s = load_dataset('a/b', split='train', streaming=True)\n"
FULL = "d = load_dataset('a/b', split='train')\n"


@pytest.mark.parametrize(
    ("text", "streams"),
    [
        (STREAM + TRAINS.format("s"), True),
        (STREAM + "s = s.shuffle(seed=1).map(row)\n" + TRAINS.format("s['train']"), True),
        (STREAM + "e = s.take(9)\n" + TRAINS.format("s.skip(9), eval_dataset=e"), True),
        (STREAM + "t = s.map(row)\n" + TRAINS.format("interleave_datasets([s, t])"), True),
        (
            "def get():\n    s = load_dataset('a/b', streaming=True)\n    return s.map(row)\n" + TRAINS.format("get()"),
            True,
        ),
        (f"def run(rows):\n    {TRAINS.format('rows')}run(load_dataset('a/b', streaming=True))", True),
        (f"try:\n    {STREAM}except OSError:\n    print(1)\n" + TRAINS.format("s.shuffle()"), True),
        (f"try:\n    {STREAM}except OSError:\n    {STREAM}" + TRAINS.format("s"), True),
        (f"try:\n    {STREAM}except OSError:\n    s = load_dataset('a/b')\n" + TRAINS.format("s"), None),
        (STREAM + "class Mine(Trainer):\n    pass\nMine(train_dataset=s)", True),
        (FULL + STREAM + TRAINS.format("d, eval_dataset=s"), False),
        (FULL + STREAM + "print(next(iter(s)))\n" + TRAINS.format("d"), False),
        (STREAM + TRAINS.format("Dataset.from_list(list(s.take(9)))"), False),
        (STREAM + TRAINS.format("Dataset.from_generator(partial(rows, s))"), False),
        (STREAM + "lightning.Trainer(max_epochs=1).fit(net, s)", False),
        (FULL + TRAINS.format("d"), False),
        (STREAM + TRAINS.format("Rows(s)"), None),
        (STREAM + "s = convert(s)\n" + TRAINS.format("s"), None),
        (FULL + STREAM + TRAINS.format("s if found() else d"), None),
        (STREAM + "SFTTrainer('m', None, None, s)", None),
        (STREAM + "class Own:\n    pass\nclass OwnTrainer(Own):\n    pass\nOwnTrainer(train_dataset=s)", None),
        (STREAM + "if found():\n    " + TRAINS.format("s"), None),
    ],
)
def test_the_training_set_is_traced_to_its_loading_calls(text: str, streams: bool | None) -> None:
    assert read_script(HEAD + text).uses.streams is streams


def test_a_long_variable_chain_gives_an_unknown_result() -> None:
    chain = "".join(f"s{n + 1} = f(s{n}, s{n})\n" for n in range(300))
    assert read_script(HEAD + STREAM + "s0 = s\n" + chain + TRAINS.format("s300")).uses.streams is None
