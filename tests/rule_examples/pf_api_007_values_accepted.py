from dataclasses import replace

from gpuwarden.core.models import JobSpec
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.script import read_script
from rule_kit import script, submit

HEADER = '# /// script\n# dependencies = ["transformers==4.51.3", "peft==0.15.2"]\n# ///\n'
TRAINING = HEADER + "from transformers import TrainingArguments\nTrainingArguments(output_dir='out', {given})\n"
LORA = HEADER + "from peft import LoraConfig\nLoraConfig(bias={bias})\n"
CHOOSES = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--precision", choices=["no", "bf16"], default="no")
args = parser.parse_args()
"""


def job(*args: str) -> SubmitFacts:
    """Return the facts of a job whose script has a flag with choices."""
    spec = JobSpec(platform="vastai", script=CHOOSES, args=args, outputs=("out",), timeout_s=1_000)
    return replace(submit(), spec=spec, script=read_script(CHOOSES, args=args))


FIRES = [
    script(TRAINING.format(given="eval_strategy='step'")),
    script(TRAINING.format(given="optim='adamw_8bits'")),
    script(LORA.format(bias="'some'")),
    job("--precision", "int8"),
]
SILENT = [
    submit(),
    script(TRAINING.format(given="eval_strategy='steps', optim='adamw_torch_fused', lr_scheduler_type='cosine'")),
    script(TRAINING.format(given="eval_strategy=strategy")),
    script(LORA.format(bias="'lora_only'")),
    job("--precision", "bf16"),
]
