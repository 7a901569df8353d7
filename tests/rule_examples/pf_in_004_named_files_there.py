from dataclasses import replace

from gpuwarden.core.models import InputFile
from rule_kit import script, submit

TRAIN = InputFile(path="train.py", size=1, sha256="")
COMMAND = ("python", "train.py", "--config", "sft.yaml")
FIRES = [
    submit(command=COMMAND, files_here=("train.py",)),
    submit(command=COMMAND),  # train.py does not exist
    submit(command=COMMAND, files_here=("sft.yaml",), inputs=(TRAIN,)),
    replace(script("print(1)"), files_here=("rows.jsonl",)),
]
SILENT = [
    submit(),
    submit(command=COMMAND, inputs=(TRAIN,)),
    submit(command=COMMAND, files_here=None),
    submit(command=("python", "-m", "package", "train.py"), files_here=()),
    submit(command=("python", "/data/train.py")),
]
