"""Object detection: check the boxes, and compute a model's average precision."""

import contextlib
import io
from typing import Any

from gputrain.outcome import Exit, Stop

SLACK = 1.0  # pixels that a box may extend beyond its picture
MOST = 100  # objects per picture that are evaluated, as in COCO


def categories(rows: Any) -> list[Any]:
    """Return the category of every object. The field is named `category` or `categories`."""
    first = rows[0]["objects"]
    name = "category" if "category" in first else "categories" if "categories" in first else ""
    if "bbox" not in first or not name:
        message = f"objects has the fields {', '.join(first)}; bbox and category are needed"
        raise Stop(Exit.DATA, message, "rename them before training")
    return [value for objects in rows["objects"] for value in objects[name]]


def check_boxes(rows: Any, source: str, *, clip: bool) -> None:
    """Raise Stop at the first invalid box in the first 500 rows.

    A box is invalid if it is empty or, unless boxes are clipped, extends beyond its picture.
    """
    for index in range(min(len(rows), 500)):
        row = rows[index]
        width, height = row["image"].size
        for box in row["objects"]["bbox"]:
            if len(box) != 4:
                message = f"{source}, row {index + 1}: the box {box} does not have four numbers"
                raise Stop(Exit.DATA, message, "correct the box: x, y, width, height in pixels")
            x, y, w, h = box
            if w <= 0 or h <= 0:
                raise Stop(Exit.DATA, f"{source}, row {index + 1}: the box {[x, y, w, h]} is empty", "remove it")
            outside = x < -SLACK or y < -SLACK or x + w > width + SLACK or y + h > height + SLACK
            if outside and not clip:
                message = f"{source}, row {index + 1}: the box {[x, y, w, h]} exceeds the picture of {width} x {height}"
                raise Stop(Exit.DATA, message, "correct the box (x, y, width, height), or pass --boxes clip")


def true_objects(rows: Any, names: list[str], field: str) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """Return every object in the rows, with its box clipped to the picture, and each picture's height and width."""
    truth, sizes = [], []
    for number, row in enumerate(rows):
        width, height = row["image"].size
        sizes.append((height, width))
        for (x, y, w, h), kind in zip(row["objects"]["bbox"], row["objects"][field], strict=True):
            left, top = max(0, x), max(0, y)
            box = [left, top, min(width, x + w) - left, min(height, y + h) - top]
            number_of = names.index(kind) if isinstance(kind, str) else kind
            truth.append({"image_id": number, "category_id": number_of, "bbox": box})
    return truth, sizes


def precision(truth: list[dict[str, Any]], found: list[dict[str, Any]], names: list[str]) -> dict[str, float]:
    """Return COCO's mean average precision and recall.

    `truth` and `found` contain an entry for each object: image_id, category_id, bbox and, in `found`, a score.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    images = sorted({t["image_id"] for t in truth} | {f["image_id"] for f in found})
    known = COCO()
    known.dataset = {
        "info": {},
        "images": [{"id": i} for i in images],
        "categories": [{"id": n, "name": name} for n, name in enumerate(names)],
        "annotations": [
            t | {"id": n + 1, "iscrowd": 0, "area": t["bbox"][2] * t["bbox"][3]} for n, t in enumerate(truth)
        ],
    }
    if not found or not truth:
        return {"map": 0.0, "map_50": 0.0, "mar_100": 0.0}
    with contextlib.redirect_stdout(io.StringIO()):
        known.createIndex()
        judge = COCOeval(known, known.loadRes(found), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return {"map": float(judge.stats[0]), "map_50": float(judge.stats[1]), "mar_100": float(judge.stats[8])}


def objects_of(logits: Any, boxes: Any, sizes: list[tuple[int, int]], first: int) -> list[dict[str, Any]]:
    """Return the objects that a model found in the pictures of a batch: at most 100 per picture, the best first.

    logits: (pictures, queries, classes or classes + 1). boxes: center x, center y, width and height, relative to the
    picture's size.
    """
    found = []
    for number, (scores, shares, (height, width)) in enumerate(zip(logits, boxes, sizes, strict=True)):
        best = sorted(((float(s), q, c) for q, row in enumerate(scores) for c, s in enumerate(row)), reverse=True)
        for score, query, kind in best[:MOST]:
            x, y, w, h = (float(v) for v in shares[query])
            box = [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
            found.append({"image_id": first + number, "category_id": kind, "bbox": box, "score": score})
    return found


def judge(
    prediction: Any, truth: list[dict[str, Any]], sizes: list[tuple[int, int]], names: list[str]
) -> dict[str, float]:
    """Return the average precision of a model's predictions. Their batches are in the order of the rows.

    The labels in `prediction` are not used, because accelerate truncates their tensors to the size of the last batch if
    that batch is smaller.
    """
    import torch

    found: list[dict[str, Any]] = []
    first = 0
    for logits, boxes in prediction.predictions:
        values = torch.tensor(logits)
        with_nothing = values.shape[-1] == len(names) + 1
        scores = values.softmax(-1)[..., :-1] if with_nothing else values.sigmoid()
        found += objects_of(scores.numpy(), boxes, sizes[first : first + len(boxes)], first)
        first += len(boxes)
    return precision(truth, found, names)


def outputs(values: Any, labels: Any) -> Any:
    """Return the logits and the boxes from the outputs of a detection model."""
    tensors = [v for v in values if getattr(v, "ndim", 0) == 3]
    boxes = next(n for n, v in enumerate(tensors) if v.shape[-1] == 4 and n)
    return tensors[boxes - 1], tensors[boxes]
