"""Measure how readable the code is: its vocabulary, its one-use helpers, its smallest modules and its import cycles.

    python tools/readability.py [--check] [FOLDER...]
    python tools/readability.py --markdown [--check] [FILE or FOLDER...]

With `--markdown`, only the vocabulary of pages is counted: the text outside code, and the sentences in the YAML of
front matter and entries. Quotations from logs and users (symptom, signatures, examples, aliases) are not counted.

The limits are the highest values found among nine well-read projects (anyio, attrs, click, httpx, huggingface_hub,
packaging, rich, starlette, submitit). `--check` exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("server/gpuwarden", "evals")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md", "docs", "skills", "profiles", "references")
GENERATED = "references/rules.md"
NOT_OURS = {"symptom", "signatures", "examples", "aliases", "source", "sources", "scope", "see", "signs", "description"}
PER_10_000_WORDS = {
    "what, as a noun": (r"\b[Ww]hat(?:ever)?\b(?! (?:is|are|was|were|does|do|did) [^.?]*\?)", 15.0),
    "where, for if": (r"\b[Ww]here (?:it|that|they|there|one|the|an?|no|none|nothing|nobody|its|this)\b", 6.0),
    "says, said": (r"\b(?:says?|said|saying)\b", 2.5),
    "a person": (r"\b(?:a|the) persons?\b", 0.0),
    "nobody, somebody": (r"\b(?:nobody|somebody|whoever|anybody|everybody)\b", 0.1),
    "is seen": (r"\b(?:is|are|was|were|be|been) seen\b", 0.2),
    "is no X": (r"\bis no [a-z]+", 5.9),
    "tell, told": (r"\b(?:tells?|told|telling)\b", 3.3),
    "lies": (r"\b(?:lies|lie|lying)\b", 0.2),
    "stand(s)": (r"\bstands?\b", 0.5),
    "hold(s)": (r"\bholds?\b", 9.7),
    "anew": (r"\banew\b", 0.0),
    "of ours, of its own": (r"\bof (?:ours|its own|their own|theirs)\b", 1.6),
}
NOT_A_VERB = re.compile(r"(?:What|Whether|How|Who)\b")
NOT_A_VERB_LIMIT = 0.03
ONE_USE_LIMIT = 0.12
SMALL_LINES = 30
SMALL_LIMIT = 0.08
_WORD = re.compile(r"[A-Za-z']+")
_YAML = re.compile(r"(?s)\A---\n(.*?)^---$|^```yaml gotcha\n(.*?)^```$", re.MULTILINE)
_NOT_PROSE = re.compile(r"(?s)^ *```.*?^ *```$|<!-- generated:[\w-]+ -->.*?<!-- /generated -->|`[^`\n]+`", re.MULTILINE)


def main() -> int:
    """Print the measures of each folder; with `--check`, return 1 if one exceeds its limit."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ask.add_argument("--check", action="store_true")
    ask.add_argument("--list", choices=[*PER_10_000_WORDS, "one-use", "small", "verbs"], help="list the places instead")
    ask.add_argument("--markdown", action="store_true", help="count the vocabulary of pages")
    ask.add_argument("folders", nargs="*")
    args = ask.parse_args()
    ending = ".md" if args.markdown else ".py"
    files = list(chosen(args.folders or (PAGES if args.markdown else FOLDERS), ending))
    if args.list:
        print(*places(files, args.list), sep="\n")
        return 0
    over = False
    for name, value, limit in (vocabulary if args.markdown else measures)(files):
        bad = value > limit
        over |= bad
        print(f"{name:32} {value:8.3f}   at most {limit:6.3f}{'   OVER' if bad else ''}")
    return int(over and args.check)


def chosen(names: Iterable[str], ending: str) -> Iterator[Path]:
    """Yield the files with this extension among the given files and folders."""
    for name in names:
        path = ROOT / name
        found = [path] if path.is_file() else sorted(path.rglob(f"*{ending}"))
        yield from (file for file in found if file != ROOT / GENERATED)


def vocabulary(files: list[Path]) -> Iterator[tuple[str, float, float]]:
    """Yield the name, value and limit of every phrase that is counted."""
    texts = [piece for path in files for _, piece in prose(path)]
    words = sum(len(_WORD.findall(text)) for text in texts)
    for name, (pattern, limit) in PER_10_000_WORDS.items():
        found = sum(len(re.findall(pattern, text, re.IGNORECASE)) for text in texts)
        yield f"{name}, per 10,000 words", found * 10_000 / max(1, words), limit
    print(f"{words:,} words of prose")


def measures(files: list[Path]) -> Iterator[tuple[str, float, float]]:
    """Yield the name, value and limit of every measure of code."""
    yield from vocabulary(files)
    docs = [doc for path in files for _, doc in docstrings(path)]
    yield "docstrings without a verb", share(sum(bool(NOT_A_VERB.match(d)) for d in docs), docs), NOT_A_VERB_LIMIT
    functions = [row for path in files for row in helpers(path)]
    yield "helpers used once", share(sum(once for _, _, once in functions), functions), ONE_USE_LIMIT
    lengths = [path.read_text("utf-8").count("\n") for path in files if path.name != "__init__.py"]
    yield f"modules under {SMALL_LINES} lines", share(sum(n < SMALL_LINES for n in lengths), lengths), SMALL_LIMIT
    print(f"{len(functions):,} functions, {len(lengths)} modules with a median of "
          f"{statistics.median(lengths):.0f} lines")  # fmt: skip


def share(count: int, whole: list[object] | list[str] | list[int]) -> float:
    """Return `count` divided by the length of a list, or 0 for an empty list."""
    return count / len(whole) if whole else 0.0


def places(files: list[Path], name: str) -> Iterator[str]:
    """Yield `path:line text` for every place that a measure counts."""
    for path in files:
        where = path.relative_to(ROOT)
        if name == "one-use":
            yield from (f"{where}:{line} {what}" for line, what, once in helpers(path) if once)
        elif name == "verbs":
            yield from (f"{where}:{n} {d.splitlines()[0]}" for n, d in docstrings(path) if NOT_A_VERB.match(d))
        elif name == "small":
            if path.name != "__init__.py" and path.read_text("utf-8").count("\n") < SMALL_LINES:
                yield str(where)
        else:
            pattern = re.compile(PER_10_000_WORDS[name][0], re.IGNORECASE)
            for line, text in prose(path):
                yield from (f"{where}:{line} ...{_around(text, m)}..." for m in pattern.finditer(text))


def _around(text: str, match: re.Match[str]) -> str:
    return " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each comment and each string of more than one word, or of each sentence on a page."""
    source = path.read_text("utf-8")
    if path.suffix == ".md":
        yield from page_prose(source)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value


def page_prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of a page's sentences."""
    for block in _YAML.finditer(source):
        first = source.count("\n", 0, block.start())
        lines = block[0].split("\n")
        for text in sentences(yaml.safe_load(block[1] or block[2])):
            near = next((n for n, line in enumerate(lines, 1) if text[:25] in line), 1)
            yield first + near, _NOT_PROSE.sub("", text)
    for pattern in (_YAML, _NOT_PROSE):
        source = pattern.sub(lambda block: "\n" * block[0].count("\n"), source)
    for paragraph in re.finditer(r"\S.*?(?=\n\s*\n|\Z)", source, re.DOTALL):
        yield source.count("\n", 0, paragraph.start()) + 1, " ".join(paragraph[0].split())


def sentences(value: object) -> Iterator[str]:
    """Yield the strings in YAML data that are not quotations."""
    if isinstance(value, str) and " " in value:
        yield " ".join(value.split())
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in NOT_OURS:
                yield from sentences(item)
    elif isinstance(value, list):
        for item in value:
            yield from sentences(item)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of the docstrings of functions, classes and modules."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def helpers(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and name of every function, and whether it is a private helper that its module uses once."""
    tree = ast.parse(path.read_text("utf-8"))
    uses = Counter(
        n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute)
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            private = node.name.startswith("_") and not node.name.startswith("__") and not node.decorator_list
            yield node.lineno, node.name, private and uses[node.name] == 1


if __name__ == "__main__":
    sys.exit(main())
