"""Run trainers as children of one process that has imported the libraries: each import takes seconds.

Reads one JSON object a line: argv, cwd, env, log. Prints the child's pid, and, when it has ended, its status.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback

from forked import own_progress_locks


def run(job: dict[str, object]) -> int:
    """Run one script as the main program; return its exit code."""
    argv = job["argv"]
    assert isinstance(argv, list)
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


def main() -> None:
    """Serve jobs until the input ends."""
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import torch  # noqa: F401
    import transformers
    import trl
    from trl.experimental.orpo import ORPOTrainer  # noqa: F401

    for name in ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "RewardTrainer"):
        getattr(trl, name)
    _ = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            own_progress_locks()
            log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(job["cwd"])
            os.environ.update(job["env"])
            code = run(job)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
