"""Download released wheels and source archives and read the modules inside, without installing anything."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

from signature_tables.modules import Module, exported_only, read_module

# pytorch-lightning 1 became lightning.pytorch; one table contains both, under the new name.
ROOTS = {
    "sentence-transformers": ("sentence_transformers",),
    "pytorch-lightning": ("pytorch_lightning",),
}
# Only `__all__` is read from these modules: model classes accept `**kwargs`, and reading them takes ten times as long
# as reading all other modules.
NAMES_ONLY = re.compile(
    r"transformers/(models/.+/\w+|(generation|quantizers|pipelines|integrations|kernels|onnx)/(?!__init__)\w+)\.py|"
    r"transformers/(modeling|tokenization|image|video|audio|feature_extraction|cache|masking|processing|tf|keras)_\w+\.py|"
    r"diffusers/(pipelines|modular_pipelines|models|loaders|quantizers|hooks|guiders)/(.+/\w+|(?!__init__)\w+)\.py|"
    r"peft/tuners/\w+/(?!config|__init__)\w+\.py|datasets/(packaged_modules|io|formatting)/.+|"
    r"deepspeed/(inference/v2|model_implementations|module_inject|compression|autotuning|compile|nebula)/.+|"
    r"deepspeed/(elasticity|launcher|profiling|linear|accelerator|ops/(?!adam|lamb|lion)\w+)/(.+/)?(?!__init__)\w+\.py"
)
SKIPPED = re.compile(
    r"(^|/)(tests?|testing|cli|commands|templates|experimental/scripts)/|/(modular|dummy|convert|testing)_\w+\.py$|"
    r"/benchmark/|_(tf|flax)(_\w+)?\.py$|lightning/(app|fabric/cli|store|data)/"
)
TORCH = re.compile(
    r"torch/(functional|serialization)\.py$|torch/(nn|nn/modules|nn/utils|nn/parallel)/[a-z_]\w*\.py$|"
    r"torch/(optim|amp|utils/data|utils/tensorboard)/[a-z_]\w*\.py$|torch/utils/checkpoint\.py$|"
    r"torch/cuda/amp/\w+\.py$|torch/distributed/fsdp/(__init__|fully_sharded_data_parallel)\.py$"
)
TARGET = ["--only-binary=:all:", "--python-version", "3.11"]
TARGET += ["--platform", "macosx_14_0_arm64", "--platform", "macosx_11_0_arm64", "--platform", "win_amd64"]
"""torch wheels for macOS contain no CUDA libraries: 75 MB instead of 800. Old bitsandbytes has no wheels for macOS."""
SOURCES = frozenset({"deepspeed"})
"""Packages without wheels. To read the metadata of a source archive, pip runs its `setup.py`."""


def wheel(package: str, version: str, folder: Path) -> Path:
    """Return the path of a released wheel or source archive, which is downloaded if it is not in the folder."""
    source = package in SOURCES
    pattern = f"{package.replace('-', '_')}-{version}{'.tar.gz' if source else '-*.whl'}"
    if not (found := sorted(folder.glob(pattern))):
        kind = ["--no-binary=:all:", "--no-build-isolation"] if source else TARGET
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind]
        subprocess.run([*command, "--dest", str(folder), f"{package}=={version}"], check=True)
        found = sorted(folder.glob(pattern))
    return found[0]


def files_of(path: Path) -> dict[str, bytes]:
    """Return path -> content for the files in a wheel or a source archive, with empty content for files other than
    Python files and metadata.

    The top-level folder of a source archive is not part of the path.
    """

    def wanted(name: str) -> bool:
        return name.endswith((".py", "/METADATA", "/PKG-INFO"))

    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            names = (i.filename for i in archive.infolist() if not i.is_dir())
            return {name: archive.read(name) if wanted(name) else b"" for name in names}
    with tarfile.open(path) as source:
        members = [m for m in source if m.isfile()]
        read = {m.name: source.extractfile(m) if wanted(m.name) else None for m in members}
        return {name.partition("/")[2]: file.read() if file else b"" for name, file in read.items()}


def python_files(package: str, path: Path, left_out: re.Pattern[str]) -> Iterator[tuple[str, str, str]]:
    """Yield each Python file in a package with a key made from its path and digest, and its text."""
    roots = ROOTS.get(package, (package,))
    for file, content in files_of(path).items():
        of_package = file.partition("/")[0] in roots and file.endswith(".py")
        if of_package and not SKIPPED.search(file) and not left_out.match(file):
            yield file, _key(file, content), content.decode("utf-8", "replace")


def modules_of(package: str, path: Path, memo: dict[str, bytes]) -> tuple[dict[str, Module], set[str], list[str]]:
    """Return the modules that were read from a wheel, the names of all its modules, and its requirements.

    `memo` caches the result for each file, because most files are the same in the next release.
    """
    roots = ROOTS.get(package, (package,))
    rename = ("pytorch_lightning", "lightning.pytorch")
    read: dict[str, Module] = {}
    present: set[str] = set()
    files = files_of(path)
    for file in sorted(f for f in files if f.partition("/")[0] in roots):
        present.update(parent.replace(*rename) for parent in _parents(file))
        if not file.endswith(".py") or (package == "torch" and not TORCH.match(file)) or SKIPPED.search(file):
            continue
        is_package = file.endswith("/__init__.py")
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".").replace(*rename)
        key = _key(name, files[file])
        if key not in memo:
            text = files[file].replace(b"pytorch_lightning", b"lightning.pytorch").decode()
            whole = not NAMES_ONLY.fullmatch(file)
            found = read_module(name, text, is_package=is_package) if whole else exported_only(name, text)
            memo[key] = pickle.dumps(found)
        read[name] = pickle.loads(memo[key])  # noqa: S301 - written by this command
    metadata = next(n for n in files if n.endswith((".dist-info/METADATA", "PKG-INFO")))
    requires = Parser().parsestr(files[metadata].decode()).get_all("Requires-Dist") or []
    return read, present, [r for r in requires if "extra ==" not in r]


def _key(name: str, content: bytes) -> str:
    return f"{name} {zlib.crc32(content):08x} {len(content)}"


def _parents(file: str) -> Iterator[str]:
    """Yield the modules and packages that a file's path implies."""
    path = Path(file)
    if path.suffix in {".py", ".so", ".pyi"} and path.stem != "__init__":
        yield ".".join([*path.parts[:-1], path.name.partition(".")[0]])
    for folder in path.parents:
        if folder.parts:
            yield ".".join(folder.parts)
