from dataclasses import replace

from gpuwarden.static_analysis.script import read_script
from rule_kit import submit

FRESH = "import torch\nfor step in range(9):\n    torch.save({}, 'out/x.pt')\n"
LOADS = "import torch\nstate = torch.load('out/x.pt')\n"
LAUNCH = ("torchrun", "--nnodes=1:4", "--max-restarts=3", "train.py")
FIRES = [
    replace(submit(command=LAUNCH), script=read_script(FRESH)),
    submit(command=LAUNCH),
    submit(command=("horovodrun", "-np", "8", "--min-np", "8", "python", "train.py")),
]
SILENT = [
    submit(),
    replace(submit(command=LAUNCH), script=read_script(LOADS)),
    replace(submit(command=(*LAUNCH, "--resume_from_checkpoint", "out")), script=read_script(FRESH)),
    replace(submit(command=("torchrun", "--nnodes=2", "train.py")), script=read_script(FRESH)),
    submit(command=("horovodrun", "-np", "8", "--min-np", "4", "python", "train.py")),
]
