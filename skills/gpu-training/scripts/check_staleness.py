#!/usr/bin/env python3
# ruff: noqa: D103, DTZ011, ICN001, PTH118, PTH123 (stands alone, Python 3.8)
"""List facts that were verified more than N months ago, those about money and teardown first.

    python3 check_staleness.py FOLDER [FOLDER...] [--months 6] [--today YYYY-MM-DD]

Reads every `verified: YYYY-MM` stamp in Markdown files. The list shows which facts to check again, not which are wrong.
Needs only Python 3.8 or newer; `gpuwarden knowledge check` does more. Exit code 0: no stamp is old; 1: some are old;
2: no stamp was found.
"""

import argparse
import datetime
import os
import re
import sys

STAMP = re.compile(r"^\s*(?:- )?(?:\w+: \{.*)?verified:? *['\"]?(20\d\d)-(0[1-9]|1[0-2])", re.IGNORECASE)
MONEY = re.compile(r"billing|teardown|meter|terminate|destroy|bills", re.IGNORECASE)
AROUND = 25


def stamps(path):
    """Yield (line, year, month, urgent) for each stamp; urgent if the block around the stamp is about money."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    for number, text in enumerate(lines):
        found = STAMP.search(text)
        if found:
            start = number
            while start > 0 and number - start < AROUND and not lines[start - 1].startswith(("## ", "```", "---")):
                start -= 1
            block = "\n".join(lines[start : number + 1])
            yield number + 1, int(found.group(1)), int(found.group(2)), bool(MONEY.search(block))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--months", type=int, default=6)
    parser.add_argument("--today", type=datetime.date.fromisoformat, default=datetime.date.today())
    asked = parser.parse_args()
    old, seen = [], 0
    for folder in asked.folders:
        for base, _, names in sorted(os.walk(folder)):
            for name in sorted(n for n in names if n.endswith(".md")):
                path = os.path.join(base, name)
                for line, year, month, urgent in stamps(path):
                    seen += 1
                    age = (asked.today.year - year) * 12 + asked.today.month - month
                    if age > asked.months:
                        old.append((not urgent, -age, path, line))
    for calm, age, path, line in sorted(old):
        print("{}{}:{}: verified {} months ago".format("" if calm else "MONEY ", path, line, -age))
    print(f"{len(old)} of {seen} stamps are older than {asked.months} months")
    return 2 if not seen else 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
