"""Pictures for a smoke run: a red or a green square on blue, with its class and its box."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gputrain.smoke import DATA, MODEL, SHORT, Smoke, write_rows

SIDE = 32
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def write_pictures(folder: Path) -> list[tuple[str, str, list[int]]]:
    """Save pictures; return the name, the class and the box (x, y, width, height) of each."""
    import PIL.Image

    folder.mkdir()
    made = []
    for index in range(24):
        x, y, side = 2 + index % 9, 3 + index % 7, 8 + index % 5
        picture = PIL.Image.new("RGB", (SIDE, SIDE), (20, 20, 90))
        color = "green" if index % 2 else "red"
        picture.paste((0, 128, 0) if index % 2 else (255, 0, 0), (x, y, x + side, y + side))
        picture.save(folder / f"{index}.png")
        made.append((f"{folder.name}/{index}.png", color, [x, y, side, side]))
    return made


def smoke_pictures(row: Callable[[str, str, list[int]], dict[str, Any]], model: Callable[[Path], None]) -> Smoke:
    """Return the smoke-run inputs for a method that uses pictures: its rows and a model."""

    def make(folder: Path) -> None:
        model(folder / MODEL)
        write_rows(folder / DATA, [row(*picture) for picture in write_pictures(folder / "pictures")])

    flags = ("--model", f"{{}}/{MODEL}", "--dataset", f"{{}}/{DATA}", "--eval-fraction", "0.2", *SHORT)
    return Smoke(make, flags)
