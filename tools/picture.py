"""Draw the demo as an SVG: run the demo, record its output and write FILE.

    python tools/picture.py FILE

The ledger's table at the end is omitted, because it is long and contains times of day.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

WIDTH = 112
EVENT = re.compile(r"\d\d:\d\d:\d\d ")
FONT_FILES = re.compile(r"\s*@font-face \{.*?\n    \}", re.DOTALL)
UNIQUE_ID = "gpuwarden"  # rich's default is a digest of the text, which would change every line of the file


def main(target: Path) -> int:
    """Write the picture to `target`; return the demo's exit code."""
    command = [sys.executable, "-m", "gpuwarden", "demo", "--yes"]
    env = os.environ | {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        target.write_text(draw(story(done.stdout)), "utf-8")
    return done.returncode


def story(printed: str) -> Text:
    """Return the demo's text with its styles, without the rows of the ledger's table."""
    lines = list(Text.from_ansi(printed).split("\n"))
    first = next((n for n, line in enumerate(lines) if EVENT.match(line.plain)), len(lines))
    shown = [Text("$ make demo ARGS=--yes", style="bold")]
    for line in lines[:first]:
        line.rstrip()
        if line.plain or shown[-1].plain:  # an erased progress bar is an empty line
            shown.append(line)
    return Text("\n").join(shown)


def draw(text: Text) -> str:
    """Return the text as an SVG without external resources."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(text)
    svg = console.export_svg(title="gpuwarden demo", theme=DIMMED_MONOKAI, unique_id=UNIQUE_ID)
    svg = FONT_FILES.sub("", svg).replace("font-family: Fira Code, monospace", "font-family: monospace")
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
