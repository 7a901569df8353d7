from dataclasses import replace

from gpuwarden.core.models import JobSpec
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.script import read_script
from rule_kit import submit

HEADER = '# /// script\n# dependencies = ["trl==0.17.0", "transformers==4.51.3"]\n# ///\n'
FIELDS = f"""{HEADER}
from dataclasses import dataclass, field
from transformers import HfArgumentParser, TrainingArguments

@dataclass
class ScriptArguments:
    dataset: str = field(metadata={{"help": "data"}})
    packed: bool = True

parser = HfArgumentParser((ScriptArguments, TrainingArguments))
mine, training = parser.parse_args_into_dataclasses()
"""
PLAIN = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float)
parser.add_argument("--learning_steps", type=int)
parser.add_argument("--out", "-o")
args = parser.parse_args()
"""
DROPS = PLAIN.replace("args = parser.parse_args()", "args, rest = parser.parse_known_args()")
LENIENT = DROPS + "start(rest)\n"
CHANGES = (
    "sys.argv = ['train.py']",
    "sys.argv.insert(1, '--out=o')",
    "sys.argv[1:] = [a for a in sys.argv if a != '--rate']",
    "del sys.argv[1]",
)
EXTENDED = PLAIN.replace("args =", "add_more(parser)\nargs =")


def job(text: str, *args: str) -> SubmitFacts:
    """Return the facts of a job that runs a script with these arguments."""
    spec = JobSpec(platform="vastai", script=text, args=args, outputs=("out",), timeout_s=1_000)
    return replace(submit(), spec=spec, script=read_script(text, args=args))


FIRES = [
    job(FIELDS, "--dataset", "a/b", "--learning_rat_e", "1"),
    job(FIELDS, "--dataset", "a/b", "--max_length", "9"),
    job(PLAIN, "--rate", "1"),
    job(PLAIN, "--learning", "1"),  # two flags start with it
    job(f"import sys\n{PLAIN}{CHANGES[0]}", "--rate", "1"),  # after the arguments were parsed
    job(f"import sys\nsys.argv.append('--out=o')\nsys.argv += ['--out', 'o']\n{PLAIN}", "--rate", "1"),
    job(DROPS, "--lerning_rate", "1"),  # the training would start without it
    job(DROPS, "--anything", "1"),
    job(FIELDS.replace("==4.51.3", ">=99"), "--dataset", "a/b", "--lerning_rate", "1"),  # no such release
]
SILENT = [
    submit(),
    job(FIELDS, "--dataset", "a/b", "--learning_rate", "1", "--no_packed", "--output-dir", "out"),
    job(FIELDS, "--dataset", "a/b", "--learning_ra", "1"),
    job(PLAIN, "--learning_r", "1", "--out", "o"),
    job(LENIENT, "--anything", "1"),
    job(EXTENDED, "--anything", "1"),
    *(job(f"import sys\n{change}\n{PLAIN}", "--rate", "1") for change in CHANGES),
    job(FIELDS.replace("==4.51.3", ">=99"), "--dataset", "a/b", "--anything", "1"),
]
