"""Find a job's requirements for its machine, and the local files that the job names but does not send."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import InputFile, JobSpec
from gpuwarden.core.readiness import Needs
from gpuwarden.lifecycle.submission.inputs import real_path
from gpuwarden.static_analysis.command_files import is_python, named_files, started_file
from gpuwarden.static_analysis.script import ScriptFacts, with_grammar

_TOLD: Final = frozenset({"PATH", "HOME", "LD_LIBRARY_PATH"})


def needs_of_job(
    spec: JobSpec, script: ScriptFacts | None, files: Sequence[InputFile], local: Iterable[tuple[str, str]]
) -> Needs:
    """Return a job's requirements for its machine. `local` contains the modules that another rule reports.

    Only environment variables that determine which programs and modules are found are included, because other users of
    a shared machine may be able to read the requirements.
    """
    env = {name: value for name, value in spec.env.items() if name in _TOLD or name.startswith("PYTHON")}
    gpu = bool(spec.gpu) and not str(spec.gpu).lower().startswith("cpu")
    image = spec.options.get("image")
    image = image if isinstance(image, str) else ""
    if spec.script is not None:
        header = with_grammar(script.header, script.grammar) if script is not None else None
        asked = (header.requires_python or "", header.dependencies) if header else ("", ())
        return Needs(*asked, gpu=gpu, image=image, env=env)
    program = spec.command[0]
    absolute = [started_file(spec.command), *named_files(spec.command[1:])]
    modules: set[str] = set()
    if is_python(program) and script is not None and not script.error:
        own = {f.path.rpartition("/")[2].removesuffix(".py") for f in files} | {f.path.split("/")[0] for f in files}
        names = {name.partition(".")[0] for name, _ in script.uses.imports}
        modules = names - sys.stdlib_module_names - own - {name for name, _ in local}
    return Needs(
        gpu=gpu,
        image=image,
        program=program if "/" not in program or program.startswith("/") else "",
        modules=tuple(sorted(modules)),
        files=tuple(dict.fromkeys(path for path in absolute if path.startswith("/"))),
        env=env,
    )


def local_files(root: Path, spec: JobSpec, files: Sequence[InputFile]) -> tuple[str, ...]:
    """Return the files in the working directory that a job's command names and that are neither inputs nor outputs."""
    words = (*spec.command[1:], *spec.args)
    named = dict.fromkeys([*filter(None, [started_file(spec.command)]), *named_files(words)])
    there = {file.path for file in files}
    found = []
    for name in (name.removeprefix("./") for name in named if not name.startswith("/")):
        if name in there or any(name == out or name.startswith(f"{out}/") for out in spec.outputs):
            continue
        try:
            if real_path(root, name).is_file():
                found.append(name)
        except BadRequest:
            continue
    return tuple(found)
