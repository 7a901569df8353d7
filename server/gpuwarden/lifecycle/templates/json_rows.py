"""Read rows from JSON documents of any size. Lists and COCO annotations are read value by value.

COCO's `instances_train2017.json` is 450 MB; as Python objects, it would take gigabytes of memory. With the boxes in
arrays, reading a file of that size and shape took 75 MB and 8 seconds (measured in November 2026 on one CPU core).
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.sanitize import line

Row = dict[str, Any]
MAX_WHOLE: Final = 64 << 20
"""Maximum size in bytes of a JSON document that is neither a list nor COCO. Parsing it takes at least 30 times as much
memory.
"""
MAX_LINE: Final = 16 << 20
"""Maximum size in bytes of one row, or of one value in a document that is read value by value."""
CHUNK: Final = 1 << 20
COCO: Final = frozenset({"images", "annotations", "categories"})
_SIDES: Final = 4
_BEHIND: Final = frozenset(", ]} \t\n\r")
_SPACE: Final = re.compile(r"[ \t\n\r]*")


class Values:
    """Reads the values in JSON text. Only a window of the text is kept in memory."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.text, self.at = file, "", 0
        self.decoder = json.JSONDecoder()
        self.named: set[str] = set()

    def peek(self) -> str:
        """Return the next non-whitespace character; an empty string at the end."""
        while True:
            found = _SPACE.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            self.text, self.at = self.file.read(CHUNK), 0
            if not self.text:
                return ""

    def take(self) -> str:
        """Consume and return the next non-whitespace character."""
        char = self.peek()
        self.at += 1
        return char

    def value(self) -> Any:
        """Return the next value. Raises ValueError if it is missing or too long."""
        self.peek()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except (ValueError, RecursionError):
                value, end = None, -1
            # A number at the end of the window may be incomplete.
            if end > 0 and (self.text[end - 1] in '}]"' or self.text[end : end + 1] in _BEHIND):
                self.at = end
                return value
            size = len(self.text) - self.at
            more = self.file.read(max(CHUNK, size)) if size <= MAX_LINE else ""
            if not more:
                if end < 0:
                    raise ValueError("a value is missing or too long")
                self.at = end
                return value
            self.text, self.at = self.text[self.at :] + more, 0

    def items(self) -> Iterator[Any]:
        """Yield the values in a list one by one. Raises ValueError if it is not a valid list."""
        self._expect("[")
        while self.peek() != "]":
            yield self.value()
            if self.peek() != "]":
                self._expect(",")
                if self.peek() == "]":
                    raise ValueError("there is a comma after the last value")
        self.take()

    def lists(self) -> Iterator[tuple[str, Any]]:
        """Yield (list name, value) for all lists in an object, and add the names to `named`. Skip other values."""
        self._expect("{")
        while self.peek() != "}":
            name = str(self.value())
            self._expect(":")
            if self.peek() == "[":
                self.named.add(name)
                yield from ((name, value) for value in self.items())
            else:
                self.value()
            if self.peek() != "}":
                self._expect(",")
        self.take()

    def _expect(self, char: str) -> None:
        if self.take() != char:
            raise ValueError(f"{char} is missing")


def document_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a list, of the only list in an object (`{"data": [...]}`), or of COCO annotations."""
    with path.open("rb") as file:
        if file.read(CHUNK).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            yield from items_of(path)
            return
    if path.stat().st_size > MAX_WHOLE:
        yield from coco_of(path)
        return
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{path.name} is not valid JSON: {line(error, 120)}", "Correct it.") from error
    if isinstance(body, dict) and body.keys() >= COCO:
        del body
        yield from coco_of(path)
        return
    if isinstance(body, dict):
        lists = [value for value in body.values() if isinstance(value, list)]
        body = lists[0] if len(lists) == 1 else body
    if not isinstance(body, list) or not all(isinstance(row, dict) for row in body):
        raise BadRequest(f"{path.name} is not a list of objects", "Write a JSON list of rows, or one row per line.")
    yield from body


def items_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON list. Invalid JSON raises BadRequest with the number of the last valid row."""
    number = 0
    with path.open(encoding="utf-8-sig") as file:
        values = Values(file)
        try:
            for row in values.items():
                if not isinstance(row, dict):
                    fix = "Write a JSON list of rows, or one row per line."
                    raise BadRequest(f"{path.name} is not a list of objects", fix)
                yield row
                number += 1
            if values.peek():
                raise ValueError("there is text after the list")
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise BadRequest(f"{path.name} is not valid JSON after row {number}", "Correct it.") from error


class NotCoco(Exception):
    """The annotations are not in COCO format. The message names the list that contains the error."""


class Boxes:
    """The images in COCO annotations and their boxes, in any order. A box takes about 40 bytes of memory."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.files: list[Any] = []
        self.order: list[int] = []
        self.of: list[array[int]] = []
        self.sides, self.kinds = array("d"), array("I")
        self.known: dict[Any, int] = {}
        self.names: dict[Any, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Add one value from one list. Raises NotCoco if it is not in COCO format."""
        if name in COCO and not isinstance(value, dict):
            raise NotCoco(f"one of its {name} is not an object: {line(value, 60)}")
        try:
            if name == "categories":
                self.names[value["id"]] = value["name"]
            elif name == "images":
                number = self._number(value["id"])
                if self.files[number] is None:
                    self.order.append(number)
                self.files[number] = value["file_name"]
            elif name == "annotations" and not value.get("iscrowd"):  # a crowd box contains several objects
                box = value["bbox"]
                if len(box) != _SIDES:
                    raise TypeError(f"a bbox with {len(box)} numbers")
                self.of[self._number(value["image_id"])].append(len(self.kinds))
                self.kinds.append(self.known.setdefault(value["category_id"], len(self.known)))
                self.sides.extend(box)
        except KeyError as error:
            raise NotCoco(f"one of its {name} has no {error.args[0]}") from error
        except (TypeError, OverflowError) as error:
            raise NotCoco(f"one of its {name} has an unknown form: {line(error, 100)}") from error

    def _number(self, image: Any) -> int:
        number = self.numbers.setdefault(image, len(self.files))
        if number == len(self.files):
            self.files.append(None)
            self.of.append(array("I"))
        return number

    def rows(self) -> Iterator[Row]:
        """Yield one row for each image, in file order. Raises NotCoco for a missing image or category."""
        lost = {kind: "category" for kind in self.known if kind not in self.names}
        lost |= {image: "image" for image, number in self.numbers.items() if self.files[number] is None}
        for number, what in lost.items():
            raise NotCoco(f"an annotation refers to the {what} {number!r}, which does not exist")
        names = [self.names[kind] for kind in self.known]
        for number in self.order:
            at = self.of[number]
            boxes = [self.sides[_SIDES * n : _SIDES * (n + 1)].tolist() for n in at]
            kinds = [names[self.kinds[n]] for n in at]
            yield {"image": self.files[number], "objects": {"bbox": boxes, "category": kinds}}


def coco_of(path: Path) -> Iterator[Row]:
    """Yield the images in COCO annotations, with their boxes and the category name of each box."""
    boxes = Boxes()
    large = path.stat().st_size > MAX_WHOLE
    with path.open(encoding="utf-8-sig") as file:
        values = Values(file)
        try:
            for name, value in values.lists():
                boxes.add(name, value)
            if missing := COCO - values.named:
                raise NotCoco(f"it has no list of {min(missing)}")
            yield from boxes.rows()
        except UnicodeDecodeError:
            raise
        except (NotCoco, TypeError, ValueError) as error:
            if large and not values.named >= COCO:
                message = f"{path.name} is over {MAX_WHOLE >> 20} MiB, and neither a list nor COCO annotations"
                raise BadRequest(message, "Save the rows as JSONL, or split the file.") from error
            if isinstance(error, ValueError):
                raise BadRequest(f"{path.name} is not valid JSON: {line(error, 120)}", "Correct it.") from error
            raise BadRequest(
                f"{path.name} does not contain valid COCO annotations: {line(error, 160)}",
                "images need id and file_name; annotations need image_id, category_id and bbox; "
                "categories need id and name.",
            ) from error
