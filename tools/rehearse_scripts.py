"""Rehearse training scripts, and faults seeded into them that the submit gate does not detect.

    python tools/rehearse_scripts.py [FOLDER] [--unseen | --written] [--only REGEX] [--log FILE] [--most N]

The default scripts are those in `tests/corpus/first_step`; FOLDER is a folder filled by `tools/foreign_scripts.py
fetch`, and `--unseen` selects its held-out third. Each script is rehearsed unchanged; if it passes, it is rehearsed
again with each fault that can be inserted into it and that the gate neither refuses nor warns about. Models, tokenizer
and rows are generated, so no request is sent to the Hub. `--log` records each outcome, and an interrupted run resumes
from the log. `--written` uses the scripts and faults in `tests/corpus/first_step_unseen.jsonl`, fetches the scripts
that FOLDER lacks (with `--from`, from a folder of git directories), and counts a fault as found only if the message
contains the expected words.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS / "kits"))

from first_step_faults import Case, cases, seeds  # noqa: E402
from first_step_kit import SCRIPTS, rehearsed  # noqa: E402
from foreign_kit import Job, Script, fetch, findings, scripts  # noqa: E402
from gpuwarden.core.rules import Severity  # noqa: E402

Row = dict[str, Any]


def main(words: Sequence[str] | None = None) -> int:
    """Rehearse the scripts, and print the table."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("folder", type=Path, nargs="?", default=None)
    ask.add_argument("--unseen", action="store_true")
    ask.add_argument("--written", action="store_true")
    ask.add_argument("--from", dest="mirrors", type=Path, default=None)
    ask.add_argument("--only", default="")
    ask.add_argument("--log", type=Path, default=None)
    ask.add_argument("--most", type=int, default=100, help="maximum number of faults per script")
    asked = ask.parse_args(words)
    done = [json.loads(line) for line in asked.log.read_text().splitlines()] if asked.log and asked.log.exists() else []
    known = {(row["script"], row["kind"]): row for row in done}
    for row in (written if asked.written else rows)(asked, known):
        done.append(row)
        print(row["script"], row["kind"], row["outcome"], row["why"] or row["message"][:100], flush=True)
        if asked.log:
            with asked.log.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(table([row for row in done if re.search(asked.only, row["script"])]))
    return 0


def rows(asked: argparse.Namespace, done: dict[tuple[str, str], Row]) -> Iterator[Row]:
    """Rehearse the scripts and faults that are not in the log, and yield the outcomes."""
    for name, text, args in chosen(asked):
        if (name, "") not in done:
            done[name, ""] = outcome(name, "", text, args)
            yield done[name, ""]
        if done[name, ""]["outcome"] != "passed":
            continue
        before = {(f.rule, f.message) for f in findings(Job(text, args))}
        for kind, changed in list(seeds(text))[: asked.most]:
            reported = [f for f in findings(Job(changed, args)) if (f.rule, f.message) not in before]
            if (name, kind) not in done and not any(f.blocks or f.severity is Severity.WARNING for f in reported):
                yield outcome(name, kind, changed, args)


def written(asked: argparse.Namespace, done: dict[tuple[str, str], Row]) -> Iterator[Row]:
    """Rehearse the written faults that are not in the log, and yield the outcomes."""
    listed = [c for c in cases(TESTS / "corpus/first_step_unseen.jsonl") if re.search(asked.only, f"{c.repo}/{c.path}")]
    lost = list(fetch(asked.folder, asked.mirrors, [Script(c.repo, c.commit, c.path) for c in listed]))
    assert not lost, lost
    for case in listed:
        name, text = f"{case.repo}/{case.path}", (asked.folder / case.repo / case.path).read_text(encoding="utf-8")
        if (name, "") not in done:
            done[name, ""] = outcome(name, "", text, (), case)
            yield done[name, ""]
        before = {(f.rule, f.message) for f in findings(Job(text))}
        for fault in case.faults if done[name, ""]["outcome"] == "passed" else ():
            changed = fault.put_into(text)
            reported = [f for f in findings(Job(changed)) if (f.rule, f.message) not in before]
            if (name, fault.kind) in done:
                continue
            if any(f.blocks or f.severity is Severity.WARNING for f in reported):
                yield {"script": name, "kind": fault.kind, "outcome": "static", "why": reported[0].rule, "message": ""}
                continue
            row = outcome(name, fault.kind, changed, (), case)
            if row["outcome"] == "fault" and not re.search(fault.words, f"{row['message']} {row['text']}"):
                row["outcome"], row["why"] = "other fault", f"expected {fault.words}"
            yield row


def chosen(asked: argparse.Namespace) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the name, text and arguments of the selected scripts."""
    if asked.folder is None:
        found = [(path.stem, path.read_text(encoding="utf-8"), ()) for path in sorted(SCRIPTS.glob("*.py"))]
    else:
        listed = [s for s in scripts() if s.unseen is asked.unseen and (asked.folder / s.repo / s.path).exists()]
        found = [(s.name, (asked.folder / s.repo / s.path).read_text(encoding="utf-8"), s.args) for s in listed]
    yield from (row for row in found if re.search(asked.only, row[0]))


def outcome(name: str, kind: str, text: str, args: tuple[str, ...], case: Case | None = None) -> Row:
    """Rehearse the text of one script, with the files that belong to a case."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = {path: Path(folder, path) for path, _ in case.files} if case else {}
        for path, content in case.files if case else ():
            inputs[path].write_text(content, encoding="utf-8")
        found = rehearsed(text, args, inputs=inputs)
    kept = found.model_dump(
        include={"outcome", "certain", "why", "message", "line", "text", "seconds", "cpu_s", "peak_mb"}
    )
    return {"script": name, "kind": kind, **kept}


def table(done: list[Row]) -> str:
    """Return the outcomes of the scripts and of the faults, in Markdown."""
    seen = [row for row in done if row["outcome"] != "static"]
    bases, faults = ([row for row in seen if bool(row["kind"]) is seeded] for seeded in (False, True))
    ended = Counter(row["outcome"] for row in bases)
    lines = [f"{len(bases)} unchanged scripts: {', '.join(f'{n} {what}' for what, n in ended.most_common())}", ""]
    lines += ["| fault | seeded | found | another fault found | inconclusive | passed |", "|---|--:|--:|--:|--:|--:|"]
    for kind in [*dict.fromkeys(row["kind"] for row in faults), "all"]:
        some = Counter(row["outcome"] for row in faults if kind in (row["kind"], "all"))
        counts = [some[what] for what in ("fault", "other fault", "stopped", "passed")]
        lines.append(f"| {kind} | {some.total()} | {' | '.join(map(str, counts))} |")
    if faults:
        seconds, cpu = sorted(r["seconds"] for r in faults), sorted(r["cpu_s"] for r in faults)
        over = sum(s > 60 for s in seconds)
        lines += [
            "",
            (
                f"median {median(seconds):.0f} s, maximum {seconds[-1]:.0f} s, {over} over 60 s; "
                f"processor time: median {median(cpu):.0f} s, maximum {cpu[-1]:.0f} s"
            ),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
