"""Arguments and rows of measurements: each script prints every figure as one row of a Markdown table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping


def arguments(doc: str | None, sizes: Mapping[str, tuple[float | str, float | str]]) -> argparse.Namespace:
    """Read the command line: a flag for each size, with its default and its value under `--small`."""
    ask = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--small", action="store_true", help="use the smallest sizes, for a trial of seconds")
    for name, (usual, small) in sizes.items():
        ask.add_argument(f"--{name}", type=type(usual), help=f"{usual} by default, {small} with --small")
    asked = ask.parse_args()
    for name, (usual, small) in sizes.items():
        if getattr(asked, name) is None:
            setattr(asked, name, small if asked.small else usual)
    return asked


def figure(what: str, value: str, peer: str = "", ratio: float | None = None) -> None:
    """Print one row: a figure, its peer or aim, and the ratio to the peer."""
    print(f"| {what:<62} | {value:>16} | {peer:<30} | {'' if ratio is None else f'{ratio:,.2f}':>9} |", flush=True)
