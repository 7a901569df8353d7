"""llama.cpp: find or build its tools, write GGUF files with them, and read the files back."""

import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain.folder import put_in_place
from gputrain.outcome import Exit, Stop, say

SOURCE = "llama-cpp-python==0.3.36"  # its source archive contains llama.cpp with the converter and the build files
PROGRAMS = ("cmake", "g++", "make")
# Runs the converter with a given pre-tokenizer name, for tokenizers that it doesn't know.
CONVERT_AS = (
    "import runpy, sys; sys.path.insert(0, sys.argv[1]); name = sys.argv[2]; sys.argv = sys.argv[3:]; "
    "import conversion.base as base; base.TextModel.get_vocab_base_pre = lambda self, tokenizer: name; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


@dataclass(frozen=True)
class LlamaCpp:
    """The source tree of llama.cpp, and the path of its quantizer."""

    source: Path
    quantizer: Path

    def convert(self, model: Path, file: Path, pre_tokenizer: str) -> None:
        """Convert a model to an F16 GGUF file."""
        script = str(self.source / "convert_hf_to_gguf.py")
        words = [script, str(model), "--outfile", f"{file}.part", "--outtype", "f16"]
        if pre_tokenizer:
            words = ["-c", CONVERT_AS, str(self.source), pre_tokenizer, *words]
        call([sys.executable, *words], "conversion")
        Path(f"{file}.part").replace(file)

    def quantize(self, full: Path, file: Path, kind: str, *, fallback: bool) -> None:
        """Write a smaller file from an F16 file.

        Raises:
            Stop: some tensors can't have the type `kind`, and `fallback` is false.

        """
        printed = call([str(self.quantizer), str(full), f"{file}.part", kind], f"quantization {kind}")
        if "fallback quantization" in printed and not fallback:
            message = f"{kind}: some tensors fell back to another type"
            raise Stop(Exit.DATA, message, "choose another type, or pass --fallback")
        Path(f"{file}.part").replace(file)


def find_or_build(source: str, build: str, jobs: int, *, quantizes: bool) -> LlamaCpp:
    """Return llama.cpp from the folders of its source and its build. Missing parts are downloaded or built."""
    tree = Path(source) if source else download()
    if not (tree / "convert_hf_to_gguf.py").exists():
        raise Stop(Exit.CONFIG, f"{tree} does not contain convert_hf_to_gguf.py", "correct --llama-cpp")
    made = Path(build or tree / "build-cpu")
    quantizer = made / "bin" / "llama-quantize"
    if quantizes and not quantizer.exists():
        need_programs()
        off = [f"-D{name}=OFF" for name in ("GGML_CUDA", "GGML_NATIVE", "LLAMA_CURL", "LLAMA_BUILD_TESTS")]
        call(["cmake", "-B", str(made), "-S", str(tree), "-DCMAKE_BUILD_TYPE=Release", *off], "configuration")
        call(["cmake", "--build", str(made), "--target", "llama-quantize", "-j", str(jobs)], "build")
    return LlamaCpp(tree, quantizer)


def call(words: list[str], what: str) -> str:
    """Run a program and return its output.

    Raises:
        Stop: the program is missing or failed; the end of its output is printed first.

    """
    say(f"{what}: {' '.join(words[:6])}")
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise Stop(Exit.ENVIRONMENT, f"{what}: {words[0]} is not installed", f"install {words[0]}") from None
    except subprocess.CalledProcessError as error:
        print(error.stdout[-3000:], error.stderr[-3000:], sep="\n", file=sys.stderr)
        lines = (error.stderr.strip() or error.stdout.strip()).splitlines()
        message = f"{what} failed: {lines[-1][:200] if lines else error.returncode}"
        raise Stop(Exit.ENVIRONMENT, message, "see the lines above") from error
    return done.stdout + done.stderr


def need_programs() -> None:
    """Install missing build programs with apt-get if this process runs as root; otherwise, raise Stop."""
    missing = sorted(name for name in PROGRAMS if not shutil.which(name))
    if not missing:
        return
    if not shutil.which("apt-get") or not hasattr(os, "geteuid") or os.geteuid():
        raise Stop(Exit.ENVIRONMENT, f"{', '.join(missing)} are not installed", "install them, or pass --llama-cpp")
    call(["apt-get", "update", "-qq"], "system packages")
    call(["apt-get", "install", "-y", "-qq", "build-essential", "cmake"], "system packages")


def download() -> Path:
    """Return the folder of llama.cpp's source; download it if it is missing."""
    kept = Path.home() / ".cache" / SOURCE.replace("==", "-")
    inner = f"{SOURCE.replace('-', '_').replace('==', '-')}/vendor/llama.cpp"
    if not (kept / inner).exists():
        making = kept.with_name(f".{kept.name}-{os.getpid()}")
        making.mkdir(parents=True)
        ask = ["download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(making), SOURCE]
        call([sys.executable, "-m", "pip", *ask], "source of llama.cpp")
        [archive] = making.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(making, filter="data")
        archive.unlink()
        put_in_place(making, kept)
    return kept / inner


def read_back(path: Path) -> dict[str, Any]:
    """Return the name, size and tensor types of a GGUF file, read to its last tensor.

    Raises:
        Stop: the file is truncated, has no tensors, or has values that are not finite.

    """
    import numpy as np
    from gguf import GGUFReader

    kinds: dict[str, int] = {}
    try:
        for tensor in GGUFReader(path).tensors:
            kinds[tensor.tensor_type.name] = kinds.get(tensor.tensor_type.name, 0) + 1
            if tensor.data.dtype in (np.float16, np.float32) and not bool(np.isfinite(tensor.data).all()):
                raise Stop(Exit.DATA, f"{path.name}: {tensor.name} has values that aren't finite", "train again")
    except (ValueError, IndexError, KeyError) as error:
        raise Stop(Exit.ENVIRONMENT, f"{path.name} is incomplete: {error}", "write it again; check the disk") from error
    if not kinds:
        raise Stop(Exit.ENVIRONMENT, f"{path.name} contains no tensors", "see the converter's output above")
    return {"file": path.name, "bytes": path.stat().st_size, "tensors": kinds}
