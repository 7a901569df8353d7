"""Measure how the code reads: its vocabulary, its one-use helpers, its smallest modules and its import cycles.

    python tools/readability.py [--check] [FOLDER...]

The limits are the highest values found among nine well-read projects (anyio, attrs, click, httpx, huggingface_hub,
packaging, rich, starlette, submitit). `--check` exits with 1 where a limit is exceeded.
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
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("server/gpuwarden", "evals")
PER_10_000_WORDS = {
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


def main() -> int:
    """Print the measures of each folder; return 1 under `--check` where one is over its limit."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ask.add_argument("--check", action="store_true")
    ask.add_argument("--list", choices=[*PER_10_000_WORDS, "one-use", "small", "verbs"], help="list the places instead")
    ask.add_argument("folders", nargs="*", default=FOLDERS)
    args = ask.parse_args()
    files = [path for folder in args.folders for path in sorted((ROOT / folder).rglob("*.py"))]
    if args.list:
        print(*places(files, args.list), sep="\n")
        return 0
    over = False
    for name, value, limit in measures(files):
        bad = value > limit
        over |= bad
        print(f"{name:32} {value:8.3f}   at most {limit:6.3f}{'   OVER' if bad else ''}")
    return int(over and args.check)


def measures(files: list[Path]) -> Iterator[tuple[str, float, float]]:
    """Yield name, value and limit of every measure."""
    texts = [piece for path in files for _, piece in prose(path)]
    words = sum(len(_WORD.findall(text)) for text in texts)
    for name, (pattern, limit) in PER_10_000_WORDS.items():
        found = sum(len(re.findall(pattern, text, re.IGNORECASE)) for text in texts)
        yield f"{name}, per 10,000 words", found * 10_000 / max(1, words), limit
    docs = [doc for path in files for _, doc in docstrings(path)]
    yield "docstrings without a verb", share(sum(bool(NOT_A_VERB.match(d)) for d in docs), docs), NOT_A_VERB_LIMIT
    functions = [row for path in files for row in helpers(path)]
    yield "helpers used once", share(sum(once for _, _, once in functions), functions), ONE_USE_LIMIT
    lengths = [path.read_text("utf-8").count("\n") for path in files if path.name != "__init__.py"]
    yield f"modules under {SMALL_LINES} lines", share(sum(n < SMALL_LINES for n in lengths), lengths), SMALL_LIMIT
    print(f"{words:,} words of prose, {len(functions):,} functions, {len(lengths)} modules of a median of "
          f"{statistics.median(lengths):.0f} lines")  # fmt: skip


def share(count: int, whole: list[object] | list[str] | list[int]) -> float:
    """Return the part of a list that `count` is, 0 for an empty list."""
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
    """Yield line and text of every comment and of every string that has more than one word."""
    source = path.read_text("utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of functions, classes and modules."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def helpers(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line, name and "is a private helper that its module uses once" of every function."""
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
