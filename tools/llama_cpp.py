"""Build llama.cpp once, as the shipped converter does, and print SOURCE:BUILD for GPUWARDEN_LLAMA_CPP.

    python tools/llama_cpp.py

The source is downloaded to ~/.cache and built there, which takes several minutes. Later calls reuse the build.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "skills" / "gpu-training" / "scripts"))

from merge_and_gguf import GgufSettings, tools


def main() -> None:
    """Build the missing parts; progress is printed to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        source, quantize = tools(GgufSettings(jobs=os.cpu_count() or 1), needs_quantize=True)
    print(f"{source}:{quantize.parent.parent}")


if __name__ == "__main__":
    main()
