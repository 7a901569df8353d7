import re
from collections.abc import Iterator

from gpuwarden.core.models import Unknown
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SRC-003",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use the file's raw URL.",
)
def script_url(facts: SubmitFacts) -> Iterator[Found]:
    """A script's URL points to the file itself, not to a web page that shows it.

    Why: the URL in a browser's address bar points to a web page. Downloading it returns HTML, and Python fails only
    when it runs the HTML. If gpuwarden has fetched the URL, the response is checked too.

    Example:
        submit_job(command=["uv", "run", "https://github.com/me/repo/blob/main/train.py"])

    Instead:
        submit_job(command=["uv", "run", "https://raw.githubusercontent.com/me/repo/main/train.py"])

    """
    for word in facts.spec.command:
        if re.match(r"https://github\.com/[^/]+/[^/]+/blob/", word) or re.match(
            r"https://gist\.github\.com/[^/]+/\w+$", word
        ):
            raw = word.replace("github.com", "raw.githubusercontent.com", 1).replace("/blob/", "/", 1)
            yield Found(f"{word} is a web page that shows a file", fix=f"Use {raw}." if "/blob/" in word else "")
        elif re.match(r"https://huggingface\.co/.+/blob/", word):
            yield Found(f"{word} is a web page that shows a file", fix=f"Use {word.replace('/blob/', '/resolve/', 1)}.")
    if isinstance(facts.script_url, Unknown):
        yield Found(facts.script_url.why, fix="Try again.", severity=facts.could_not)
    elif facts.script_url.value:
        yield Found(facts.script_url.value)
