"""Independent judgments of the same pickles: other scanners, torch's own loader, and libraries' healthy files."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden.checkpoints.pickles import allow_list
from gpuwarden.checkpoints.pickles.nodes import Global
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Report, Verdict
from pickle_kit import ROUTES, SPELLINGS, Loader, legacy_file, name, stacked, text, zip_file
from real_parts import amount, need

pytestmark = pytest.mark.filterwarnings("ignore")


def there(*modules: str) -> None:
    for module in modules:
        need(module, importlib.util.find_spec(module) is not None)


def seen(report: Report) -> str:
    return "\n".join(report.reasons)


# ------------------------------------------------------------------------------------------------------------ scanners

DANGEROUS = [
    ("posix", "system", "true"), ("os", "popen", "true"), ("os", "execv", "true"), ("nt", "system", "true"),
    ("builtins", "eval", "1"), ("builtins", "exec", "1"), ("builtins", "compile", "1"), ("builtins", "open", "x"),
    ("builtins", "getattr", "x"), ("builtins", "breakpoint", "x"), ("builtins", "__import__", "antigravity"),
    ("__builtin__", "eval", "1"), ("__builtin__", "apply", "1"), ("subprocess", "Popen", "true"),
    ("subprocess", "check_output", "true"), ("subprocess", "run", "true"), ("commands", "getoutput", "true"),
    ("runpy", "run_path", "x"), ("runpy", "_run_code", "x"), ("timeit", "timeit", "1"), ("cProfile", "run", "1"),
    ("profile", "run", "1"), ("pdb", "run", "1"), ("bdb", "Bdb", "1"), ("pty", "spawn", "true"),
    ("code", "interact", "x"),
    ("socket", "socket", "x"), ("socket", "create_connection", "x"), ("ssl", "wrap_socket", "x"),
    ("shutil", "rmtree", "x"), ("shutil", "copyfile", "x"), ("sys", "setprofile", "x"), ("sys", "exit", "x"),
    ("pickle", "loads", "x"), ("_pickle", "loads", "x"), ("marshal", "loads", "x"), ("types", "CodeType", "x"),
    ("types", "FunctionType", "x"), ("importlib", "import_module", "x"), ("importlib._bootstrap", "_load", "x"),
    ("pkgutil", "resolve_name", "os:system"), ("pydoc", "pipepager", "x"), ("pydoc", "locate", "x"),
    ("webbrowser", "open", "x"), ("urllib.request", "urlopen", "x"), ("requests.api", "get", "x"),
    ("httplib", "HTTPSConnection", "x"), ("aiohttp.client", "ClientSession", "x"), ("ctypes", "CDLL", "x"),
    ("asyncio.unix_events", "_UnixSubprocessTransport._start", "x"), ("operator", "attrgetter", "x"),
    ("operator", "methodcaller", "x"), ("_operator", "itemgetter", "x"), ("functools", "partial", "x"),
    ("uuid", "_get_command_stdout", "x"), ("_osx_support", "_read_output", "x"),
    ("_aix_support", "_read_cmd_output", "x"),
    ("_pyrepl.pager", "pipe_pager", "x"), ("venv", "create", "x"), ("ensurepip", "_run_pip", "x"),
    ("pip._internal", "main", "x"), ("distutils.file_util", "write_file", "x"), ("doctest", "debug_script", "x"),
    ("idlelib.pyshell", "ModifiedInterpreter.runcode", "x"), ("numpy.f2py.crackfortran", "getlincoef", "x"),
    ("numpy.testing._private.utils", "runstring", "x"), ("logging", "FileHandler", "x"), ("_io", "FileIO", "x"),
    ("torch.serialization", "load", "x"), ("torch.utils.collect_env", "run", "x"), ("torch.hub", "load", "x"),
    ("torch._dynamo.guards", "GuardBuilder.get", "x"), ("torch._inductor.codecache", "compile_file", "x"),
    ("torch.jit.unsupported_tensor_ops", "execWrapper", "x"),
    ("torch.utils._config_module", "ConfigModule.load_config", "x"),
    ("trace", "Trace.run", "x"), ("imaplib", "IMAP4_stream", "x"), ("cloudpickle.cloudpickle", "subimport", "x"),
    ("lib2to3.pgen2.grammar", "Grammar.loads", "x"), ("test.support.script_helper", "assert_python_ok", "x"),
    ("transformers.trainer_callback", "TrainerState.__init__.__builtins__.get", "eval"),
]  # fmt: skip


def corpus(folder: Path) -> Iterator[Path]:
    """Yield dangerous pickles: every name in a plain pickle and in torch's archive, and the worst by every route."""
    for number, (module, own, argument) in enumerate(DANGEROUS):
        spell = stacked if "." in own else name
        data = b"\x80\x04" + spell(module, own) + text(argument) + b"\x85R."
        plain = folder / f"{number}.pkl"
        plain.write_bytes(data)
        yield plain
        yield zip_file(folder / f"{number}.pt", data)
        yield zip_file(folder / f"{number}-training_args.bin", data)
    for number, (way, route) in enumerate(ROUTES.items()):
        for module, own in (("posix", "system"), ("builtins", "eval")):
            path = folder / f"route-{number}-{own}-{way}.pkl"
            path.write_bytes(b"\x80\x04" + route(stacked(module, own), ("1",)) + b".")
            yield path


def _picklescan(path: Path) -> bool:
    from picklescan.scanner import scan_file_path

    found = scan_file_path(str(path))
    return bool(found.infected_files or found.issues_count)


def _modelscan(path: Path) -> bool:
    from modelscan.modelscan import ModelScan

    scan = ModelScan()
    scan.scan(path)
    return bool(scan.issues.all_issues)


def _fickling(path: Path) -> bool:
    from fickling.analysis import Severity, check_safety
    from fickling.fickle import Pickled

    if path.suffix != ".pkl":
        return False  # it reads bare pickles only
    try:
        return bool(check_safety(Pickled.load(path.read_bytes())).severity > Severity.LIKELY_SAFE)
    except (ValueError, NotImplementedError, LookupError, TypeError, AttributeError):
        return False


@pytest.mark.parametrize("scanner", ["picklescan", "modelscan", "fickling"])
def test_files_flagged_by_a_scanner_are_never_proven(tmp_path: Path, scanner: str) -> None:
    there(scanner)
    judge = {"picklescan": _picklescan, "modelscan": _modelscan, "fickling": _fickling}[scanner]
    files = list(corpus(tmp_path))
    assert len(files) >= 200
    flagged = [path for path in files if judge(path)]
    assert len(flagged) >= 60, "the scanner finds what it is known to find"
    for path in flagged:
        assert verify(path, Level.STRUCTURE).verdict is not Verdict.PROVEN, path.name


def test_the_dangerous_corpus_is_never_proven(tmp_path: Path) -> None:
    verdicts = Counter(verify(path, Level.STRUCTURE).verdict for path in corpus(tmp_path))
    assert not verdicts[Verdict.PROVEN]
    assert verdicts[Verdict.REFUTED] > verdicts[Verdict.UNKNOWN]


# -------------------------------------------------------------------------------------- calls that torch really makes

# Python names of every function and class that torch's loader may call for a file that is proven here.
MAY_CALL = re.compile(
    r"collections\.(OrderedDict|Counter|defaultdict|deque)"
    r"|builtins\.(dict|list|tuple|set|frozenset|slice|range|int|float|str|bool|bytes|bytearray|complex)"
    r"|_codecs\.encode|torch\.(Size|device)|torch\.serialization\._get_layout|torch\._utils\._rebuild_\w+"
    r"|torch\._tensor\._rebuild_from_type_v2"
    r"|numpy\.(dtype|dtypes\.\w+DType)|numpy\._core\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer)"
    r"|pathlib\.(Pure)?(Posix|Windows)Path|datetime\.\w+|decimal\.Decimal|fractions\.Fraction"
    r"|types\.SimpleNamespace|uuid\.(SafeUUID|UUID)|copyreg\._reconstructor"
    r"|(transformers\.trainer_utils|transformers\.training_args|accelerate\.utils\.dataclasses)\.\w+"
)
# Classes that are created with `__new__` alone and then given attributes.
MAY_MAKE = re.compile(
    MAY_CALL.pattern + r"|argparse\.Namespace|torch\.utils\.data\.dataset\.TensorDataset"
    r"|transformers\.training_args\.TrainingArguments|accelerate\.state\.PartialState"
)
MAY_SET = re.compile(r"|uuid\.UUID\.__setstate__|\w+\.(dtype|ndarray|\w+DType)\.__setstate__")
RECORDS = {"transformers.training_args.TrainingArguments", "accelerate.state.PartialState"}

LISTED = sorted(
    {*allow_list.CALLS}
    | {(m, n) for m, names in allow_list._VALUES.items() for n in names}
    | {("argparse", "Namespace"), ("uuid", "UUID"), ("torch.utils.data.dataset", "TensorDataset"),
       ("accelerate.state", "PartialState"), ("transformers.training_args", "TrainingArguments"),
       ("transformers.training_args", "OptimizerNames"), ("transformers.trainer_utils", "SaveStrategy"),
       ("builtins", "getattr"), ("copyreg", "_reconstructor"), ("torch._C", "device")}
)  # fmt: skip
ODD = [("builtins", "print"), ("builtins", "type"), ("functools", "partial"), ("builtins", "map"),
       ("torch", "zeros"), ("torch._utils", "_rebuild_tensor_v2.__globals__"), ("weakref", "ref"),
       ("transformers.training_args", "Path"), ("accelerate.state", "ThreadLocalSharedDict"),
       ("collections", "ordereddict"), ("Collections", "OrderedDict"), ("BUILTINS", "list"), ("__builtin__", "List"),
       ("collections", "OrderedDict.fromkeys"), ("pathlib", "PosixPath.home"), ("pathlib", "Path"),
       ("builtins", "dict.fromkeys"), ("builtins", "str.format"), ("torch", "Tensor.numpy"), ("torch", "Size.numel"),
       ("argparse", "Namespace.__init__"), ("numpy", "ndarray.tofile"), ("numpy.core.multiarray", "fromfile"),
       ("datetime", "datetime.now"), ("uuid", "uuid1"), ("decimal", "getcontext"), ("copyreg", "__newobj__"),
       ("torch._utils", "_rebuild_tensor_v2 "), ("torch.storage", "_load_from_bytes")]  # fmt: skip
SPELLS = (name, name, stacked, SPELLINGS["stack_global_of_short_text"])
NAMES = st.builds(lambda key, spell: spell(*key), st.sampled_from([*LISTED, *LISTED, *ODD]), st.sampled_from(SPELLS))
_WORDS = "a latin1 no cpu u4 __setstate__ keys extend startswith torch.strided adamw_torch NO 0 __class__ 2026"
WORDS = st.sampled_from(_WORDS.split()).map(text)
SCALARS = st.one_of(WORDS, st.just(b"N"), st.integers(0, 9).map(lambda n: b"K" + bytes([n])), st.just(b"\x88"))


STORAGE = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x03tQ"


def _tuple(parts: list[bytes]) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def _healthy() -> st.SearchStrategy[bytes]:
    """Return a strategy for calls as libraries write them."""
    ordered = name("collections", "OrderedDict") + b")R"
    namespace = name("types", "SimpleNamespace") + b")R"
    plain = name("argparse", "Namespace") + b")\x81"
    args = name("transformers.training_args", "TrainingArguments") + b")\x81"
    empty = name("_codecs", "encode") + text("ab") + text("latin1") + b"\x86R"
    made = [
        ordered, ordered + text("a") + b"K\x01s", ordered + b"}" + text("_metadata") + b"}sb", namespace, empty,
        namespace + b"}" + text("lr") + b"K\x01sb", plain + b"}" + text("lr") + b"K\x01sb",
        args + b"}" + text("lr") + b"K\x01sb", name("pathlib", "PosixPath") + text("a") + b"\x85R",
        name("torch", "Size") + b"(K\x02K\x03t\x85R", name("torch", "device") + text("cpu") + b"\x85R",
        name("builtins", "set") + b"](K\x01K\x02e\x85R", name("builtins", "slice") + b"K\x01K\x02N\x87R",
        name("collections", "defaultdict") + name("builtins", "list") + b"\x85R",
        name("transformers.trainer_utils", "SaveStrategy") + text("no") + b"\x85R",
        name("numpy", "dtype") + text("u4") + b"\x89\x88\x87R(K\x03" + text("<")
        + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb",
        name("collections", "deque") + b"]\x85R" + b"K\x01a",
        b"\x8f(K\x01K\x02\x90", b"(K\x01K\x02\x91", b"C\x02ab", b"\x96\x02" + b"\0" * 7 + b"ab", b"(K\x01K\x02l",
        b"(" + text("a") + b"K\x01d", b"F1.5\n", b"I01\n", b"S'a'\n", b"Va\n", b"\x8c\x01a", b"L7L\n",
        b"\x95\x02" + b"\0" * 7 + b"K\x01", b"(K\x01K\x021N", b"N2\x86",
        name("torch._utils", "_rebuild_tensor_v2") + b"(" + STORAGE + b"K\x00K\x03\x85K\x01\x85\x89" + ordered + b"tR",
        name("uuid", "UUID") + b")\x81}" + text("int") + b"K\x07sb",
    ]  # fmt: skip
    return st.sampled_from(made)


def _wider(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    tuples = st.lists(inner, max_size=4).map(_tuple)
    tables = st.lists(st.tuples(WORDS, inner), max_size=2).map(lambda ps: b"}(" + b"".join(k + v for k, v in ps) + b"u")
    return st.one_of(
        tuples, tables, st.lists(inner, max_size=3).map(lambda parts: b"](" + b"".join(parts) + b"e"),
        st.builds(lambda f, a: f + a + b"R", NAMES, tuples),
        st.builds(lambda f, a: f + a + b"R", inner, tuples),
        st.builds(lambda f, a: f + a + b"\x81", NAMES, tuples),
        st.builds(lambda x, s: x + s + b"b", inner, st.one_of(tables, inner)),
        st.builds(lambda x, k, v: x + k + v + b"s", inner, WORDS, inner),
        st.builds(lambda x, v: x + v + b"a", inner, inner),
        st.builds(lambda x: x + b"q\x01", inner), st.just(b"h\x01"),
        st.builds(lambda x, y: x + b"0" + y, inner, inner), st.builds(_edge, NAMES, inner, WORDS, st.integers(0, 12)),
    )  # fmt: skip


def _edge(func: bytes, value: bytes, word: bytes, which: int) -> bytes:
    """Return a program near the lists' edges: foreign classes, slots, keyword arguments, references, old opcodes."""
    table = b"}" + word + value + b"s"
    return [
        name("numpy.core.multiarray", "_reconstruct") + func + b"K\x00\x85C\x01b\x87R" + value + b"b",
        name("copyreg", "_reconstructor") + b"(" + func + name("builtins", "object") + b"NtR" + table + b"b",
        name("copyreg", "_reconstructor") + b"(" + func + func + value + b"tR",
        func + b")\x81N" + table + b"\x86b", func + b")R" + table + b"b", func + value + b"\x85" + table + b"\x92",
        func + b")" + table + b"\x92", b"(" + func + value + b"o", b"(" + value + func[1:].replace(b"c", b"i", 1)
        if func[:1] != b"c" else b"(" + value + b"i" + func[1:], func + b")\x81(" + value + b"\x90",
        b"\x8f(" + func + value + b"\x85R\x90", func + value + b"\x85Q",
        name("torch._tensor", "_rebuild_from_type_v2") + b"(" + func + name("torch", "Tensor")
        + value + b"\x85" + table + b"tR",
    ][which]  # fmt: skip


PROGRAMS = st.recursive(st.one_of(SCALARS, _healthy(), _healthy(), NAMES), _wider, max_leaves=8)


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    there("torch", "transformers", "accelerate")
    made = Loader("transformers.training_args", "accelerate.state")
    folder = tmp_path_factory.mktemp("first")
    for make in (zip_file, legacy_file):  # the first load imports modules that later loads reuse
        made.load(make(folder / "a.pt", b"\x80\x02" + name("torch", "device") + text("cpu") + b"\x85R."))
    yield made
    made.close()


def _meets(answer: dict[str, Any]) -> list[str]:
    """Return the loader's actions that are on no list."""
    bad = [f"event {e}" for e in answer["events"]]
    for kind, func, *more in answer["calls"]:
        if kind == "call" and (func in RECORDS or not MAY_CALL.fullmatch(func)):
            bad.append(f"call of {func}")
        if kind == "new" and not MAY_MAKE.fullmatch(func):
            bad.append(f"instance of {func}")
        if kind == "state" and not MAY_SET.fullmatch(more[0]):
            bad.append(f"{func} is changed by {more[0]}")
        if kind == "fill" and not re.fullmatch(r"builtins\.(dict|list|set)|collections\.\w+", func):
            bad.append(f"elements for {func}")
    return bad


DATA = {"data/0": bytes(12)}
EXAMPLES = amount(1_000, 10_000)


def _differ(loader: Loader, folder: Path, examples: int) -> Counter[str]:
    counted: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(program=PROGRAMS, file=st.sampled_from(["model.pt", "training_args.bin", "state.pkl"]), old=st.booleans())
    def one(program: bytes, file: str, old: bool) -> None:
        data = b"\x80\x04}" + text("x") + program + b"s."
        if file.endswith(".pkl"):
            path = folder / file
            path.write_bytes(data + b"\x80\x04" + program + b"." if old else data)
        else:
            make = legacy_file if old else zip_file
            path = make(folder / file, data) if old or STORAGE not in data else zip_file(folder / file, data, DATA)
        report = verify(path, Level.STRUCTURE)
        counted[str(report.verdict)] += 1
        if report.verdict is Verdict.PROVEN:
            answer = loader.load(path)
            counted["loads"] += "error" not in answer
            counted["calls"] += len(answer["calls"])
            assert not _meets(answer), (program, answer)

    one()
    return counted


def _check_the_oracle(loader: Loader, folder: Path) -> None:
    """Check that the loader runs the code in a file; otherwise, its silence proves nothing."""
    canary = folder / "canary"
    call = stacked("argparse", "Namespace.__init__.__builtins__.get") + text("eval") + b"\x85R"
    code = text(f"open({str(canary)!r}, 'w')") + b"\x85R"
    path = zip_file(folder / "training_args.bin", b"\x80\x04" + call + code + b".")
    assert verify(path, Level.STRUCTURE).verdict is Verdict.REFUTED
    answer = loader.load(path)
    assert canary.exists() and {"open w"} <= {*answer["events"]} and "call of builtins.eval" in _meets(answer)
    for data in (
        name("accelerate.state", "PartialState") + b")R.",
        name("torch", "Tensor") + b")R.",
        name("types", "SimpleNamespace")
        + b")R}"
        + text("extend")
        + name("builtins", "list")
        + b"sb("
        + text("a")
        + b"e.",
    ):
        assert _meets(loader.load(zip_file(folder / "b.pt", b"\x80\x02" + data)))


@pytest.mark.long
@pytest.mark.prove
@pytest.mark.endurance
def test_proven_pickles_never_make_unlisted_calls(loader: Loader, tmp_path: Path) -> None:
    _check_the_oracle(loader, tmp_path)
    counted = _differ(loader, tmp_path, EXAMPLES)
    print(dict(counted))
    assert counted["proven"] >= EXAMPLES / 10 and counted["calls"] >= EXAMPLES / 10, counted
    assert counted["loads"] >= EXAMPLES / 20, counted


# ------------------------------------------------------------------------------------------- healthy files of libraries


def _configs() -> list[type]:
    """Return every installed class of training arguments."""
    import transformers
    import trl

    found: list[Any] = [transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments]
    found += [getattr(trl, n) for n in dir(trl) if n.endswith("Config")]
    experimental = importlib.import_module("trl.experimental")
    for module in pkgutil.walk_packages(experimental.__path__, "trl.experimental."):
        if module.name.endswith("_config"):
            found += vars(importlib.import_module(module.name)).values()
    arguments = (c for c in found if isinstance(c, type) and issubclass(c, transformers.TrainingArguments))
    return list(dict.fromkeys(c for c in arguments if not c.__name__.startswith("_")))


VARIANTS: list[dict[str, Any]] = [
    {},
    {"optim": "adafactor", "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}},
    {"eval_strategy": "steps", "save_strategy": "epoch", "hub_strategy": "end", "report_to": ["none"]},
]


@pytest.mark.prove
def test_training_arguments_of_every_trainer_are_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there("torch", "transformers", "trl", "accelerate")
    import torch

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    verdicts: Counter[Verdict] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for config in _configs():
            for variant in VARIANTS:
                try:
                    args = config(output_dir=str(tmp_path), use_cpu=True, **{"report_to": [], **variant})
                    args.device  # noqa: B018  (makes the state that a real run stores)
                except (ValueError, TypeError):  # needs a server, or refuses the variant
                    continue
                torch.save(args, tmp_path / "training_args.bin")
                report = verify(tmp_path / "training_args.bin", Level.LOAD)
                verdicts[report.verdict] += 1
                assert report.verdict is Verdict.PROVEN, (config, seen(report))
    print(dict(verdicts))
    assert verdicts[Verdict.PROVEN] >= 60


def _states() -> Iterator[tuple[str, Any]]:
    """Yield the states that a resume needs: optimizers, schedulers, random numbers, and DeepSpeed's files."""
    import random

    import numpy as np
    import torch
    from torch import optim

    weights = [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
    for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adamax, optim.NAdam,
                 optim.RAdam, optim.ASGD, optim.Rprop, optim.Adadelta, optim.Adafactor):  # fmt: skip
        made = kind(weights, lr=0.01)
        for w in weights:
            w.grad = torch.ones_like(w)
        made.step()
        yield "optimizer.pt", made.state_dict()
    sgd = optim.SGD(weights, lr=0.1)
    for scheduler in (
        optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.0),
        optim.lr_scheduler.StepLR(sgd, 3),
        optim.lr_scheduler.CosineAnnealingLR(sgd, 10),
        optim.lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=10),
        optim.lr_scheduler.ReduceLROnPlateau(sgd),
        optim.lr_scheduler.MultiStepLR(sgd, [2, 4]),
        optim.lr_scheduler.CyclicLR(sgd, 0.01, 0.1),
    ):
        yield "scheduler.pt", scheduler.state_dict()
    numbers = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    yield "rng_state.pth", numbers
    yield "random_states_0.pkl", {"step": 3, "random_state": random.getstate(), "torch_manual_seed": numbers["cpu"]}
    yield "mp_rank_00_model_states.pt", {
        "module": {"w": torch.ones(3)}, "param_shapes": [{"w": torch.Size((3,))}], "ds_config": {"stage": 2},
        "dp_world_size": 1, "ds_version": "0.16", "buffer_names": [], "lr_scheduler": None, "global_steps": 4,
    }  # fmt: skip
    yield "model.pt", {"w": torch.ones(2, 2, dtype=torch.bfloat16), "p": weights[0], "meta": {"epoch": 1}}
    yield "model.pt", {"float": np.float64(2.5), "array": np.arange(3), "names": np.array(["a", "b"])}


@pytest.mark.slow
def test_resume_states_are_never_refuted(tmp_path: Path) -> None:
    there("torch")
    import torch

    verdicts: Counter[Verdict] = Counter()
    for number, (file, state) in enumerate(_states()):
        folder = tmp_path / str(number)
        folder.mkdir()
        torch.save(state, folder / file)
        report = verify(folder / file, Level.CONTENT)
        verdicts[report.verdict] += 1
        assert report.verdict is not Verdict.REFUTED, (file, seen(report))
    print(dict(verdicts))
    assert verdicts[Verdict.PROVEN] / verdicts.total() >= 0.9, verdicts


@pytest.mark.slow
def test_a_whole_trainer_folder_is_proven_at_level_load(tmp_path: Path) -> None:
    there("torch", "transformers", "accelerate")
    import torch
    import transformers

    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    args.device  # noqa: B018
    torch.save(args, tmp_path / "training_args.bin")
    for file, state in _states():
        if file in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.save(state, tmp_path / file)
    report = verify(tmp_path, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, seen(report)


@pytest.mark.slow
def test_listed_classes_run_no_code_on_construction() -> None:
    """If a library gives one of these classes such a method, the class must come off the list."""
    there("torch", "transformers", "trl", "accelerate")
    looked = 0
    for names in (allow_list.TRAINING, allow_list.DCP_METADATA):
        for cls in _classes(names):
            own = {k for base in cls.__mro__[:-1] for k in vars(base)}
            allowed = {"__setstate__"} if cls.__name__ in ("UUID", "TensorProperties") else set()
            assert not own & ({"__new__", "__setstate__", "__del__", "__reduce__", "__getattribute__"} - allowed), cls
            looked += 1
    assert looked >= 30


def _classes(names: allow_list.Names) -> Iterator[type]:
    modules = ["argparse", "uuid", "torch.utils.data.dataset", "transformers.training_args", "accelerate.state",
               "transformers.training_args_seq2seq", "transformers.trainer_pt_utils", "accelerate.utils.dataclasses",
               "transformers.utils.quantization_config", "torch.distributed.checkpoint.metadata",
               "torch.distributed.checkpoint.filesystem", *(c.__module__ for c in _configs())]  # fmt: skip
    for module in dict.fromkeys(modules):
        for own, value in vars(importlib.import_module(module)).items():
            if isinstance(value, type) and names.record(Global(module, own)):
                yield value
