"""Run the submit gate over public training scripts from other projects, and over faults seeded into them.

    python tools/foreign_scripts.py fetch FOLDER [--from GIT_DIRECTORIES]
    python tools/foreign_scripts.py check FOLDER [--unseen | --home] [--verbose]
    python tools/foreign_scripts.py seed FOLDER [--unseen | --home] [--verbose]

`fetch` downloads the scripts that `tests/corpus/foreign_scripts.jsonl` lists by repository, commit and path into a
folder; they are never committed. `check` submits each script on two platforms and compares the refusals with manual
labels; the exit code is 1 if a refusal has a reason that is not in the labels, or after an internal error. `seed`
inserts one fault of each kind into scripts, and prints for each kind the share that is refused, and the share that is
refused or warned about.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS / "kits"))

from foreign_faults import KINDS, Seed, controls, seeds  # noqa: E402
from foreign_kit import PLATFORMS, Script, blocking, fetch, findings, job_of, scripts  # noqa: E402
from gpuwarden.core.rules import Finding, Severity  # noqa: E402


def main(words: Sequence[str] | None = None) -> int:
    """Run one of the three commands."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("what", choices=("fetch", "check", "seed"))
    ask.add_argument("folder", type=Path, help="folder of the scripts")
    ask.add_argument("--from", dest="mirrors", type=Path, default=None, help="folder of git directories, owner+name")
    ask.add_argument("--home", action="store_true", help="only the scripts that the gate was developed on")
    ask.add_argument(
        "--unseen", action="store_true", help="only the held-out scripts, which were not used to develop the gate"
    )
    ask.add_argument("--verbose", action="store_true", help="print each finding that is counted")
    asked = ask.parse_args(words)
    if asked.what == "fetch":
        lost = list(fetch(asked.folder, asked.mirrors))
        print("\n".join([*lost, f"{len(scripts()) - len(lost)} scripts are in {asked.folder}"]))
        return int(bool(lost))
    left_out = {True} if asked.home else {False} if asked.unseen else set()
    chosen = [s for s in scripts() if s.unseen not in left_out and (asked.folder / s.repo / s.path).exists()]
    if asked.what == "check":
        return check(chosen, asked.folder, verbose=asked.verbose)
    return seed(chosen, asked.folder, verbose=asked.verbose)


def check(chosen: list[Script], folder: Path, *, verbose: bool) -> int:
    """Submit each script on each platform; print the refusals whose reason is not in the labels."""
    wrong = errors = right = passed = 0
    seconds: list[float] = []
    for script in chosen:
        for platform in PLATFORMS:
            start = time.process_time()
            found = findings(job_of(script, folder, platform))
            seconds.append(time.process_time() - start)
            refusals = blocking(found)
            broken = [f for f in refusals if "internal error" in f.message.lower()]
            strange = [f for f in refusals if f not in broken and not script.right(f, platform)]
            errors += len(broken)
            wrong += bool(strange)
            right += bool(refusals) and not strange and not broken
            passed += not refusals
            for f in (*broken, *strange, *(refusals if verbose else ())):
                sign = "ERROR" if f in broken else "WRONG" if f in strange else "right"
                print(f"{sign} {script.name} on {platform}: {f.rule} {f.message[:200]}")
    median = sorted(seconds)[len(seconds) // 2] if seconds else 0.0
    print(
        f"{len(chosen)} scripts on {len(PLATFORMS)} platforms: {passed} passed, {right} refused for the labelled "
        f"reasons, {wrong} for other reasons, {errors} internal errors; median CPU time {median:.2f} s"
    )
    return int(bool(wrong or errors))


def seed(chosen: list[Script], folder: Path, *, verbose: bool) -> int:
    """Insert faults into scripts; for each kind, print how many are refused, and how many are refused or warned
    about.
    """
    before: dict[tuple[str, str], list[Finding]] = {}
    refused: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    number: Counter[str] = Counter()

    def fresh(fault: Seed) -> list[Finding]:
        """Return the findings that are new compared with the original script."""
        key = fault.script.name, fault.job.platform
        if key not in before:
            before[key] = findings(job_of(fault.script, folder, fault.job.platform))
        old = {(f.rule, f.message) for f in before[key]}
        return [f for f in findings(fault.job) if (f.rule, f.message) not in old]

    for fault in (*seeds(chosen, folder), *controls(chosen, folder)):
        new = fresh(fault)
        number[fault.kind] += 1
        refused[fault.kind] += bool(blocking(new))
        hits = [f for f in new if f.blocks or f.severity is Severity.WARNING]
        seen[fault.kind] += bool(hits)
        if verbose and (not blocking(new)) is not (fault.kind == "control"):
            print(f"{fault.kind}: {fault.script.name}: {fault.what}: {[f'{f.rule} {f.message[:90]}' for f in hits]}")
    print("| kind | seeded | refused | refused or warned |\n|---|--:|--:|--:|")
    for kind in (*KINDS, "control"):
        print(f"| {kind} | {number[kind]} | {refused[kind]} | {seen[kind]} |")
    faults, hits, told = (sum(c[k] for k in KINDS) for c in (number, refused, seen))
    print(f"{hits} of {faults} refused, {told} refused or warned; {refused['control']} of {number['control']} controls")
    return int(refused["control"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
