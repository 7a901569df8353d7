from collections.abc import Iterator
from fnmatch import fnmatchcase

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import named
from gpuwarden.hub.facts import RepoFact
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-HUB-005", gate="submit", severity=Severity.ERROR, fix="Use one of the files that the repo has.")
def file_exists(facts: SubmitFacts) -> Iterator[Found]:
    """Files that are named inside a repo exist there.

    Why: repos are reorganised; a file name from an old example fails at the download.
    """
    for fact in facts.hub.repos if facts.hub else ():
        wanted = fact.use.file
        if not wanted or wanted.startswith(("http", "hf:")) or fact.use.revision or not fact.repo.exists:
            continue
        names = [f.path for f in fact.repo.files]
        if len(names) == fact.repo.file_count and not any(fnmatchcase(n, wanted) for n in names):
            near = _near(fact, wanted)
            yield Found(f"{fact.where} has no file {wanted}", fix=f"It has {near}." if near else "")


def _near(fact: RepoFact, wanted: str) -> str:
    suffix = wanted.rpartition(".")[2]
    alike = [f.path for f in fact.repo.files if f.path.endswith("." + suffix)]
    return ", ".join(map(named, alike[:4]))
