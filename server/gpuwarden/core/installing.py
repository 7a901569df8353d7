"""The command that installs an optional package for gpuwarden."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec


def install_command(package: str, extra: str = "", of: str = "gpuwarden") -> str:
    """Return the command that installs a package or, if the distribution `of` has the extra, the extra's requirements.

    The command does not name the extra, because gpuwarden is not on a package index. It names gpuwarden's interpreter,
    because gpuwarden may run in the environment of a tool or plugin. An environment created by uv has no pip.
    """
    try:
        listed = requires(of) or []
    except PackageNotFoundError:
        listed = []
    marked = re.compile(rf"\bextra\s*==\s*['\"]{'[-_]'.join(map(re.escape, re.split('[-_]', extra)))}['\"]")
    wanted = [text.partition(";")[0].strip() for text in listed if marked.search(text)]
    python = sys.executable
    tool = [python, "-m", "pip", "install"] if find_spec("pip") else ["uv", "pip", "install", "--python", python]
    return shlex.join([*tool, *(wanted or [package])])
