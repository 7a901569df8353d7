"""Start a command in a sandbox, without the runner."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from gpuwarden.remote.runner.command import packed


def start(
    prefix: Sequence[str], command: Sequence[str], env: Mapping[str, str], **options: Any
) -> subprocess.Popen[Any]:
    """Start `command` in a sandbox. `prefix` is the sandbox's command line; `env` is passed only to `command`."""
    variables = packed(env)
    given, feed = os.pipe()
    with open(os.devnull, "wb") as report:
        try:
            process = subprocess.Popen(
                [*prefix, str(given), str(report.fileno()), *command], env={}, cwd="/", stdin=subprocess.DEVNULL,
                pass_fds=(given, report.fileno()), start_new_session=True, **options,
            )  # fmt: skip
        except BaseException:
            os.close(feed)
            raise
        finally:
            os.close(given)
    with contextlib.suppress(BrokenPipeError), os.fdopen(feed, "wb") as pipe:
        pipe.write(variables)
    return process
