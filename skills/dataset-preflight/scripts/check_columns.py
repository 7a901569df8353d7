#!/usr/bin/env python3
# ruff: noqa: D103, PTH123 (stands alone, Python 3.8)
"""Check the rows of a local JSON Lines, JSON or CSV file against the columns that a TRL trainer reads.

    python3 check_columns.py FILE --method sft|dpo|reward|kto|grpo [--rows 1000]

Needs only Python 3.8 or newer. For a dataset on the Hub, use hub_repo_details, which needs no download. Exit code 0:
the rows fit; 1: they don't fit, and the output lists the problems; 2: the file can't be read.
"""

import argparse
import csv
import itertools
import json
import sys

FORMS = {
    "sft": [{"messages"}, {"text"}, {"prompt", "completion"}, {"input_ids"}],
    "dpo": [{"prompt", "chosen", "rejected"}, {"chosen", "rejected"}],
    "reward": [{"prompt", "chosen", "rejected"}, {"chosen", "rejected"}],
    "kto": [{"prompt", "completion", "label"}],
    "grpo": [{"prompt"}],
}
COMMON_NAMES = {
    "instruction": "prompt", "question": "prompt", "input": "prompt", "query": "prompt", "output": "completion",
    "response": "completion", "answer": "completion", "chosen_response": "chosen", "rejected_response": "rejected",
    "conversations": "messages",
}  # fmt: skip
ROLES = {"system", "user", "assistant", "tool"}
TEXTS = {"text", "messages", "prompt", "completion", "chosen", "rejected"}


def rows_of(path):
    """Yield (line, row) from a file; its extension selects the format."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        if path.endswith((".csv", ".tsv")):
            reader = csv.DictReader(file, delimiter="\t" if path.endswith(".tsv") else ",")
            for row in reader:
                yield reader.line_num, row
        elif path.endswith(".json"):
            data = json.load(file)
            if not isinstance(data, list):
                raise ValueError("a .json file must contain a list of rows")
            yield from enumerate(data, 1)
        else:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, json.loads(text)


def talk_fault(name, value):
    """Return the problem with a conversation, or None."""
    for turn in value:
        if not isinstance(turn, dict) or not {"role", "content"} <= set(turn):
            return f"{name}: a message needs role and content"
        if turn["role"] not in ROLES:
            return "{}: role {!r} is not one of {}".format(name, turn["role"], ", ".join(sorted(ROLES)))
    if not value:
        return f"{name}: the conversation is empty"
    if name == "prompt" and value[-1]["role"] != "user":
        return "prompt: the last turn is {}, but must be user".format(value[-1]["role"])
    if name == "messages" and not any(turn["role"] == "assistant" for turn in value):
        return "messages: no assistant turn, so there is nothing to learn"
    return None


def row_faults(row, form, method):
    """Yield the problems with one row."""
    for name in sorted(form & TEXTS):
        value = row.get(name)
        if isinstance(value, list) and name != "text":
            fault = talk_fault(name, value)
            if fault:
                yield fault
        elif not isinstance(value, str) or not value.strip():
            yield f"{name}: empty or not text"
    if (
        method == "kto"
        and not isinstance(row.get("label"), bool)
        and str(row.get("label")).lower() not in {"true", "false"}
    ):
        yield "label: {!r} is not true or false".format(row.get("label"))
    if {"chosen", "rejected"} <= form and row.get("chosen") == row.get("rejected"):
        yield "chosen and rejected are equal"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--method", required=True, choices=sorted(FORMS))
    parser.add_argument("--rows", type=int, default=1000, help="maximum number of rows to check (default 1000)")
    asked = parser.parse_args()
    faults = {}
    columns = None
    count = 0
    try:
        for line, row in itertools.islice(rows_of(asked.file), asked.rows):
            count += 1
            if not isinstance(row, dict):
                raise ValueError(f"line {line}: a row must be an object")
            if columns is None:
                columns = set(row)
                form = next((form for form in FORMS[asked.method] if form <= columns), None)
                if form is None:
                    return unfit(asked.method, columns)
            elif set(row) != columns:
                faults.setdefault("its columns differ from those of the first row", []).append(line or count)
                continue
            for fault in row_faults(row, form, asked.method):
                faults.setdefault(fault, []).append(line or count)
    except (OSError, ValueError, csv.Error) as error:
        print(f"CAN'T READ {asked.file}: {error}")
        return 2
    if not count:
        print(f"NO ROWS in {asked.file}")
        return 1
    for fault, lines in faults.items():
        print(f"{len(lines)} rows, first at {lines[0]}: {fault}")
    print("{}: {} rows checked, columns {}".format("FAULTS" if faults else "FITS", count, ", ".join(sorted(columns))))
    return 1 if faults else 0


def unfit(method, columns):
    wanted = " or ".join("+".join(sorted(form)) for form in FORMS[method])
    print("COLUMNS DON'T FIT {}: found {}; wanted {}".format(method, ", ".join(sorted(columns)), wanted))
    for name in sorted(columns & set(COMMON_NAMES)):
        print(f"perhaps rename {name} to {COMMON_NAMES[name]}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
