"""Print the verdicts on healthy files: `python tests/kits/healthy [--only REGEX] [--levels structure,content]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from healthy import measure

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--only", default="", help="a regular expression over the names of the configurations")
parser.add_argument("--levels", default="structure,content,load,resume")
parser.add_argument("--at", type=Path, default=Path("/tmp/gpuwarden-healthy"), help="where the files are kept")
parser.add_argument(
    "--seen", action="store_true", help="leave out the third that is not looked at while verdicts are fixed"
)
args = parser.parse_args()
sys.exit(measure.main(args.at, args.only, args.levels.split(","), args.seen))
