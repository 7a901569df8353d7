"""Write models as on the Hub: many architectures, shards, dtypes, tokenizers, and every kind of PEFT adapter."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path
from typing import Any

from healthy import configuration, family
from healthy.torch_files import torch

DECODER = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT = {
    "vocab_size": 256,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
T5 = {
    "vocab_size": 256,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 256,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
}
WHISPER = {
    "vocab_size": 256,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 16,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "Llama tied": ("LlamaForCausalLM", "LlamaConfig", DECODER | {"tie_word_embeddings": True}),
    "Llama with biases": ("LlamaForCausalLM", "LlamaConfig", DECODER | {"attention_bias": True, "mlp_bias": True}),
    "Llama classifier": ("LlamaForSequenceClassification", "LlamaConfig", DECODER | {"num_labels": 3}),
    "Llama without head": ("LlamaModel", "LlamaConfig", DECODER),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "Qwen2 tied": ("Qwen2ForCausalLM", "Qwen2Config", DECODER | {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER),
    "Mistral": ("MistralForCausalLM", "MistralConfig", DECODER),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", DECODER | {"num_local_experts": 2}),
    "Qwen3 MoE": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        DECODER | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    ),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", DECODER),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", DECODER),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", DECODER),
    "Phi": ("PhiForCausalLM", "PhiConfig", DECODER),
    "Phi3": ("Phi3ForCausalLM", "Phi3Config", DECODER),
    "Falcon": ("FalconForCausalLM", "FalconConfig", {k: v for k, v in DECODER.items() if k != "head_dim"}),
    "OLMo2": ("Olmo2ForCausalLM", "Olmo2Config", DECODER),
    "SmolLM3": ("SmolLM3ForCausalLM", "SmolLM3Config", DECODER),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", DECODER),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "GPT-2 without head": ("GPT2Model", "GPT2Config", GPT),
    "GPT-J": ("GPTJForCausalLM", "GPTJConfig", GPT | {"rotary_dim": 4}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", ENCODER),
    "BLOOM": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 256, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 256,
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
            "pad_token_id": 1,
        },
    ),
    "Mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": 256,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "RecurrentGemma": (
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        DECODER | {"num_hidden_layers": 3, "lru_width": 32},
    ),
    "BERT masked": ("BertForMaskedLM", "BertConfig", ENCODER),
    "BERT classifier": ("BertForSequenceClassification", "BertConfig", ENCODER),
    "BERT": ("BertModel", "BertConfig", ENCODER),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "XLM-RoBERTa tokens": ("XLMRobertaForTokenClassification", "XLMRobertaConfig", ENCODER),
    "DistilBERT": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": 256, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
    "ELECTRA": ("ElectraForPreTraining", "ElectraConfig", ENCODER | {"embedding_size": 16}),
    "DeBERTa-v2": ("DebertaV2ForSequenceClassification", "DebertaV2Config", ENCODER),
    "ALBERT": ("AlbertForMaskedLM", "AlbertConfig", ENCODER | {"embedding_size": 16}),
    "ModernBERT": ("ModernBertForMaskedLM", "ModernBertConfig", ENCODER),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
    "T5 gated": (
        "T5ForConditionalGeneration",
        "T5Config",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "BART": ("BartForConditionalGeneration", "BartConfig", BART),
    "Marian": ("MarianMTModel", "MarianConfig", BART | {"pad_token_id": 0, "decoder_start_token_id": 0}),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "ViT": ("ViTForImageClassification", "ViTConfig", VISION),
    "DINOv2": ("Dinov2Model", "Dinov2Config", VISION),
    "CLIP": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {k: v for k, v in ENCODER.items() if k != "pad_token_id"},
            "vision_config": VISION,
            "projection_dim": 16,
        },
    ),
    "SigLIP": (
        "SiglipModel",
        "SiglipConfig",
        {"text_config": {k: v for k, v in ENCODER.items() if k != "pad_token_id"}, "vision_config": VISION},
    ),
    "YOLOS": ("YolosForObjectDetection", "YolosConfig", VISION | {"num_detection_tokens": 5, "image_size": [16, 16]}),
    "SegFormer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "hidden_sizes": [8, 8, 8, 8],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 1, 1],
            "decoder_hidden_size": 8,
        },
    ),
    "ResNet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"},
    ),
    "Swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        ENCODER
        | {
            "conv_dim": [8, 8],
            "conv_stride": [2, 2],
            "conv_kernel": [3, 3],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
}


def build(name: str, **more: Any) -> Any:
    import transformers

    torch()
    made, config, how = MODELS[name]
    return getattr(transformers, made)(getattr(transformers, config)(**(how | more)))


def tokenizer(size: int = 256) -> Any:
    """Return a byte-level BPE tokenizer with at most `size` tokens, trained on one sentence."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.train_from_iterator(
        ["the cat sat on the mat"] * 10, trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<eos>"])
    )
    found = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")
    found.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return found


@family("transformers model", {n: n for n in MODELS}, "torch", "transformers")
def model(at: Path, name: str) -> None:
    build(name).save_pretrained(at)


@family("transformers dtype", ("float16", "bfloat16", "float64"), "torch", "transformers")
def model_dtype(at: Path, dtype: str) -> None:
    build("Llama").to(getattr(torch(), dtype)).save_pretrained(at)
    tokenizer().save_pretrained(at)


@family("transformers shards", ("Llama tied", "T5", "Mixtral", "BERT masked"), "torch", "transformers")
def shards(at: Path, name: str) -> None:
    build(name).save_pretrained(at, max_shard_size="40KB")


@configuration("transformers with tokenizer and resized embedding", "torch", "transformers")
def resized(at: Path) -> None:
    made, words = build("Qwen2 tied"), tokenizer()
    words.add_tokens(["<a>", "<b>"])
    made.resize_token_embeddings(264, pad_to_multiple_of=8)
    made.save_pretrained(at)
    words.save_pretrained(at)


@configuration("transformers torch file of a state dict", "torch", "transformers")
def old_bin(at: Path) -> None:
    made = build("Llama tied")
    torch().save(made.state_dict(), at / "pytorch_model.bin")
    made.config.save_pretrained(at)
    made.generation_config.save_pretrained(at)


@configuration("transformers pushed with remote code in its config", "torch", "transformers")
def remote_code(at: Path) -> None:
    made = build("Llama")
    made.save_pretrained(at)
    config = json.loads((at / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnModel"}, "architectures": ["OwnModel"]}
    (at / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    (at / "modeling_own.py").write_text("class OwnModel:\n    pass\n")


@configuration("image processor", "transformers", "PIL")
def processor(at: Path) -> None:
    from transformers import CLIPImageProcessorPil

    CLIPImageProcessorPil().save_pretrained(at)


# -------------------------------------------------------------------------------------------------------------- PEFT

_VIRTUAL = {"num_virtual_tokens": 4}
_TARGETS = {"target_modules": ["q_proj", "v_proj"]}
MORE: dict[str, dict[str, Any]] = {
    "ADALORA": _TARGETS | {"total_step": 10},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "PROMPT_TUNING": _VIRTUAL,
    "MULTITASK_PROMPT_TUNING": _VIRTUAL | {"num_tasks": 2},
    "P_TUNING": _VIRTUAL | {"encoder_hidden_size": 16},
    "PREFIX_TUNING": _VIRTUAL,
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 1},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]},
    "FOURIERFT": _TARGETS | {"n_frequency": 20},
    "VBLORA": _TARGETS | {"num_vectors": 16, "vector_length": 4, "topk": 2},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2], "target_modules": ["embed_tokens"]},
    "WAVEFT": _TARGETS | {"n_frequency": 20},
    "RANDLORA": _TARGETS | {"r": 4},
    "BOFT": _TARGETS | {"boft_block_size": 4},
    "OFT": _TARGETS | {"oft_block_size": 4},
    "MISS": _TARGETS | {"r": 4},
    "PSOFT": _TARGETS | {"r": 4},
    "ROAD": _TARGETS | {"group_size": 8},
    "SHIRA": _TARGETS | {"r": 4},
    "C3A": _TARGETS | {"block_size": 16},
    "OSF": _TARGETS,
    "CARTRIDGE": _VIRTUAL,
}


def peft_kinds() -> list[str]:
    """Return the names of peft's types from the single file that defines them: importing all of peft takes seconds."""
    spec = importlib.util.find_spec("peft")
    if spec is None or spec.origin is None:
        return ["LORA"]
    types = runpy.run_path(str(Path(spec.origin).parent / "utils" / "peft_types.py"))["PeftType"]
    return [kind.value for kind in types if kind.value != "XLORA"]


@family("PEFT", peft_kinds(), "torch", "transformers", "peft")
def adapter(at: Path, kind: str) -> None:
    import peft

    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind](task_type="CAUSAL_LM", **MORE.get(kind, _TARGETS))
    peft.get_peft_model(build("Llama"), config).save_pretrained(at)


LORA: dict[str, dict[str, Any]] = {
    "all linear": {"target_modules": "all-linear"},
    "regular expression": {"target_modules": r".*\.(q|v)_proj"},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head"]},
    "rank pattern": _TARGETS | {"rank_pattern": {"q_proj": 3}},
    "modules to save": _TARGETS | {"modules_to_save": ["lm_head"]},
    "DoRA": _TARGETS | {"use_dora": True},
    "some layers": _TARGETS | {"layers_to_transform": [0]},
    "bias": _TARGETS | {"bias": "lora_only"},
    "rsLoRA, rank 1": _TARGETS | {"r": 1, "use_rslora": True},
    "PiSSA": _TARGETS | {"init_lora_weights": "pissa"},
    "trainable tokens": _TARGETS | {"trainable_token_indices": [1, 2]},
    "parameters": {"target_parameters": ["lm_head.weight"], "target_modules": ["q_proj"]},
    "exclude": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["model.layers.0.self_attn.v_proj"]},
}


@family("LoRA", LORA, "torch", "transformers", "peft")
def lora(at: Path, how: dict[str, Any]) -> None:
    import peft

    peft.get_peft_model(build("Llama"), peft.LoraConfig(**({"task_type": "CAUSAL_LM", "r": 4} | how))).save_pretrained(
        at
    )


@family("LoRA on", ("GPT-2", "BERT classifier", "T5", "Mixtral", "ViT"), "torch", "transformers", "peft")
def lora_on(at: Path, name: str) -> None:
    import peft

    target = {
        "GPT-2": ["c_attn"],
        "BERT classifier": ["query", "value"],
        "T5": ["q", "v"],
        "Mixtral": ["q_proj"],
        "ViT": ["q_proj"],
    }
    kind = {"BERT classifier": "SEQ_CLS", "T5": "SEQ_2_SEQ_LM"}.get(name)
    made = build(name)
    wanted = target[name]
    if not any(n.endswith(tuple(wanted)) for n, _ in made.named_modules()):
        wanted = ["query", "value"]
    peft.get_peft_model(made, peft.LoraConfig(task_type=kind, r=4, target_modules=wanted)).save_pretrained(at)


@configuration("LoRA, two adapters", "torch", "transformers", "peft")
def two_adapters(at: Path) -> None:
    import peft

    made = peft.get_peft_model(build("Llama"), peft.LoraConfig(task_type="CAUSAL_LM", **_TARGETS))
    made.add_adapter("second", peft.LoraConfig(r=2, **_TARGETS))
    made.save_pretrained(at)


@configuration("LoRA merged", "torch", "transformers", "peft")
def merged(at: Path) -> None:
    import peft

    peft.get_peft_model(
        build("Llama"), peft.LoraConfig(task_type="CAUSAL_LM", **_TARGETS)
    ).merge_and_unload().save_pretrained(at)
