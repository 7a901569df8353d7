"""Load image folders with COCO annotations."""

import json
from pathlib import Path
from typing import Any

from gputrain.outcome import Exit, Stop, say


def from_coco(folder: Path, annotations: Path) -> Any:
    """Return the pictures in a COCO folder with their boxes and category names.

    Crowd annotations are omitted, because each of their boxes contains many objects.

    Raises:
        Stop: the annotations are not valid COCO; the message names the entry.

    """
    from datasets import Dataset, Image

    fix = "images need id and file_name; annotations image_id, category_id and bbox; categories id and name"
    where = str(annotations)
    try:
        coco = json.loads(annotations.read_text(encoding="utf-8"))
        where = f"{annotations}, categories"
        names = {c["id"]: c["name"] for c in coco["categories"]}
        where = f"{annotations}, images"
        found: dict[int, dict[str, Any]] = {
            i["id"]: {"image": str(picture_at(folder, i["file_name"])), "objects": {"bbox": [], "category": []}}
            for i in coco["images"]
        }
        crowds = 0
        for number, box in enumerate(coco["annotations"], 1):
            where = f"{annotations}, annotation {number}"
            if box.get("iscrowd"):
                crowds += 1
                continue
            objects, (x, y, width, height) = found[box["image_id"]]["objects"], box["bbox"]
            objects["category"].append(names[box["category_id"]])
            objects["bbox"].append([float(x), float(y), float(width), float(height)])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        cause = f"{error} is missing or unknown" if isinstance(error, KeyError) else str(error)
        raise Stop(Exit.DATA, f"{where}: {cause}", fix) from None
    if crowds:
        say(f"{crowds} crowd annotations are omitted, because their box contains many objects")
    return Dataset.from_list(list(found.values())).cast_column("image", Image())


def picture_at(folder: Path, name: str) -> Path:
    """Return the path of a picture, which is next to the annotations or in the subfolder `images`."""
    beside, below = folder / name, folder / "images" / name
    return below if below.is_file() and not beside.is_file() else beside
