from collections.abc import Iterator

from gpuwarden.core.models import Unknown
from gpuwarden.core.readiness import Uv
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.env_and_shell import installed

_NO_NETWORK = "Install them next to gpuwarden, or let a person set network = true under [local] in the policy."
_NO_UV_THERE = "Choose a place or an image that has it, or change the header."
_NO_UV = (
    "Install uv there, which brings what a header asks for, or install these packages for that Python.",
    "A person may let gpuwarden bring uv to machines of SSH: bring_uv = true under [hosts] in the policy.",
)


@rule("PF-PLACE-003", gate="submit", severity=Severity.ERROR, fix=_NO_UV)
def packages_there(facts: SubmitFacts) -> Iterator[Found]:
    """The place has the Python and the packages that the program needs, or uv brings them.

    Why: where uv is missing, a script would run with whatever packages the machine has, and end at its first import.
    A place that exists already is asked before anything is sent: which Python a script gets there, what that Python
    has, whether uv is there, and whether a command's own Python finds its imports. Of a cluster that is its login node,
    whose Python or uv starts the script; of Ray the Python of its nodes, of Kubernetes what the name of the image says.
    What only the login node lacks for a command is a warning.

    Example:
        # dependencies = ["torch>=2.8"]
        submit_job(platform="ssh/box", script=train)  # neither torch nor uv is there

    Instead:
        submit_job(platform="ssh/box", script=train)  # uv is there

    """
    if isinstance(facts.readiness, Unknown):
        if not any(f.blocks for f in facts.looked):
            yield Found(f"what the place has is not known: {facts.readiness.why}", "Try again.", facts.could_not)
        return
    if facts.readiness is None:
        return
    there = facts.readiness.value
    asked, where = ", ".join(there.unmet), there.where or "there"
    if there.no_python:
        yield Found(f"the runner needs a Python, and none is {where}", "Choose an image that has `python3`.")
    elif there.trouble:
        yield Found(there.trouble, "Fix the `# /// script` block.")
    elif not there.starts_header and there.uv is Uv.MISSING:
        message = f"the header asks for {asked}, which Python {there.python} {where} does not have"
        yield Found(f"{message}, and uv is not {where}")
    elif not there.starts_header and there.uv is Uv.UNUSED:
        python = f"Python {there.python} {where}" if there.python else f"what is {where}"
        message = f"the header asks for {asked}, and {python} does not have it; uv starts no job there"
        own = facts.script is not None and installed(facts.script.uses.shells, "pip")
        yield Found(message, _NO_UV_THERE, Severity.WARNING if own else None)  # a script that installs some itself
    elif not there.starts_header:
        yield Found(f"the header asks for {asked}, and a job there has no network for uv to bring it", _NO_NETWORK)
    elif there.unmet and there.uv is Uv.BROUGHT:
        yield Found(f"uv is brought to the place for {asked}", "Nothing to do.", Severity.INFO)
    if there.no_modules:
        names, program = ", ".join(there.no_modules), facts.spec.command[0]
        cure = "Install them there, or submit the program as a script, whose header uv satisfies."
        yield Found(f"{program} {where} can't import {names}", cure, Severity.WARNING if there.where else None)
