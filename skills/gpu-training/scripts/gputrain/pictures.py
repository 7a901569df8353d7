"""Check, label and augment pictures. A resumed run repeats the same augmentation."""

import difflib
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain.callbacks import Watcher
from gputrain.outcome import Exit, Stop, why_not_loaded
from gputrain.rows import Data, sample
from gputrain.settings import Settings, option

PICTURES = 500
RARE, USUAL, NEAR = 2, 10, 0.8


@dataclass
class PictureSettings(Settings):
    """Settings of methods that train on pictures."""

    learning_rate: float = option(5e-5, "peak learning rate", least=0, most=1)
    weight_decay: float = option(0.01, "weight decay", least=0, most=1)
    labels: str = option("", "names of the classes in the order of their numbers, comma-separated")
    augment: bool = option(True, "flip pictures and change their brightness")


def with_pictures(rows: Any, source: str) -> Any:
    """Return the rows with pictures instead of paths in the column `image`.

    Paths are relative to the data file's folder.
    """
    from datasets import Image, Value

    if isinstance(rows.features["image"], Image):
        return rows
    if rows.features["image"] != Value("string"):
        raise Stop(Exit.DATA, f"{source}: the column image contains {rows.features['image']}", "use pictures or paths")
    folder = Path(source).parent if "://" not in source else Path()
    rows = rows.map(lambda row: {"image": str(folder / row["image"])})
    return rows.cast_column("image", Image())


def check_pictures(rows: Any, source: str, names: set[str]) -> None:
    """Raise Stop at the first sampled picture that can't be read."""
    import PIL.Image
    from datasets import Image

    raw = with_pictures(rows, source).select_columns(["image"]).cast_column("image", Image(decode=False))
    for index in sample(raw, PICTURES):
        picture = raw[index]["image"]
        try:
            with PIL.Image.open(io.BytesIO(picture["bytes"]) if picture["bytes"] else picture["path"]) as opened:
                opened.load()
        except Exception as error:
            where = picture["path"] or f"row {index + 1}"
            message = f"{source}, row {index + 1}: the picture {where} can't be read: {str(error)[:100]}"
            raise Stop(Exit.DATA, message, "replace or remove it") from error


def class_names(settings: PictureSettings, feature: Any, values: list[Any], source: str) -> list[str]:
    """Return the class names: those in the settings, those in the data, or the values themselves.

    Raises:
        Stop: a value is not a label, is not among the names or looks like a typo, or there is only one class.

    """
    if strange := [v for v in values if not isinstance(v, (int, str)) or v == ""]:
        raise Stop(Exit.DATA, f"{source} has the label {strange[0]!r}", "use whole numbers or names as labels")
    given = [name.strip() for name in settings.labels.split(",") if name.strip()]
    names = given or list(getattr(feature, "names", None) or sorted({str(v) for v in values}))
    if not given and not hasattr(feature, "names") and all(isinstance(v, int) for v in values):
        names = [str(n) for n in range(max(values) + 1)]
    if not given and not hasattr(feature, "names"):
        need_no_slip(Counter(values), source)
    for value in values:
        if value not in names if isinstance(value, str) else not 0 <= value < len(names):
            message = f"{source} has the label {value!r}; the classes are {', '.join(names[:10])}"
            raise Stop(Exit.DATA, message, "correct --labels or the rows")
    if len(names) < 2 and not given:
        raise Stop(Exit.DATA, f"{source} has one class, {names[0]}", "at least two classes are needed")
    return names


def need_no_slip(counts: Counter[Any], source: str) -> None:
    """Raise Stop if there is a gap below the highest number, or if a name looks like a typo of another."""
    fix = "correct the row, or name every class with --labels"
    numbers = sorted(n for n in counts if isinstance(n, int))
    if len(numbers) > 1 and numbers[-1] > numbers[-2] + 1:
        message = f"{source} has the label {numbers[-1]}, but the highest of the others is {numbers[-2]}"
        raise Stop(Exit.DATA, message, fix)
    names = [name for name in counts if isinstance(name, str)]
    for name in names:
        others = [n for n in names if n != name]
        same = [n for n in others if n.strip().lower() == name.strip().lower()]
        usual = [n for n in others if counts[name] <= RARE and counts[n] >= USUAL * counts[name]]
        for meant in same or difflib.get_close_matches(name, usual, 1, NEAR):
            message = f"{source} has the label {name!r} ({counts[name]} times) and {meant!r} ({counts[meant]} times)"
            raise Stop(Exit.DATA, message, fix)


def load_processor(settings: PictureSettings) -> Any:
    """Return the model's image processor."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(settings.model, revision=settings.revision, backend="pil")
    except Exception as error:
        raise why_not_loaded(settings.model, error) from error


def load_head(settings: PictureSettings, kind: Any, names: list[str]) -> Any:
    """Return the model with a new head for these classes."""
    numbered = dict(enumerate(names))
    try:
        return kind.from_pretrained(
            settings.model,
            revision=settings.revision,
            id2label=numbered,
            label2id={name: number for number, name in numbered.items()},
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        raise why_not_loaded(settings.model, error) from error


class Epoch(Watcher):
    """A callback that records the epoch number, on which the augmentation depends."""

    def __init__(self) -> None:
        self.number = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the number of the epoch that begins or resumes."""
        self.number = int(round(state.epoch or 0, 6))


class Pictures:
    """A dataset of rows in the model's format. The seed, the epoch and the row determine a picture's augmentation.

    A random generator can't be used: batches are loaded in advance, so its state would be ahead of the checkpoint.
    """

    def __init__(self, rows: Any, read: Any, augment: Any | None, epoch: Epoch, seed: int) -> None:
        self.rows, self.read, self.augment, self.epoch, self.seed = rows, read, augment, epoch, seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.augment is not None:
            self.augment.set_random_seed((self.seed * 1_000_003 + self.epoch.number * 7919 + index) % 2**32)
        return dict(self.read(self.rows[index], self.augment, index))


def augmentation(settings: PictureSettings, boxes: Any | None = None) -> Any | None:
    """Return the transform that augments pictures at random, or None if augmentation is turned off."""
    if not settings.augment:
        return None
    import albumentations

    steps = [albumentations.HorizontalFlip(p=0.5), albumentations.RandomBrightnessContrast(p=0.3)]
    return albumentations.Compose(steps, bbox_params=boxes)


def need_rows(data: Data, least: int) -> None:
    """Raise Stop if the data has fewer rows than one step needs."""
    if len(data.train) < least:
        message = f"{len(data.train)} training rows are too few: one step needs {least}"
        raise Stop(Exit.DATA, message, "lower --batch-size, or add data")
