"""Generated stand-ins for a rehearsal's Hub files: configs by model name, one small tokenizer, and rows by column.

Except for the vocabulary, the configs have the sizes of real models, so that size reduction is tested too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from foreign_kit import CORPUS, _table
from gpuwarden.remote.first_step.outcome import Outcome
from gpuwarden.remote.first_step.start import Limits, Order, rehearse

SCRIPTS = CORPUS / "first_step"
VOCABULARY = 560
_IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16", **_IDS,
}  # fmt: skip
_BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 768, "intermediate_size": 3072,
    "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 512, **_IDS,
}  # fmt: skip
_FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen", {**_LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}),
    ("t5", {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 768, "d_ff": 2048,
            "d_kv": 64, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0, **_IDS}),
    ("mt0", {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"], "d_model": 512, "d_ff": 1024,
             "d_kv": 64, "num_layers": 8, "num_heads": 6, "decoder_start_token_id": 0, **_IDS}),
    ("bart", {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "d_model": 768,
              "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
              "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "decoder_start_token_id": 2, **_IDS}),
    ("opt-", {"model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 1024, "ffn_dim": 4096,
              "word_embed_proj_dim": 512, "num_hidden_layers": 24, "num_attention_heads": 16,
              "max_position_embeddings": 2048, **_IDS}),
    ("gpt2", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12,
              **_IDS}),
    ("distilbert", {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"], "dim": 768,
                    "hidden_dim": 3072, "n_layers": 6, "n_heads": 12, **_IDS}),
    ("roberta", {**_BERT, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "pad_token_id": 1}),
    *((name, _BERT) for name in ("bert", "minilm", "mpnet", "splade", "mxbai")),
)  # fmt: skip
_OTHERS = ("-vl", "gemma-3", "gemma-4", "flux", "diffusion", "whisper", "vision", "bloomz", "modernbert", "gpt-oss")
_CHAT = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "It is four."}]
_TEXT = "The quick brown fox jumps over the lazy dog. #### 4"
_CELLS: dict[str, Any] = {
    "messages": _CHAT, "chosen": _CHAT, "rejected": [_CHAT[0], {"role": "assistant", "content": "Five."}],
    "score_chosen": 5.0, "score_rejected": 2.0, "num_turns": 1, "label": 1, "labels": [True, False],
    "completions": ["one", "two"], "score": 0.5, "idx": 1, "tags": ["one"],
    "conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hello."}],
}  # fmt: skip
_ROWS: dict[str, dict[str, Any]] = {
    "trl-lib/kto-mix-14k": {"prompt": _CHAT[:1], "completion": _CHAT[1:], "label": True},
}


def config_of(name: str) -> dict[str, Any] | None:
    """Return the config of a model's family; None if unknown."""
    low = name.lower()
    if any(word in low for word in _OTHERS):
        return None
    return next((config for word, config in _FAMILIES if word in low), _LLAMA)


@cache
def tokenizer_files() -> dict[str, bytes]:
    """Return the files of a small byte-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [_TEXT], trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    )
    names = dict(zip(("pad", "bos", "eos", "unk", "mask"), special, strict=False))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, cls_token="<s>", sep_token="</s>", model_max_length=2048,
        **{f"{name}_token": text for name, text in names.items()},
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def models_for(*texts: str) -> dict[str, dict[str, bytes]]:
    """Return the files of the models named in these texts."""
    named = [name for name in _table()["models"] if any(name in text for text in texts)]
    configs = {name: config for name in named if (config := config_of(name)) is not None}
    return {n: {"config.json": json.dumps(c).encode(), **tokenizer_files()} for n, c in configs.items()}


@cache
def datasets_known() -> dict[str, Any]:
    """Return two rows of each dataset whose columns are known."""
    found = {}
    for name, configs in _table()["datasets"].items():
        rows = {
            c: {k: _ROWS.get(name, _CELLS).get(k, _TEXT) for k in a["columns"]}
            for c, a in configs.items()
            if a.get("columns")
        }
        if rows:
            made = {
                c: {"splits": {s: {"rows": [row, dict(row)]} for s in configs[c]["splits"]}} for c, row in rows.items()
            }
            found[name] = {"configs": made}
    return found


def rehearsed(text: str, args: tuple[str, ...] = (), limits: Limits | None = None, **more: Any) -> Outcome:
    """Rehearse a script with this interpreter and the generated files."""
    given = {"models": models_for(text, *args), "datasets": datasets_known(), "secrets": ("HF_TOKEN", "WANDB_API_KEY")}
    return rehearse(Order(text, args, **{**given, **more}), sys.executable, (), limits)
