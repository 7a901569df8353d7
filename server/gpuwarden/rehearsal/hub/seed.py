"""Define the initial repos of a rehearsal Hub. They have real ids and columns, with a few invented rows each.

Parameter counts and column names are those of the real repos; the rows, likes and downloads are invented.
"""

from __future__ import annotations

import json
from typing import Any

from gpuwarden.rehearsal.hub.store import HubStore

TOKEN = "hf_rehearsalrehearsalrehearsal0000"  # noqa: S105  (valid only for the rehearsal Hub)
USER = "rehearsal"

_CHAT = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]
_PAIR = {
    "chosen": _CHAT,
    "rejected": [_CHAT[0], {"role": "assistant", "content": "6"}],
    "score_chosen": 8.0,
    "score_rejected": 3.5,
}

MODELS: dict[str, tuple[int, str, bool]] = {
    "Qwen/Qwen2.5-0.5B": (494_032_768, "Qwen2ForCausalLM", True),
    "Qwen/Qwen2.5-0.5B-Instruct": (494_032_768, "Qwen2ForCausalLM", True),
    "Qwen/Qwen2.5-1.5B": (1_543_714_304, "Qwen2ForCausalLM", True),
    "Qwen/Qwen2.5-7B": (7_615_616_512, "Qwen2ForCausalLM", True),
    "Qwen/Qwen2.5-7B-Instruct": (7_615_616_512, "Qwen2ForCausalLM", True),
    "Qwen/Qwen3-0.6B": (751_632_384, "Qwen3ForCausalLM", True),
    "openai-community/gpt2": (137_022_720, "GPT2LMHeadModel", False),
    "google-bert/bert-base-uncased": (110_106_428, "BertForMaskedLM", False),
    "HuggingFaceTB/SmolLM2-135M": (134_515_008, "LlamaForCausalLM", False),
    "PekingU/rtdetr_v2_r18vd": (20_254_464, "RTDetrV2ForObjectDetection", False),
    "google/vit-base-patch16-224": (86_567_656, "ViTForImageClassification", False),
}
_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": {
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
}
"""Fields of config.json by model. Qwen3-0.6B's files store the tied layer twice, so they contain 0.75 B parameters."""
DATASETS: dict[str, list[dict[str, Any]]] = {
    "trl-lib/Capybara": [{"source": "Airoboros", "messages": _CHAT, "num_turns": 1}] * 20,
    "trl-lib/ultrafeedback_binarized": [_PAIR] * 20,
    "trl-lib/tldr": [{"prompt": "SUBREDDIT: r/test\n\nTL;DR:", "completion": " a short text"}] * 20,
    "trl-lib/kto-mix-14k": [{"prompt": _CHAT[:1], "completion": _CHAT[1:], "label": True}] * 20,
    "trl-lib/DeepMath-103K": [{"prompt": _CHAT[:1], "solution": "5"}] * 20,
    "trl-lib/math_shepherd": [{"prompt": "Q", "completions": ["a", "b"], "labels": [True, False]}] * 20,
    "argilla/dpo-mix-7k": [{"dataset": "mix", **_PAIR, "chosen_rating": 4.0, "rejected_rating": 2.0}] * 20,
    "argilla/distilabel-intel-orca-dpo-pairs": [
        {"system": "", "input": "2 + 3?", "chosen": "5", "rejected": "6", "rating": [9.0, 4.0]}
    ]
    * 20,
    "HuggingFaceH4/ultrachat_200k": [{"prompt": "2 + 3?", "prompt_id": "a", "messages": _CHAT}] * 20,
    "tatsu-lab/alpaca": [{"instruction": "Add", "input": "2 3", "output": "5", "text": "Add 2 3: 5"}] * 20,
    "stanfordnlp/imdb": [{"text": "a film", "label": 1}] * 20,
    "Salesforce/wikitext": [{"text": "a page"}] * 20,
    "rishitdagli/cppe-5": [
        {
            "image_id": 1,
            "image": {"src": "a.png"},
            "width": 64,
            "height": 64,
            "objects": {"bbox": [[1.0, 2.0, 3.0, 4.0]], "category": [0], "area": [12.0]},
        }
    ]
    * 20,
    "ethz/food101": [{"image": {"src": "a.png"}, "label": 3}] * 20,
}
RENAMED = {"model": {"gpt2": "openai-community/gpt2", "bert-base-uncased": "google-bert/bert-base-uncased"}}
RENAMED["dataset"] = {"imdb": "stanfordnlp/imdb", "wikitext": "Salesforce/wikitext", "cppe-5": "rishitdagli/cppe-5"}


def seed(store: HubStore, token: str = TOKEN) -> None:
    """Add the initial repos and a user with `token` to a store. Existing repos are not changed.

    Any caller with `token` can run programs on this machine as jobs.
    """
    store.add_user(token, USER, orgs=("rehearsal-org",))
    for rank, (repo_id, (params, arch, chat)) in enumerate(MODELS.items()):
        if store.get("model", repo_id) is None:
            _model(store, repo_id, params, arch, chat=chat, likes=100 - rank)
    for rank, (repo_id, rows) in enumerate(DATASETS.items()):
        if store.get("dataset", repo_id) is None:
            lines = "\n".join(json.dumps(r) for r in rows)
            card = f"---\nlicense: apache-2.0\n---\n# {repo_id}\n"
            fields = {"downloads": 10_000 - 100 * rank, "likes": 50}
            store.put("dataset", repo_id, {"README.md": card, "data/train.jsonl": lines}, **fields)
    for kind, names in RENAMED.items():
        for old, new in names.items():
            store.alias(kind, old, new)
    if store.get("model", "meta-llama/Llama-3.2-1B") is None:
        _model(store, "meta-llama/Llama-3.2-1B", 1_235_814_400, "LlamaForCausalLM", chat=False, likes=90)
        llama = store.get("model", "meta-llama/Llama-3.2-1B")
        assert llama is not None
        llama.gated = "manual"
        store.save(llama)


def furnish(store: HubStore, repos: list[dict[str, Any]], token: str) -> None:
    """Fill a store with repos.

    Each is described by `{"repo", "kind", "columns", "writable", "gated", "access", "readme"}`.
    A dataset has a hundred rows, with conversations in the column `messages` and text in all others. A gated repo
    grants the user access if `access` is set; a writable repo belongs to one of the user's organizations.
    """
    orgs = {r["repo"].partition("/")[0] for r in repos if r.get("writable")}
    store.add_user(token, USER, orgs=sorted(orgs))
    for row in repos:
        if row["kind"] == "dataset":
            lines = []
            for n in range(100):
                cells: dict[str, Any] = {column: f"{column} {n}" for column in row["columns"]}
                if text := cells.get("messages"):
                    cells["messages"] = [{"role": role, "content": text} for role in ("user", "assistant")]
                lines.append(json.dumps(cells))
            files = {"README.md": row.get("readme", ""), "data/train.jsonl": "\n".join(lines)}
            store.put("dataset", row["repo"], files)
        else:
            _model(store, row["repo"], 1_235_814_400, "LlamaForCausalLM", chat=False, likes=1)
        repo = store.get(row["kind"], row["repo"])
        assert repo is not None
        repo.gated, repo.grants = "manual" if row.get("gated") else False, [USER] if row.get("access") else []
        store.save(repo)


def _model(store: HubStore, repo_id: str, params: int, arch: str, *, chat: bool, likes: int) -> None:
    tokenizer = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"} if chat else {"eos_token": "x"}
    files = {
        "README.md": "---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n",
        "config.json": json.dumps({"architectures": [arch], "model_type": "x"} | _SHAPES.get(repo_id, {})),
        "tokenizer_config.json": json.dumps(tokenizer),
    }
    # The weights are omitted: they would need gigabytes, and clients request only the Hub's summary of their headers.
    extra = {"safetensors": {"parameters": {"BF16": params}, "total": params}}
    store.put("model", repo_id, files, likes=likes, downloads=1_000 * likes, extra=extra)
