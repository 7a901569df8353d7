from dataclasses import replace

from gpuwarden.profiles import load_profile
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.script import read_script
from rule_kit import submit

LOOP = "import torch\nloss.backward()\n"
TRAINER = (
    "from transformers import Trainer, TrainingArguments\nargs = TrainingArguments({})\nTrainer(args=args).train()\n"
)
HELD = TRAINER.replace("Trainer(args", "trainer = Trainer(args").replace(").train()", ")\ntrainer.train()")
JOBS = load_profile("hf-jobs")
HUB = "from huggingface_hub import CommitScheduler, HfFileSystem\n"


def job(text: str, *outputs: str, args: tuple[str, ...] = ()) -> SubmitFacts:
    """Return the facts of a job with this script and these outputs."""
    hub = outputs[0].startswith("/hub/")
    facts = submit(JOBS if hub else submit().profile, outputs=outputs)
    return replace(facts, script=read_script(text, {}, args))


FIRES = [
    job(LOOP, "out"),
    job(LOOP + "torch.save({}, 'results/model.pt')", "out"),
    job(LOOP + "if False:\n    torch.save({}, 'out/model.pt')", "out"),
    job(TRAINER.format("output_dir='results'"), "out"),
    job(TRAINER.format("output_dir='out', save_strategy='no'"), "out"),
    job("import lightning as L\ntrainer = L.Trainer(default_root_dir='runs')\ntrainer.fit(model)", "out"),
    job("from ultralytics import YOLO\nm = YOLO('y.pt')\nm.train(data='c.yaml')", "out"),
    job(LOOP, "/hub/models/me/model"),
    job(LOOP + "model.push_to_hub('me/other')", "/hub/models/me/model"),
    job(HELD.format("hub_model_id='me/model'") + "trainer.model.push_to_hub('me/other')", "/hub/models/me/model"),
    job(LOOP + "if False:\n    model.push_to_hub('me/model')", "/hub/models/me/model"),
    job(LOOP + "import zipfile\nzipfile.ZipFile('out/a.zip')", "out"),
    job(LOOP + "from PIL import Image\nImage.open('wax.png')", "out"),
    job(HUB + LOOP + "HfFileSystem().open('me/model/a.pt').read()", "/hub/models/me/model"),
    # A question
    job("from my_saver import keep\n" + LOOP, "out"),
    job(LOOP + "if found():\n    torch.save({}, 'out/model.pt')", "out"),
]
SILENT = [
    submit(),
    job("print('nothing is trained')", "out"),
    job(LOOP + "torch.save({}, 'out/model.pt')", "out"),
    job(LOOP + "import os\ntorch.save({}, os.path.join('out', 'model.pt'))", "out/model.pt"),
    job(LOOP + "from pathlib import Path\nout = Path('out')\n(out / 'a.txt').write_text('x')", "out"),
    job(TRAINER.format("output_dir='out'"), "out"),
    job(TRAINER.format("output_dir='out/run'"), "out"),
    job("import lightning as L\nL.Trainer().fit(model)", "lightning_logs"),
    job("from ultralytics import YOLO\nm = YOLO('y.pt')\nm.train(data='c.yaml', project='out')", "out"),
    job("from ultralytics import YOLO\nYOLO('y.pt').train(data='c.yaml')", "runs"),
    job(LOOP + "accelerator.save_state('out/step')", "out"),
    job(LOOP + "pipe.save_pretrained('out')", "out"),
    job(LOOP + "import numpy\nnumpy.savez_compressed('out/a.npz', a=1)", "out"),
    job(LOOP + "weights.tofile('out/a.bin')", "out"),
    job(LOOP + "torch.onnx.export(model, (x,), 'out/a.onnx')", "out"),
    job(LOOP + "import zipfile\nwith zipfile.ZipFile('out/a.zip', 'w') as to:\n    to.write('a')", "out"),
    job(LOOP + "try:\n    torch.save(a, 'out/a.pt')\nexcept OSError:\n    torch.save(b, 'out/a.pt')", "out"),
    job("try:\n    " + LOOP.replace("\n", "\n    ") + "torch.save({}, 'out/a.pt')\nexcept Exception:\n    pass", "out"),
    job(HUB + LOOP + "CommitScheduler(repo_id='me/model', folder_path='out')", "/hub/models/me/model"),
    job(HUB + LOOP + "files = HfFileSystem()\nfiles.put('a.pt', 'me/model/a.pt')", "/hub/models/me/model"),
    job(HUB + LOOP + "torch.save({}, HfFileSystem().open('hf://me/model/a.pt', 'wb'))", "/hub/models/me/model"),
    job(LOOP + "rows.to_parquet('hf://datasets/me/rows/a.parquet')", "/hub/datasets/me/rows"),
    job(TRAINER.format("'out'"), "out"),
    job(LOOP + "model.push_to_hub('me/model')", "/hub/models/me/model"),
    job(HELD.format("hub_model_id='me/other'") + "trainer.model.push_to_hub('me/model')", "/hub/models/me/model"),
    job(HELD.format("hub_model_id='me/model'") + "trainer.push_to_hub('me/other')", "/hub/models/me/model"),
    job(HELD.format("save_strategy='no'") + "trainer.accelerator.save_model(model, 'out')", "out"),
    job(TRAINER.format("push_to_hub=True, hub_model_id='me/model'"), "/hub/models/me/model"),
]
