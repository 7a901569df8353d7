from dataclasses import replace

from gpuwarden.core.models import InputFile, JobSpec
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.script import read_script
from rule_kit import submit

HEADER = '# /// script\n# dependencies = ["transformers>=5"]\n# ///\n'
LOADS = f'{HEADER}from transformers import AutoModel\nmodel = AutoModel.from_pretrained("./my-model")\n'
MAKES = f'{LOADS}from huggingface_hub import snapshot_download\nsnapshot_download("a/b", local_dir="my-model")\n'
CLONES = f'{LOADS}import subprocess\nsubprocess.run(["git", "clone", url], check=True)\n'
WEIGHTS = InputFile(path="my-model/model.safetensors", size=3, sha256="0" * 64)


def job(text: str, *inputs: InputFile, outputs: tuple[str, ...] = ("out",)) -> SubmitFacts:
    """Return the facts of a job that runs a script next to these files."""
    spec = JobSpec(platform="vastai", script=text, outputs=outputs, timeout_s=1_000)
    return replace(submit(), spec=spec, script=read_script(text), inputs=inputs)


FIRES = [job(LOADS), job(CLONES)]
SILENT = [
    submit(),
    job(LOADS, WEIGHTS),
    job(LOADS, outputs=("my-model/best",)),
    job(MAKES),
    job(LOADS.replace("./my-model", "owner/my-model")),
]
