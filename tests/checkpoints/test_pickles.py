"""Verdicts on pickles: proven means that no call outside the list is possible; refuted requires evidence."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import functools
import importlib.util
import pathlib
import pickle
import types
import uuid
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Report, Verdict
from gpuwarden.interfaces.cli.main import run
from gpuwarden.interfaces.results.copies import verified
from pickle_kit import legacy_file, name, programs, stacked, text, zip_file
from real_parts import need
from wording import Wording

TORCH = importlib.util.find_spec("torch") is not None
FILES = ("model.pt", "training_args.bin", "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")

# Names in the training libraries through which any other name can be reached.
WAYS_IN = [
    ("transformers.trainer_callback", "TrainerState.__init__.__builtins__.get"),
    ("transformers.training_args", "TrainingArguments.__init__.__globals__.get"),
    ("trl.trainer.sft_config", "SFTConfig.__post_init__.__builtins__.__getitem__"),
    ("accelerate.state", "PartialState.__init__.__globals__.get"),
    ("accelerate.state", "PartialState"),
    ("transformers.training_args", "TrainingArguments"),
    ("transformers.training_args", "OptimizerNames.mro"),
    ("transformers.trainer", "Trainer"),
    ("transformers.training_args", "Path"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler.__init__.__builtins__.get"),
    ("torch._utils", "_rebuild_tensor_v2.__builtins__.get"),
    ("torch", "serialization.os.system"),
    ("torch", "float32"),
    ("torch", "Tensor"),
    ("collections", "_sys.modules.get"),
    ("collections", "OrderedDict.fromkeys"),
    ("numpy", "ndarray"),
    ("numpy", "ndarray.fromfile"),
    ("__main__", "Config"),
    ("__main__", "Config.__init__.__builtins__.get"),
    ("pathlib", "PosixPath.unlink"),
    ("types", "SimpleNamespace.__class__"),
    ("argparse", "FileType"),
]


def seen(report: Report) -> str:
    return " ".join(line for f in report.files for line in (*f.problems, *f.doubts))


def attack(command: str) -> bytes:
    """Return a pickle that takes `eval` from the builtins of a plain training library class and calls it.

    `test_pickles_oracles.py` runs the attack.
    """
    getter = stacked("transformers.trainer_callback", "TrainerState.__init__.__builtins__.get")
    return b"\x80\x04" + getter + text("eval") + b"\x85R" + text(command) + b"\x85R."


@pytest.mark.parametrize("container", [zip_file, legacy_file])
@pytest.mark.parametrize("file", ["training_args.bin", "mp_rank_00_model_states.pt"])
@pytest.mark.parametrize("level", [Level.STRUCTURE, Level.RESUME])
def test_reaching_builtins_through_a_class_is_refuted(tmp_path: Path, file: str, level: Level, container: Any) -> None:
    path = container(tmp_path / file, attack("None"))
    report = verify(path, level)
    assert report.verdict is Verdict.REFUTED
    assert "TrainerState.__init__.__builtins__.get" in seen(report)


@pytest.mark.parametrize(
    ("data", "code", "why"),
    [
        (attack("None"), 1, "TrainerState.__init__.__builtins__.get"),
        (b"\x80\x02" + name("transformers.trainer", "Trainer") + b")\x81.", 2, "transformers.trainer.Trainer"),
        (
            b"\x80\x02" + name("accelerate.state", "PartialState") + b")R.",
            2,
            "accelerate.state.PartialState",
        ),
    ],
)
def test_terminal_and_mcp_show_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: bytes,
    code: int,
    why: str,
) -> None:
    monkeypatch.setenv("GPUWARDEN_HOME", str(tmp_path / "home"))
    path = zip_file(tmp_path / "training_args.bin", data)
    assert run(["verify", str(path)]) == code
    assert "".join(why.split()) in "".join(capsys.readouterr().out.split())  # ignore the line breaks
    reply = verified(verify(path, Level.STRUCTURE))
    assert not reply.ok and why in " ".join(reply.evidence[0].problems)


@pytest.mark.parametrize("code", ["0", "2f4", "(2,3)i4", "f4,i8", "i4:x", "", "f4" * 9])
@pytest.mark.parametrize("place", ["itself", "buffer", "scalar"])
def test_text_parsed_as_a_numpy_dtype_is_not_proven(tmp_path: Path, code: str, place: str) -> None:
    """numpy reads such text with `ast.literal_eval`; the files it writes contain only a letter and a size."""
    data = {
        "itself": name("numpy", "dtype") + text(code) + b"\x89\x88\x87R",
        "buffer": name("numpy.core.numeric", "_frombuffer")
        + b"(C\x04abcd"
        + text(code)
        + b"K\x01\x85"
        + text("C")
        + b"tR",
        "scalar": name("numpy.core.multiarray", "scalar") + text(code) + b"C\x04abcd\x86R",
    }[place]
    assert verify(zip_file(tmp_path / "a.pt", b"\x80\x04" + data + b"."), Level.STRUCTURE).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickles_written_by_numpy_are_proven(tmp_path: Path, protocol: int) -> None:
    np = pytest.importorskip("numpy")
    codes = ["?", "i1", "u2", ">i4", "<u8", "f2", "f4", "f8", "c8", "c16", "g", "S3", "U5", "M8[ns]", "m8[s]", "V7"]
    arrays = [np.zeros((2, 3), np.dtype(c)) for c in codes]
    arrays += [np.asfortranarray(arrays[6]), np.zeros(2, [("a", "f4"), ("b", "i8", 3)]), np.array([], "f4")]
    values = {"arrays": arrays, "scalars": [a.flat[0] for a in arrays if a.size], "types": [a.dtype for a in arrays]}
    path = zip_file(tmp_path / "a.pt", pickle.dumps(values, protocol))
    report = verify(path, Level.STRUCTURE)
    assert report.verdict is Verdict.PROVEN, seen(report)


# ------------------------------------------------------------------------------------------------- every way to a call


# A spelling is resolved before a file's list applies, so each is tried with one file name; `()` means all of them.
@pytest.mark.parametrize(
    ("file", "spellings"),
    [
        (FILES[1], ("global", "stack_global")),
        pytest.param(FILES[1], (), marks=pytest.mark.prove),
        *(pytest.param(f, ("global", "stack_global"), marks=pytest.mark.prove) for f in FILES if f != FILES[1]),
    ],
)
@pytest.mark.parametrize("way", WAYS_IN, ids=[".".join(w) for w in WAYS_IN])
def test_harmful_calls_are_never_proven(
    tmp_path: Path, way: tuple[str, str], file: str, spellings: tuple[str, ...]
) -> None:
    for label, data in programs(*way, ("eval",), spellings):
        report = verify(zip_file(tmp_path / file, data), Level.STRUCTURE)
        assert report.verdict is not Verdict.PROVEN or _harmless(way, label), label
        assert report.verdict is Verdict.PROVEN or seen(report), label


def _harmless(way: tuple[str, str], label: str) -> bool:
    """Return whether the program only makes a class with `__new__` and states names that it never calls."""
    return label.startswith("old_object/") and way[1] in ("PartialState", "TrainingArguments")


@pytest.mark.parametrize("way", [("builtins", "eval"), ("posix", "system"), ("__builtin__", "getattr")])
def test_every_path_to_a_notorious_name_is_refuted(tmp_path: Path, way: tuple[str, str]) -> None:
    for label, data in programs(*way, ("1",), ("global", "stack_global_of_escapes")):
        report = verify(zip_file(tmp_path / "model.pt", data), Level.STRUCTURE)
        assert report.verdict is Verdict.REFUTED, label


OTHER = {
    "extension": b"\x80\x02\x82\x01)R.",
    "extension2": b"\x80\x02\x83\x01\x00)R.",
    "buffer": b"\x80\x05\x97.",
    "persistent text": b"\x80\x02Pos.system\n.",
    "persistent call": b"\x80\x04" + stacked("transformers.trainer", "Trainer") + b")R\x85Q.",
    "computed name": b"\x80\x04" + text("os") + name("collections", "OrderedDict") + b")R\x93.",
    "enum member by a special name": (
        b"\x80\x02" + name("builtins", "getattr") + name("transformers.trainer_utils", "SaveStrategy")
        + text("__init__") + b"\x86R."
    ),
    "attribute of an enum member, called": (
        b"\x80\x02" + name("builtins", "getattr") + name("transformers.trainer_utils", "SaveStrategy")
        + text("NO") + b"\x86R)R."
    ),
    "other codec": b"\x80\x02" + name("_codecs", "encode") + text("x") + text("idna") + b"\x86R.",
    "protocol raised midway": b"\x80\x02\x80\x04" + name("torch", "_utils.os.getpid") + b")R.",
}  # fmt: skip


@pytest.mark.parametrize("what", OTHER)
@pytest.mark.parametrize("file", FILES)
def test_other_attack_forms_are_not_proven(tmp_path: Path, what: str, file: str) -> None:
    report = verify(zip_file(tmp_path / file, OTHER[what]), Level.STRUCTURE)
    assert report.verdict is not Verdict.PROVEN and seen(report)


MEMBERS = ["data/1", "evil.pkl", "DATA.PKL", "constants.pkl", "extra/data.pkl", "code/x.py", ".data/other"]


@pytest.mark.parametrize("member", MEMBERS)
def test_a_pickle_in_another_member_is_not_proven(tmp_path: Path, member: str) -> None:
    evil = b"\x80\x02" + name("posix", "system") + text("x") + b"\x85R."
    report = verify(zip_file(tmp_path / "model.pt", pickle.dumps({}, 2), {member: evil}), Level.STRUCTURE)
    assert report.verdict is not Verdict.PROVEN
    assert member == "data/1" or (report.verdict is Verdict.REFUTED and "posix.system" in seen(report))
    report = verify(zip_file(tmp_path / "model.pt", pickle.dumps({}, 2), {member: pickle.dumps(1)}), Level.STRUCTURE)
    assert report.verdict is Verdict.UNKNOWN


def listing(payload: bytes) -> bytes:
    """Return a `.metadata` file that lists nothing and contains an additional value."""
    made = name("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81}("
    return b"\x80\x04" + made + text("storage_data") + b"}" + text("x") + payload + b"ub."


@pytest.mark.parametrize(
    ("payload", "verdict"),
    [
        (b"N", Verdict.PROVEN),
        (name("pathlib", "PosixPath") + text("a") + b"\x85R", Verdict.PROVEN),
        (name("torch.distributed.checkpoint.metadata", "os") + b")R", Verdict.REFUTED),
        (stacked("torch.distributed.checkpoint.metadata", "Metadata.__init__.__builtins__.get"), Verdict.REFUTED),
        (stacked("torch.distributed.tensor", "DTensor"), Verdict.UNKNOWN),
        (name("torch.distributed.checkpoint.metadata", "Metadata") + b")R", Verdict.UNKNOWN),
        (name("builtins", "getattr") + name("torch.distributed.checkpoint.metadata", "Metadata")
         + text("__init__") + b"\x86R", Verdict.UNKNOWN),
    ],
)  # fmt: skip
def test_torch_distributed_metadata_is_judged_by_its_payload(tmp_path: Path, payload: bytes, verdict: Verdict) -> None:
    (tmp_path / ".metadata").write_bytes(listing(payload))
    report = verify(tmp_path / ".metadata", Level.STRUCTURE)
    assert report.verdict is verdict, seen(report)


# ------------------------------------------------------------------------------------------------------ healthy values


class Stranger:
    """A class defined in the training script."""


HEALTHY: dict[str, tuple[Any, bool]] = {
    "PosixPath": (pathlib.PurePosixPath("a/b"), True),
    "Path": (pathlib.Path("out"), True),
    "SimpleNamespace": (types.SimpleNamespace(lr=0.1, path=pathlib.Path("a")), True),
    "Namespace": (argparse.Namespace(lr=0.1, layers=[1, 2]), True),
    "UUID": (uuid.UUID(int=5), True),
    "slice": (slice(1, None, 2), True),
    "range": (range(1, 9, 2), True),
    "frozenset": (frozenset({1, 2}), True),
    "set": ({1, 2}, True),
    "bytes": (b"\x00\xff", True),
    "no bytes": (b"", True),
    "bytearray": (bytearray(b"abc"), True),
    "complex": (1 + 2j, True),
    "OrderedDict": (collections.OrderedDict(a=1), True),
    "defaultdict": (collections.defaultdict(list, a=[1]), True),
    "Counter": (collections.Counter("abca"), True),
    "deque": (collections.deque([1, 2], 5), True),
    "datetime": (dt.datetime(2026, 1, 2, tzinfo=dt.UTC), True),
    "timedelta": (dt.timedelta(hours=3), True),
    "Decimal": (decimal.Decimal("1.5"), True),
    "partial": (functools.partial(int, base=2), False),
    "builtin": (len, False),
    "stranger": (Stranger(), False),
    "exception": (ValueError("x"), False),
}


@pytest.mark.parametrize("container", [zip_file, legacy_file])
@pytest.mark.parametrize("what", HEALTHY)
def test_healthy_values_are_never_refuted(tmp_path: Path, what: str, container: Any) -> None:
    value, proven = HEALTHY[what]
    for file in ("model.pt", "training_args.bin"):
        for protocol in range(6):
            path = container(tmp_path / file, pickle.dumps({"step": 1, "x": value}, protocol))
            for level in (Level.STRUCTURE, Level.CONTENT):
                report = verify(path, level)
                assert report.verdict is not Verdict.REFUTED, (protocol, seen(report))
                assert report.verdict is Verdict.PROVEN or protocol != 2 or not proven, seen(report)


@pytest.mark.slow
def test_tensors_load_despite_objects_beside_them(tmp_path: Path, wording: Wording) -> None:
    need("torch", TORCH)
    import torch
    from torch.utils.data import TensorDataset

    path = tmp_path / "model.pt"
    state = {"w": torch.arange(6.0).reshape(2, 3), "where": pathlib.PurePosixPath("a"), "range": range(3)}
    for value in (state, {"data": TensorDataset(torch.ones(3, 2))}):
        torch.save(value, path)
        report = verify(path, Level.LOAD)
        assert report.verdict is Verdict.PROVEN, seen(report)
        (open_,) = report.files[0].unproved
        wording(report.files[0].proved[-1], 6)
        wording(open_.partition(":")[0])


def test_a_pandas_table_in_a_checkpoint_is_unknown(tmp_path: Path) -> None:
    need("torch", TORCH)
    need("pandas", importlib.util.find_spec("pandas") is not None)
    import pandas as pd
    import torch

    for protocol in (2, 4):
        torch.save({"t": pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})}, tmp_path / "m.pt", pickle_protocol=protocol)
        for level in Level:
            report = verify(tmp_path / "m.pt", level)
            assert report.verdict is Verdict.UNKNOWN, seen(report)
