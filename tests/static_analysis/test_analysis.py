"""Facts read from a script's text: constants passed to calls, repos, pushes, variables, and programs."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import lines_run
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.hardware import gpu_of
from gpuwarden.static_analysis.ecosystem_tables import KNOWN, closure, distributions, read_requirement
from gpuwarden.static_analysis.script import decode, read_command, read_script
from gpuwarden.static_analysis.script_usage import Push, Uses
from gpuwarden.static_analysis.static_eval import UNKNOWN, Program, flags


def value_of(text: str, env: dict[str, str] | None = None, argv: tuple[str, ...] = ()) -> object:
    """Return the value of the first argument in the call `see(...)`."""
    program = Program(ast.parse(text), env, argv)
    (call,) = (c for c in program.calls if c.name == "see")
    return call.args[0]


def uses(text: str, **given: object) -> Uses:
    facts = read_script(text, **given)  # type: ignore[arg-type]
    assert facts.error is None
    return facts.uses


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("see('a/b')", "a/b"),
        ("x = 'a/b'\nsee(x)", "a/b"),
        ("x: str = 'a/b'\ndef f():\n    see(x)", "a/b"),
        ("a = 'a'\nsee(f'{a}/b')", "a/b"),
        ("see('a' + '/' + 'b')", "a/b"),
        ("c = {'model': 'a/b'}\nsee(c['model'])", "a/b"),
        ("c = dict(model='a/b')\nsee(c['model'])", "a/b"),
        ("class C:\n    model = 'a/b'\nsee(C.model)", "a/b"),
        ("from dataclasses import dataclass, field\n@dataclass\nclass C:\n    m: str = field(default='a/b')\nc = C()\nsee(c.m)", "a/b"),  # noqa: E501
        ("def f(m='a/b'):\n    see(m)\nf()", "a/b"),
        ("def f(m):\n    see(m)\nf('a/b')", "a/b"),
        ("def f(m, n=1):\n    see(m)\nf(n=2, m='a/b')", "a/b"),
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--my-model', default='a/b')\nargs = p.parse_args()\nsee(args.my_model)", "a/b"),  # noqa: E501
        ("import os\nsee(os.environ.get('M', 'a/b'))", "a/b"),
        ("import os\nsee(os.getenv('M') or 'a/b')", "a/b"),
        ("from os import environ\nsee(environ.get('M', 'a/b'))", "a/b"),
        ("see(4 * 1024 // 2)", 2048),
        ("see(-1)", -1),
        ("see([1, 2][1])", 2),
        ("a = {'x': 1}\nsee((a | {'x': 2})['x'])", 2),
        ("x, y = 'a/b', 2\nsee(x)", "a/b"),
        ("see(str('a/b'))", "a/b"),
        ("from functools import partial\nn = 'a'\ng = partial(see, n)\ndef f(n='b'):\n    g()\nf()", "a"),
        # undecidable values
        ("see(x)", UNKNOWN),
        ("x = 'a'\nx = 'b'\nsee(x)", UNKNOWN),
        ("for x in ['a', 'b']:\n    see(x)", UNKNOWN),
        ("def f(m):\n    see(m)\nf('a')\nf('b')", UNKNOWN),
        ("import os\nsee(os.environ['M'])", UNKNOWN),
        ("x = x\nsee(x)", UNKNOWN),
        ("def f(a):\n    f(a)\n    see(a)\nf(f)", UNKNOWN),
        ("see(1 / 0)", UNKNOWN),
        ("see(({'x': 1} | y)['x'])", UNKNOWN),
    ],
)  # fmt: skip
def test_constants_are_followed(text: str, value: object) -> None:
    assert value_of(text) == value


def test_the_jobs_variables_and_arguments_count() -> None:
    assert value_of("import os\nsee(os.environ['M'])", {"M": "a/b"}) == "a/b"
    assert value_of("import os\nsee(os.getenv('M', 'x'))", {"M": "a/b"}) == "a/b"
    parser = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--m', default='x')\nargs = p.parse_args()\nsee(args.m)"  # noqa: E501
    assert value_of(parser, argv=("--m", "a/b")) == "a/b"
    assert flags(("--a", "--b=1", "--c-d", "x", "--e", "true")) == {"a": True, "b": 1, "c_d": "x", "e": True}


def test_repos_are_distinguished_from_local_paths() -> None:
    found = uses(
        "from datasets import load_dataset\nfrom transformers import AutoModel, AutoTokenizer, TrainingArguments\n"
        "from peft import PeftModel\nimport pandas as pd\n"
        "load_dataset('json', data_files='x.jsonl')\nload_dataset('./here')\nload_dataset('o/data', 'cfg', split='test')\n"  # noqa: E501
        "m = AutoModel.from_pretrained('o/model', revision='abc')\nm.save_pretrained('my/out')\n"
        "AutoModel.from_pretrained('my/out')\nAutoModel.from_pretrained('runs/one/checkpoint-10')\n"
        "PeftModel.from_pretrained(m, 'o/adapter')\npd.read_parquet('hf://datasets/o/table/data/a.parquet')\n"
        "TrainingArguments(output_dir='local/run')\nAutoModel.from_pretrained('local/run')\n"
    )
    assert [(r.id, r.type, r.role) for r in found.repos] == [
        ("o/data", "dataset", "data"),
        ("o/model", "model", "model"),
        ("o/adapter", "model", "adapter"),
        ("o/table", "dataset", "file"),
    ]
    assert (found.repos[0].config, found.repos[0].split, found.repos[1].revision) == ("cfg", "test", "abc")


def test_pushes_are_found_with_their_targets() -> None:
    text = "from trl import SFTConfig, SFTTrainer\nc = SFTConfig(output_dir='o')\nc.push_to_hub = True\nc.hub_model_id = 'me/x'\n"  # noqa: E501
    text += "trainer = SFTTrainer(model='a/b', args=c)\ntrainer.push_to_hub('done')\nmodel.push_to_hub('me/y')\n"
    assert {p.target for p in uses(text).pushes} == {"me/x", "me/y"}
    (asked,) = uses("from trl import SFTConfig\nSFTConfig(push_to_hub=flag)").pushes
    assert asked.maybe


def test_programs_run_by_a_helper_are_found() -> None:
    text = "import subprocess\ndef run(cmd):\n    subprocess.run(cmd, check=True)\nrun(['make', '-j'])\nrun(['sh', '-c', 'cd x && cmake .'])\n"  # noqa: E501
    assert [s.words for s in uses(text).shells] == [("make", "-j"), ("cd", "x"), ("cmake", ".")]


def test_a_long_string_concatenation_is_an_unknown_program() -> None:
    facts = read_script("import os\nos.system(" + " + ".join(["a"] * 1500) + ")")
    assert facts.error is None
    (shell,) = facts.uses.shells
    assert set(shell.program) == {"?"}


STREAMED = "from datasets import load_dataset\nfrom trl import SFTTrainer\ndef f0():\n    return load_dataset('a/b', streaming=True)\n"  # noqa: E501
GROWING = {
    "values": lambda n: "g = x\n" * n + "g()\n" * n,
    "readers": lambda n: (
        STREAMED
        + "s = f0()\n" * n
        + "".join(f"def g{i}():\n    return s\n" for i in range(n))
        + f"SFTTrainer(train_dataset=[{', '.join(f'g{i}()' for i in range(n))}])"
    ),
    "callers": lambda n: "def f(g):\n    g()\n" * n + "f(1)\n" * n,
    "calls that return": lambda n: (
        STREAMED
        + "".join(f"def f{i + 1}():\n    return [{f'f{i}(), ' * 8}]\n" for i in range(n // 20))
        + f"SFTTrainer(train_dataset=f{n // 20}())"
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_the_work_grows_in_proportion_to_the_script_length(name: str) -> None:
    def work(size: int) -> int:
        return lines_run(lambda: read_script(GROWING[name](size)))

    assert work(400) < 5 * work(100)


def test_commands_of_trl_are_read() -> None:
    facts = read_command(("trl", "dpo", "--model_name_or_path", "a/m", "--dataset_name=o/d", "--push_to_hub"))
    assert facts.uses.methods == {"dpo"}
    assert {(r.id, r.type) for r in facts.uses.repos} == {("a/m", "model"), ("o/d", "dataset")}
    assert facts.uses.pushes == (Push(0, "--push_to_hub", None),)
    assert read_command(("python", "train.py", "--dataset_name", "/data/x")).uses.repos == ()


HOSTILE = {
    "parentheses": "x = " + "(" * 10_000 + ")" * 10_000,
    "lists": "x = " + "[" * 10_000 + "]" * 10_000,
    "minus": "x = " + "-" * 10_000 + "1",
    "attributes": "x = a" + ".b" * 10_000,
    "calls": "x = f" + "()" * 10_000,
    "sum": "x = " + "+".join(["1"] * 10_000),
    "if": "".join("if x:\n" + " " * (n + 1) for n in range(10_000)) + "pass",
    "lambda": "x = " + "lambda: " * 10_000 + "1",
    "strings": "x = " + "'a' " * 10_000,
    "doubling": "".join(f"x{n + 1} = x{n} + x{n}\n" for n in range(10_000)).join(["x0 = 'a'\n", "see(x9999)\n"]),
    "fan out": "def f(a):\n    see(a)\n" + "f(1)\n" * 5_000,
    "env": "import os\n" + "v = os.environ.get('X')\nif v: pass\n" * 5_000,
    "maps": "def g(r): return r['a']\n" + "d.map(g)\n" * 5_000,
    "surrogate": "x = '\ud800'",
    "bom": "\ufeffx = 1",
    "form feed": "\x0cx = 1",
    "elif": "if x: pass\n" + "elif x: pass\n" * 900,
    "statements": "if x:\n" + " a\n" * 20_000,
    "words": f"import os\nx = {'sudo ' * 800!r}\nos.system(f'" + "{x}" * 1_000 + "')",
}


@pytest.mark.prove
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_scripts_finish_soon_with_a_short_error_at_most(text: str) -> None:
    facts = read_script(text)
    assert lines_run(lambda: read_script(text)) < 40_000_000  # the slowest runs 2,000 for each of its 10,000 lines
    assert facts.error is None or ("\n" not in facts.error and len(facts.error) < 300)


@given(st.text(max_size=200))
@settings(max_examples=200)
def test_arbitrary_text_never_raises(text: str) -> None:
    read_script(text)
    read_command((text, "--dataset_name", text))


def test_scripts_in_other_encodings_are_decoded_or_refused() -> None:
    assert decode("x = 'é'".encode()) == "x = 'é'"
    assert decode("# -*- coding: latin-1 -*-\nx = 'é'".encode("latin-1")).endswith("'é'")
    for raw in (b"x = '\xe9'", b"# -*- coding: klingon -*-\n", b"\x80\x81"):
        with pytest.raises(BadRequest):
            decode(raw)


@pytest.mark.parametrize(
    ("word", "name", "count"),
    [("t4-small", "t4", 1), ("a100x4", "a100", 4), ("NVIDIA A100-SXM4-80GB", "a100", 1), ("A100_40GB", "a100-40gb", 1),
     ("RTX_4090", "rtx4090", 1), ("8xH100", "h100", 8), ("gpu_1x_a10", "a10", 1), ("rtx-pro-6000x2", "rtxpro6000", 2)],
)  # fmt: skip
def test_gpu_names_are_recognized(word: str, name: str, count: int) -> None:
    found = gpu_of(word)
    assert found is not None
    assert (found[0].name, found[1]) == (name, count)


@pytest.mark.parametrize("word", [None, "", "cpu-basic", "tpu-v5", "gh200", "x" * 500])
def test_non_gpu_names_are_not_recognized(word: str | None) -> None:
    assert gpu_of(word) is None


def test_requirements_are_parsed() -> None:
    found = read_requirement("Torch_Vision[x, y] >=0.2, <1 ; python_version > '3'")
    assert found is not None
    assert (found.name, found.extras, found.specifier) == ("Torch_Vision", {"x", "y"}, ">=0.2,<1")
    assert read_requirement("https://example.com/x.whl") is None
    assert {"torch", "numpy", "transformers"} <= closure({"trl"})


# Import names that differ from the package's name with underscores.
IMPORTS = {
    "hydra-core": "hydra",
    "nvidia-ml-py": "pynvml",
    "opencv-python": "cv2",
    "opencv-python-headless": "cv2",
    "pillow": "PIL",
    "protobuf": "google",
    "python-dateutil": "dateutil",
    "python-dotenv": "dotenv",
    "python-levenshtein": "Levenshtein",
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
    "tensorboardx": "tensorboardX",
}


def test_every_known_packages_import_maps_back_to_the_package() -> None:
    packages = {name for name in KNOWN if "[" not in name}
    imports = {name: IMPORTS.get(name, name.replace("-", "_")) for name in packages}
    assert packages >= IMPORTS.keys()
    assert not {name: module for name, module in imports.items() if name not in distributions(module)}
