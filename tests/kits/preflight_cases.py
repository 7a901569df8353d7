"""Examples of the preflight rules."""

from __future__ import annotations

from typing import Any

HEAD = '# /// script\n# dependencies = ["trl>=1.16", "transformers>=5", "datasets>=4", "torch>=2.8", {more}]\n# ///\n'
SFT = """
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("{data}", split="train")
SFTTrainer(model="{model}", train_dataset=ds, args=SFTConfig(output_dir="out", {args})).train()
"""


def sft(args: str = "", data: str = "trl-lib/Capybara", model: str = "Qwen/Qwen2.5-0.5B", more: str = "") -> str:
    return HEAD.format(more=more) + SFT.format(args=args, data=data, model=model)


def plain(body: str, more: str = "") -> str:
    return HEAD.format(more=more) + body


PUSH = 'push_to_hub=True, hub_model_id="rehearsal/x"'
SERVERLESS = {"platform": "hf-jobs", "gpu": "a10g-small"}
ADAPTER = """
from peft import PeftModel
from transformers import AutoModelForCausalLM
m = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B"), "{}")
m.save_pretrained("out")
"""
LOOP = "import torch\nloss = torch.ones(1, requires_grad=True).sum()\nloss.backward()\n"
GRPO = (
    HEAD.format(more="")
    + """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
def short(completions, **kwargs):
    return [1.0 for _ in completions]
data = load_dataset("trl-lib/DeepMath-103K", split="train")
config = GRPOConfig(output_dir="out", {args})
GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=short, args=config, train_dataset=data).train()
"""
)
WRITERS = (
    "import numpy as np\nnp.savez_compressed('out/x.npz', a=1)",
    "array.tofile('out/x.bin')",
    "torch.onnx.export(model, (x,), 'out/x.onnx')",
    "import zipfile\nzipfile.ZipFile('out/x.zip', 'w').writestr('a', 'b')",
)
LIGHTNING = """# /// script
# dependencies = ["lightning", "torch", "transformers"]
# ///
import lightning as L
from transformers import AutoModelForCausalLM
trainer = L.Trainer(max_epochs=1)
trainer.fit(model=AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B"))
"""
OWN_TRAINER = sft('eval_strategy="steps"').replace(
    "\nSFTTrainer(",
    "\nclass T(SFTTrainer):\n    def __init__(self, **k):\n        super().__init__(eval_dataset=k.pop('dev', ds), **k)\nT(",
)
CHANGES = (
    "setattr(c, 'eval_strategy', 'no')",
    "vars(c).update(options)",
    "c = dataclasses.replace(c, eval_strategy='no')",
    "c.set_evaluate('no')",
    "def fix(x):\n    x.eval_strategy = 'no'\nfix(c)",
)
KEEPS = ("setattr(c, 'seed', 1)", "def show(x):\n    print(x.seed)\nshow(c)")


def with_config(line: str) -> str:
    """Return a script that evaluates, with a line after its configuration."""
    made = f'import dataclasses\nc = SFTConfig(output_dir="out", eval_strategy="steps")\n{line}\nSFTTrainer('
    return sft().replace("SFTTrainer(", made).replace('args=SFTConfig(output_dir="out", )', "args=c")


PARTIAL = "from functools import partial\nfrom datasets import load_dataset\n"
STREAM = sft().replace('split="train"', "streaming=True")
EVALUATES = sft('eval_strategy="steps"').replace("model=", "").replace("train_dataset=ds, args=", "")
"""A script whose trainer is given only positional arguments; the last one is its configuration."""
SETS = (
    "os.environ.setdefault('REPO', 'x')",
    "os.environ.update({'REPO': 'x'})",
    "os.environ.update(REPO='x')",
    "os.environ |= {'REPO': 'x'}",
    "if os.getenv('REPO'):\n    pass",
    "os.environ.update({k: 'x' for k in input()})",
    "os.environ.update(**options)",
    "for k in input().split():\n    os.environ[k] = 'x'",
)
"""Lines after which REPO may be set; the first five leave OTHER unset."""
# rule: (jobs that fire it, jobs that don't); a job is a script, or a dict of spec fields.
CASES: dict[str, tuple[list[Any], list[Any]]] = {
    "PF-HUB-001": (
        [
            sft(data="trl-lib/argilla-dpo-mix-7k"),
            sft(model="Qwen/Qwen9-1T"),
            {"command": ("trl", "sft", "--dataset_name", "no/such")},
            {"command": ("python", "t.py"), "env": {"DATASET": "trl-lib/argilla-dpo-mix-7k"}},
            {
                "script": plain("import os\nfrom datasets import load_dataset\nload_dataset(os.environ['D'])"),
                "env": {"D": "no/such"},
            },
            plain(PARTIAL + "load = partial(load_dataset, 'no/such')\nload(split='train')"),
            plain(PARTIAL + "partial(load_dataset, split='train')('no/such')"),
            plain(
                PARTIAL
                + "d = 'no/such'\nload = partial(load_dataset, d)\ndef main(d='trl-lib/tldr'):\n    load()\nmain()"
            ),
        ],
        [sft(), sft(data="./local/folder"), sft(data="json"), {"command": ("python", "train.py")}],
    ),
    "PF-HUB-002": (
        [
            sft(model="meta-llama/Llama-3.2-1B"),
            sft(model="rehearsal/taken-down"),
            {"script": sft(model="rehearsal/mine"), "secrets": ()},
        ],
        [sft(), sft(model="rehearsal/mine")],
    ),
    "PF-HUB-003": ([sft(model="gpt2")], [sft()]),
    "PF-HUB-004": ([sft()], [plain("from datasets import load_dataset\nload_dataset('trl-lib/tldr', revision='abc')")]),
    "PF-HUB-005": (
        [plain("from huggingface_hub import hf_hub_download as d\nd('Qwen/Qwen3-0.6B', 'nothing.bin')")],
        [plain("from huggingface_hub import hf_hub_download as d\nd('Qwen/Qwen3-0.6B', 'config.json')")],
    ),
    "PF-HUB-006": ([plain(ADAPTER.format("Qwen/Qwen3-0.6B"))], [plain(ADAPTER.format("rehearsal/qwen-capybara-lora"))]),
    "PF-HUB-007": (
        [sft('push_to_hub=True, hub_model_id="someone/x"')],
        [sft(PUSH), sft('push_to_hub=True, hub_model_id="rehearsal-org/x"')],
    ),
    "PF-DATA-001": (
        [
            plain("from datasets import load_dataset\nload_dataset('trl-lib/tldr', split='validation')"),
            plain("from datasets import load_dataset\nload_dataset('trl-lib/tldr', 'english')"),
            plain("from datasets import load_dataset\nload_dataset('rehearsal/two-configs')"),
        ],
        [
            plain("from datasets import load_dataset\nload_dataset('trl-lib/tldr', split='train[:5%]+train[90%:]')"),
            plain("from datasets import load_dataset\nload_dataset('rehearsal/two-configs', 'de', split='train')"),
        ],
    ),
    "PF-DATA-002": (
        [
            sft(data="trl-lib/ultrafeedback_binarized"),
            sft(data="ethz/food101"),
            {"command": ("trl", "dpo", "--dataset_name", "trl-lib/tldr")},
        ],
        [
            sft(),
            sft(data="trl-lib/tldr"),
            sft(data="stanfordnlp/imdb"),
            {"command": ("trl", "dpo", "--dataset_name", "argilla/dpo-mix-7k")},
        ],
    ),
    "PF-DATA-003": (
        [
            plain(
                "from datasets import load_dataset\nload_dataset('trl-lib/tldr').map(lambda r: {'n': r['question']})"
            ),
            plain(
                "from datasets import load_dataset\ndata = load_dataset('trl-lib/tldr')\n"
                "def row(r):\n    return {'n': r['question']}\ndata['train'].map(row)\ndata['test'].map(row)"
            ),
        ],
        [
            plain(
                "from datasets import load_dataset\nload_dataset('trl-lib/tldr').map(lambda r: {'n': r['prompt']}).map(lambda r: {'m': r['n']})"
            )
        ],
    ),
    "PF-DATA-004": (
        [sft(model="HuggingFaceTB/SmolLM2-135M")],
        [
            sft(),
            sft(model="HuggingFaceTB/SmolLM2-135M", args="chat_template_path='x'"),
            sft(model="HuggingFaceTB/SmolLM2-135M", data="stanfordnlp/imdb"),
        ],
    ),
    "PF-DATA-005": (
        [
            sft('eval_strategy="steps"'),
            EVALUATES.replace(")).train()", "), None, ds).train()"),
            EVALUATES.replace(")).train()", "), None, ds, None).train()"),
            EVALUATES.replace("SFTTrainer(", "class T(SFTTrainer):\n    pass\nT(").replace(")).", "), None, ds)."),
            EVALUATES.replace("SFT", "DPO").replace('5B", ', '5B", None, ').replace(")).", "), None, ds)."),
            *(with_config(line) for line in KEEPS),
        ],
        [
            sft('eval_strategy="no"'),
            sft(),
            OWN_TRAINER,
            EVALUATES.replace(")).train()", "), None, ds, ds).train()"),
            *(with_config(line) for line in CHANGES),
        ],
    ),
    "PF-DATA-006": (
        [STREAM, STREAM.replace("ds,", "ds.skip(9), eval_dataset=ds.take(9),")],
        [
            sft("max_steps=5").replace('split="train"', "streaming=True"),
            sft(),
            sft() + "print(next(iter(load_dataset('trl-lib/tldr', streaming=True))))",
            sft().replace("ds,", "ds, eval_dataset=load_dataset('trl-lib/tldr', streaming=True),"),
        ],
    ),
    "PF-DEP-001": (
        [plain("import polars"), plain("from PIL import Image")],
        [
            plain("import polars", '"Polars>=1"'),
            plain("from PIL import Image", '"pillow"'),
            plain("try:\n    import polars\nexcept ImportError:\n    polars = None"),
            plain("import contextlib\nwith contextlib.suppress(ImportError):\n    import polars"),
            plain("import hydra, pynvml, Levenshtein", '"hydra-core", "nvidia-ml-py", "python-Levenshtein"'),
        ],
    ),
    "PF-DEP-002": (
        [sft().replace("trl>=1.16", "trl")],
        [sft(), sft().replace("trl>=1.16", "trl @ git+https://github.com/huggingface/trl")],
    ),
    "PF-DEP-003": (
        [
            sft('report_to="wandb"'),
            sft('report_to=["tensorboard"]'),
            sft("use_vllm=True"),
            sft('optim="paged_adamw_8bit"'),
        ],
        [
            sft('report_to="wandb"', more='"wandb"'),
            sft('report_to="none"'),
            sft('optim="adamw_torch_8bit"'),
            LIGHTNING,
        ],
    ),
    "PF-SYS-001": (
        [
            plain("import subprocess\nsubprocess.run(['cmake', '-B', 'b'], check=True)"),
            plain("import os\nos.system('cd x && make -j4')"),
        ],
        [
            plain(
                "import subprocess\nsubprocess.run('sudo apt-get install -y cmake', shell=True)\nsubprocess.run(['cmake', '-B', 'b'], check=True)"
            )
        ],
    ),
    "PF-SYS-002": (
        [plain("import os\nos.system('make -C llama.cpp')")],
        [plain("import os\nos.system('cmake --build b')")],
    ),
    "PF-SYS-003": (
        [
            plain("import subprocess\nsubprocess.run(['ls'], check=True, capture_output=True)"),
            plain("import subprocess\nsubprocess.run(['ls'])"),
        ],
        [plain("import subprocess\nsubprocess.run(['ls'], check=True)")],
    ),
    "PF-ENV-001": (
        [
            plain("import os\nprint(os.environ['REPO'])"),
            *(plain(f"import os\n{line}\nprint(os.environ['OTHER'])") for line in SETS[:5]),
            {"script": plain("import os\nprint(os.environ['JOB_TOKEN'])"), "env": {"METRICS_API_URL": "https://x"}},
            plain("import os\ntry:\n    os.environ['REPO']\nfinally:\n    print(1)"),
            plain("import os\ntry:\n    made['x']()\nexcept KeyError:\n    pass\nprint(os.environ['REPO'])"),
        ],
        [
            plain(
                "import os\ndef read():\n    try:\n        return os.environ['REPO']\n    finally:\n        print(1)\n"
                "try:\n    read()\nexcept KeyError:\n    print(2)"
            ),
            {"script": plain("import os\nprint(os.environ['REPO'])"), "env": {"REPO": "x"}},
            plain("import os\nprint(*(os.environ['METRICS_API_URL'], os.environ['JOB_TOKEN'], os.environ['USER_ID']))"),
            plain("import os\nprint(os.environ['RANK'], os.environ.get('REPO'))"),
            plain("import os\nprint(os.environ['GPUWARDEN_METRICS'], os.environ['GPUWARDEN_JOB'])"),
            plain("import os\nos.environ['REPO'] = 'x'\nprint(os.environ['REPO'])"),
            plain("import os\ntry:\n    os.environ['REPO']\nexcept KeyError:\n    pass"),
            plain("import os, contextlib\nwith contextlib.suppress(KeyError):\n    print(os.environ['REPO'])"),
            plain("import os\nprint(os.environ.get('REPO') and os.environ['REPO'])"),
            *(plain(f"import os\n{line}\nprint(os.environ['REPO'])") for line in SETS),
        ],
    ),
    "PF-ENV-002": (
        [plain("import os\nname = os.environ.get('REPO')\nprint(name)")],
        [
            plain("import os\nname = os.environ.get('REPO')\nif not name:\n    raise SystemExit('REPO')"),
            plain("import os\nprint(os.getenv('REPO', 'x'))"),
        ],
    ),
    "PF-PUSH-001": (
        [
            {"script": sft(PUSH), "secrets": ()},
            {
                "script": plain(
                    "from huggingface_hub import HfApi\nHfApi().upload_folder(folder_path='o', repo_id='a/b')"
                ),
                "secrets": (),
            },
        ],
        [sft(PUSH), {"script": sft(), "secrets": ()}],
    ),
    "PF-PUSH-002": (
        [sft("push_to_hub=True"), sft() + "trainer.push_to_hub('a message')\n"],
        [sft(PUSH), sft(), sft() + "trainer.model.push_to_hub('me/x')\n"],
    ),
    "PF-PUSH-003": ([{"script": sft(), **SERVERLESS}], [{"script": sft(PUSH), **SERVERLESS}, sft()]),
    "PF-PUSH-004": (
        [{"script": sft(PUSH), **SERVERLESS}],
        [{"script": sft(PUSH), **SERVERLESS, "outputs": ("/hub/models/rehearsal/x",)}, sft(PUSH)],
    ),
    "PF-HW-001": (
        [{"script": sft(model="Qwen/Qwen2.5-7B"), "gpu": "a10g-small"}],
        [sft("per_device_train_batch_size=1"), {"script": sft(model="Qwen/Qwen2.5-7B"), "gpu": "no-such"}],
    ),
    "PF-HW-002": (
        [
            {"script": sft("bf16=True"), "gpu": "t4-small"},
            {"script": sft(), "gpu": "t4-small"},
            {
                "script": plain(
                    "from transformers import AutoModel\nAutoModel.from_pretrained('Qwen/Qwen3-0.6B', attn_implementation='flash_attention_2')"
                ),
                "gpu": "T4",
            },
        ],
        [{"script": sft("bf16=True"), "gpu": "L4"}, {"script": sft("fp16=True, bf16=False"), "gpu": "t4-small"}],
    ),
    "PF-HW-003": ([{"script": sft(), "gpu": "quantum-9000"}], [sft(), {"script": sft(), "gpu": "cpu-basic"}]),
    "PF-HW-004": ([{"script": sft(), "gpu": "a100x4"}], [{"command": ("torchrun", "t.py"), "gpu": "a100x4"}, sft()]),
    "PF-REL-001": (
        [sft("torch_compile=True"), plain("import torch\ntorch.compile(torch.nn.Linear(1, 1))")],
        [sft(), {"script": sft("torch_compile=True"), "proven": True}],
    ),
    "PF-REL-002": ([sft('optim="adamw_bnb_8bit"')], [sft('optim="adamw_torch"')]),
    "PF-REL-003": (
        [
            sft("dataloader_num_workers=8"),
            plain("from torch.utils.data import DataLoader\nDataLoader([], num_workers=32)"),
        ],
        [sft("dataloader_num_workers=4")],
    ),
    "PF-REL-004": ([sft()], [{"script": sft(), "proven": True}, {"script": sft("max_steps=10"), "timeout_s": 900}]),
    "PF-API-001": (
        [sft("max_seq_length=9"), sft().replace("train_dataset=ds", "train_dataset=ds, tokenizer=None")],
        [sft("max_length=9"), sft("max_seq_length=9").replace("trl>=1.16", "trl==0.15")],
    ),
    "PF-API-002": (
        [plain("from trl import PPOTrainer"), plain("import trl\ntrl.PPOConfig()")],
        [plain("from trl import SFTTrainer"), plain("from trl import PPOTrainer").replace("trl>=1.16", "trl<0.16")],
    ),
    "PF-TIME-003": (
        [{"script": sft("max_steps=100000, per_device_train_batch_size=8"), "timeout_s": 300}],
        [sft("max_steps=10")],
    ),
    "PF-OUT-003": ([{"script": sft(), "outputs": ("results",)}], [sft(), {"script": sft(), "outputs": ("out/final",)}]),
    "PF-OUT-004": (
        [
            plain(LOOP),
            sft('save_strategy="no"'),
            sft('save_strategy="no"') + "import json\njson.dump({}, open('m', 'w'))",
            plain(LOOP + "import numpy as np\nnp.savetxt('out/losses.txt', losses)"),
        ],
        [
            plain(LOOP + "torch.save({}, 'out/x.pt')"),
            sft(),
            sft('save_strategy="no"') + "trainer.save_model()",
            *(plain(LOOP + line) for line in WRITERS),
        ],
    ),
    "PF-SRC-003": (
        [{"command": ("uv", "run", "https://github.com/a/b/blob/main/t.py")}],
        [{"command": ("uv", "run", "https://example.org/t.py")}],
    ),
    "PF-ENV-003": (
        [sft('report_to="wandb"', more='"wandb"')],
        [{"script": sft('report_to="wandb"', more='"wandb"'), "secrets": ("WANDB_API_KEY",)}, sft()],
    ),
    "PF-API-003": (
        [
            sft("fp16=True, bf16=True"),
            sft("load_best_model_at_end=True"),
            GRPO.format(args="num_generations=8, per_device_train_batch_size=6"),
        ],
        [
            sft("fp16=True, bf16=False"),
            sft("load_best_model_at_end=True, eval_strategy='steps'"),
            GRPO.format(args="num_generations=4, per_device_train_batch_size=2, gradient_accumulation_steps=2"),
        ],
    ),
    "PF-API-004": (
        [plain("import trl\nimport unsloth", '"unsloth"')],
        [plain("import unsloth\nimport trl", '"unsloth"'), plain("import trl")],
    ),
    "PF-HUB-008": ([sft(model="google-bert/bert-base-uncased")], [sft()]),
    "PF-HW-005": ([{"script": sft(), "gpu": "cpu-basic"}], [sft(), {"script": plain(LOOP), "gpu": "cpu-basic"}]),
}
