from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.ecosystem_tables import APT, SYSTEM_TOOLS
from gpuwarden.static_analysis.env_and_shell import Shell, installed


@rule(
    "PF-SYS-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Install it first: apt-get update, then apt-get install -y -qq build-essential cmake (or the needed packages).",
)
def programs_installed(facts: SubmitFacts) -> Iterator[Found]:
    """The script installs the system programs that it starts.

    Why: slim images have neither compilers nor git extensions, so a build fails at its first command. On your own
    machine, this is only a warning, because the programs may be installed there. The same applies if the script starts
    a program only under an unknown condition, or survives the program's failure.

    Example:
        subprocess.run(["cmake", "-B", "build"], check=True)

    Instead:
        subprocess.run(["apt-get", "update"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "build-essential", "cmake"], check=True)
        subprocess.run(["cmake", "-B", "build"], check=True)

    """
    script = facts.script
    if script is None or script.error:
        return
    packages = installed(script.uses.shells, "apt") | installed(script.uses.shells, "conda")
    there = packages | {program for p in packages for program in APT.get(p, ())}
    header = " ".join(script.header.dependencies) if script.header else ""
    unknown = any("?" in package for package in packages) or any(shell.program == "?" for shell in script.uses.shells)
    missing: dict[str, Shell] = {}
    for shell in sorted(script.uses.shells, key=lambda shell: shell.maybe):
        if shell.program in SYSTEM_TOOLS and shell.program not in there and shell.program not in header:
            missing.setdefault(shell.program, shell)
    for program, shell in sorted(missing.items()):
        severity = None if facts.metered and not shell.maybe and not unknown else Severity.WARNING
        yield Found(f"line {shell.line} runs {program}, which the script does not install", severity=severity)
