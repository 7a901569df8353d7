from collections.abc import Iterator

from gpuwarden.core.models import Unknown
from gpuwarden.core.readiness import Uv
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.env_and_shell import installed

_NO_NETWORK = "Install them for gpuwarden's Python, or ask the user to set network = true under [local] in the policy."
_NO_UV_THERE = "Choose a machine or an image that meets the header's requirements, or change the header."
_NO_UV = (
    "Install uv there, so that it can install the header's packages, or install them for that Python.",
    "The user may allow gpuwarden to copy uv to SSH machines: bring_uv = true under [hosts] in the policy.",
)


@rule("PF-PLACE-003", gate="submit", severity=Severity.ERROR, fix=_NO_UV)
def packages_there(facts: SubmitFacts) -> Iterator[Found]:
    """The machine has the Python version and the packages that the program requires, or uv can install them.

    Why: without uv, a script would run with the machine's own packages and fail at its first import. An existing
    machine is checked before anything is sent: the Python version and the packages that a script requires, the presence
    of uv, and whether a command's own Python can find its imports. For a cluster, the check covers the login node,
    because its Python or uv starts the script; for Ray, the Python of the nodes; for Kubernetes, the name of the image.
    If only the login node is known to lack a package that a command needs, the finding is a warning.

    Example:
        # dependencies = ["torch>=2.8"]
        submit_job(platform="ssh/box", script=train)  # neither torch nor uv is there

    Instead:
        submit_job(platform="ssh/box", script=train)  # uv is there

    """
    if isinstance(facts.readiness, Unknown):
        if not any(f.blocks for f in facts.looked):
            yield Found(f"the machine could not be checked: {facts.readiness.why}", "Try again.", facts.could_not)
        return
    if facts.readiness is None:
        return
    there = facts.readiness.value
    asked, where = ", ".join(there.unmet), there.where or "there"
    if there.no_python:
        yield Found(f"the runner needs Python, but none is installed {where}", "Choose an image that has `python3`.")
    elif there.trouble:
        yield Found(there.trouble, "Fix the `# /// script` block.")
    elif not there.starts_header and there.uv is Uv.MISSING:
        message = f"the header requires {asked}, which Python {there.python} {where} does not have"
        yield Found(f"{message}, and uv is not installed {where}")
    elif not there.starts_header and there.uv is Uv.UNUSED:
        python = f"Python {there.python} {where}" if there.python else f"the environment {where}"
        message = f"the header requires {asked}, which {python} does not have; jobs there are not started with uv"
        own = facts.script is not None and installed(facts.script.uses.shells, "pip")
        yield Found(message, _NO_UV_THERE, Severity.WARNING if own else None)  # the script installs packages itself
    elif not there.starts_header:
        yield Found(
            f"the header requires {asked}, and a job there has no network access to install missing packages",
            _NO_NETWORK,
        )
    elif there.unmet and there.uv is Uv.BROUGHT:
        yield Found(f"gpuwarden copies uv to the machine to install {asked}", "Nothing to do.", Severity.INFO)
    if there.no_modules:
        names, program = ", ".join(there.no_modules), facts.spec.command[0]
        cure = "Install them there, or submit the program as a script, so that uv installs its packages."
        yield Found(f"{program} {where} can't import {names}", cure, Severity.WARNING if there.where else None)
