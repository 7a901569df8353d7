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

from gputrain.llama_cpp import find_or_build


def main() -> None:
    """Build the missing parts; progress is printed to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        found = find_or_build("", "", os.cpu_count() or 1, quantizes=True)
    print(f"{found.source}:{found.quantizer.parent.parent}")


if __name__ == "__main__":
    main()
