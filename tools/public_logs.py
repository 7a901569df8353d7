"""Check the diagnosis on public logs of healthy runs. The list contains the addresses of the logs, not their text.

    python tools/public_logs.py                      # fetches each file of tests/corpus/logs/public.jsonl
    python tools/public_logs.py --mirror FOLDER      # reads the git repositories FOLDER/OWNER+NAME/repo

Each log was reviewed: it ends with metrics or a finished epoch and contains no failure. The exit code is 1 if the
diagnosis or the search returns an entry for any of the logs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

from gpuwarden.interfaces.results.diagnosing import diagnose_log
from gpuwarden.knowledge import search, shipped

LIST = Path(__file__).resolve().parents[1] / "tests" / "corpus" / "logs" / "public.jsonl"
RAW = "https://raw.githubusercontent.com/{repository}/{commit}/{path}"


def content(row: dict[str, str], mirror: Path | None) -> bytes:
    """Return one log. Raises ValueError if it is not the reviewed version."""
    if mirror is None:
        with urllib.request.urlopen(RAW.format(**row), timeout=60) as reply:  # noqa: S310 - https only
            data: bytes = reply.read()
    else:
        folder = mirror / row["repository"].replace("/", "+") / "repo"
        command = ["git", "-C", str(folder), "show", f"{row['commit']}:{row['path']}"]
        data = subprocess.run(command, check=True, capture_output=True).stdout
    if hashlib.sha256(data).hexdigest() != row["sha256"]:
        raise ValueError(f"{row['repository']}: {row['path']} has changed")
    return data


def main() -> int:
    """Print each log for which a diagnosis or an entry was returned, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mirror", type=Path)
    mirror = parser.parse_args().mirror
    rows = [json.loads(line) for line in LIST.read_text(encoding="utf-8").splitlines()]
    wrong = 0
    for row in rows:
        text = content(row, mirror).decode("utf-8", "replace")
        reply, hits = diagnose_log(text), search(shipped(), text)
        if reply.diagnoses or hits or reply.code != "nothing_failed":
            wrong += 1
            found = [one.id for one in (*reply.diagnoses, *hits)]
            print(f"{row['repository']} {row['path']}: {reply.failure.outcome} {reply.code} {found[:3]}")
    print(f"{len(rows) - wrong} of {len(rows)} healthy public logs get no entry")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
