"""Run trainers as children of one process that has imported the libraries, because importing them takes seconds.

Reads one JSON object per line, with argv, cwd, env and log. Prints the exit code of each trainer.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from typing import Any

from forked import preload, serve


def run(job: dict[str, Any]) -> int:
    """Run one script as the main program; return its exit code."""
    argv = job["argv"]
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(argv[0]))  # as `python script.py` does
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_in_place(job: dict[str, Any]) -> int:
    """Run one script in its folder with its environment variables; return its exit code."""
    os.chdir(job["cwd"])
    os.environ.update(job["env"])
    return run(job)


def main() -> None:
    """Serve jobs until the input ends."""
    preload(
        "datasets peft torch trl.experimental.orpo",
        transformers="AutoModelForCausalLM AutoModelForSequenceClassification",
        trl="SFTTrainer DPOTrainer KTOTrainer GRPOTrainer RLOOTrainer RewardTrainer",
    )
    serve(run_in_place)


if __name__ == "__main__":
    main()
