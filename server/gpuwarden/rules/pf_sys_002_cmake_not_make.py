from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SYS-002",
    gate="submit",
    severity=Severity.WARNING,
    fix="Use cmake -B build -DGGML_CUDA=OFF, then cmake --build build --target llama-quantize -j 4.",
)
def cmake_not_make(facts: SubmitFacts) -> Iterator[Found]:
    """llama.cpp is built with CMake, not make.

    Why: llama.cpp's Makefile was removed, so `make` fails. The makefiles of other projects may not work on every
    machine.

    Example:
        subprocess.run(["make", "-C", "llama.cpp"], check=True)

    Instead:
        subprocess.run(["cmake", "-S", "llama.cpp", "-B", "build", "-DGGML_CUDA=OFF"], check=True)

    """
    shells = facts.uses.shells
    llama = any("llama" in word for shell in shells for word in shell.words)
    for shell in shells:
        if shell.program == "make":
            severity = Severity.ERROR if llama else None
            fix = "" if llama else "Prefer the project's CMake build if it has one."
            yield Found(f"line {shell.line} builds with make", fix=fix, severity=severity)
