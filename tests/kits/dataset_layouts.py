"""Columns of public datasets, from their cards or the dataset viewer, and the correct answer for a method.

The answers were decided before any code ran on the datasets, and those in UNSEEN were first used when the code was
finished. An answer is the value of `--columns` (empty if no column is renamed), or None if the rows must be converted
first. The answers for ShareGPT, Alpaca, and ORPO changed along with the trainers, which convert no rows; ORPO reads
pairs without a prompt.
"""

from __future__ import annotations

from typing import NamedTuple

S, N, F = "string", "int64", "float64"
M = "list<{content: string, role: string}>"
TURNS = "list<{from: string, value: string}>"
BOXES = "{id: list<int64>, area: list<int64>, bbox: list<list<float32>>, category: list<class<5>>}"


class Layout(NamedTuple):
    """One dataset for one method."""

    dataset: str
    method: str
    columns: dict[str, str]
    renames: str | None


def same(kind: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, kind)


SEEN = (
    Layout(
        "Open-Orca/OpenOrca",
        "sft",
        same(S, "id", "system_prompt", "question", "response"),
        "question=prompt,response=completion",
    ),
    Layout("HuggingFaceH4/ultrachat_200k", "sft", {**same(S, "prompt", "prompt_id"), "messages": M}, ""),
    Layout("tatsu-lab/alpaca", "sft", same(S, "instruction", "input", "output", "text"), ""),
    Layout("yahma/alpaca-cleaned", "sft", same(S, "output", "input", "instruction"), None),
    Layout("wasifis/med_sharegpt", "sft", {"conversations": TURNS}, None),
    Layout(
        "agie-ai/databricks-databricks-dolly-15k",
        "sft",
        same(S, "instruction", "context", "response", "category"),
        None,
    ),
    Layout("SelfCorrect/dolly", "cpt", same(S, "instruction", "context", "response", "category"), None),
    Layout(
        "HuggingFaceH4/ultrafeedback_binarized",
        "dpo",
        same(S, "prompt", "prompt_id")
        | same(M, "chosen", "rejected", "messages")
        | same(F, "score_chosen", "score_rejected"),
        "",
    ),
    Layout(
        "argilla/distilabel-intel-orca-dpo-pairs",
        "dpo",
        same(S, "system", "input", "chosen", "rejected", "labelling_model", "status")
        | {"generations": "list<string>", "rating": "list<float64>", "labelling_prompt": M},
        "input=prompt",
    ),
    Layout("Anthropic/hh-rlhf", "dpo", same(S, "chosen", "rejected"), ""),
    Layout("Anthropic/hh-rlhf", "orpo", same(S, "chosen", "rejected"), ""),
    Layout(
        "lvwerra/stack-exchange-paired",
        "dpo",
        {"qid": N, **same(S, "question", "date", "response_j", "response_k"), "metadata": "list<string>"},
        "question=prompt,response_j=chosen,response_k=rejected",
    ),
    Layout("trl-lib/kto-mix-14k", "kto", {"prompt": M, "completion": M, "label": "bool"}, ""),
    Layout(
        "AI-Lab-Makerere/beans",
        "image_classification",
        {"image_file_path": S, "image": "image", "labels": "class<3>"},
        "labels=label",
    ),
    Layout(
        "rishitdagli/cppe-5",
        "object_detection",
        {**same(N, "image_id", "width"), "image": "image", "objects": BOXES},
        "",
    ),
    Layout(
        "flipwooyoung/vlm_area",
        "object_detection",
        {"image": "image", "annotations": "{category: list<string>, bbox: list<list<int64>>, area: list<int64>}"},
        "annotations=objects",
    ),
    Layout(
        "mthandazo/rsod_object_detection_data",
        "object_detection",
        {"image": "image", "bbox": "list<list<float64>>", "area": "list<float64>", "category": S},
        None,
    ),
    Layout(
        "Omartificial-Intelligence-Space/natural-questions-hard-negatives",
        "sentence_embedding",
        same(S, "query", "answer", "negative"),
        "query=anchor,answer=positive",
    ),
    Layout("NghiemAbe/QQP_triplet", "sentence_embedding", same(S, "query", "positive", "negative"), "query=anchor"),
    Layout(
        "bobox/msmarco-co-condenser-processed",
        "sentence_embedding",
        {**same(S, "query", "positive"), "negatives": "list<string>"},
        "query=anchor",
    ),
    Layout(
        "man-ml/triplets_dataset",
        "sentence_embedding",
        {"set": "{neg: list<string>, pos: list<string>, query: string}"},
        None,
    ),
    Layout("sanjay920/code74k-sharegpt", "sft", same(S, "conversations", "id"), None),
    Layout("floleuerer/OASST-DE_sharegpt", "sft", {"conversation": TURNS}, None),
    Layout("LNTANOooo/sharegpt52k", "sft", {"conversation": M}, "conversation=messages"),
    Layout(
        "liyucheng/ShareGPT90K",
        "sft",
        {"id": S, "conversations": "{from: list<string>, value: list<string>}"},
        None,
    ),
    Layout(
        "jonathan-roberts1/MultiScene", "image_classification", {"label": "list<class<36>>", "image": "image"}, None
    ),
    Layout("burtenshaw/image-search-queries", "image_classification", {**same(S, "image", "query"), "label": N}, ""),
    Layout("Kyleyee/arithmetic-grpo", "grpo", {"prompt": M, "ground_truth": S}, ""),
    Layout("beyoru/MultiTurn_GRPO", "grpo", {"prompt": M, "answer": S}, ""),
    Layout("jdineen/grpo", "sft", same(S, "prompt", "completion"), ""),
    Layout(
        "AI-MO/NuminaMath-CoT", "grpo", {**same(S, "source", "problem", "solution"), "messages": M}, "problem=prompt"
    ),
    Layout("openai/gsm8k", "sft", same(S, "question", "answer"), "question=prompt,answer=completion"),
)
UNSEEN = (
    Layout(
        "teknium/OpenHermes-2.5",
        "sft",
        {
            **same(S, "source", "category", "system_prompt", "title"),
            "custom_instruction": "bool",
            "conversations": TURNS,
        },
        None,
    ),
    Layout("curtsmith/dolly-15k-llama3", "sft", same(S, "instruction", "context", "response", "category", "text"), ""),
    Layout("HuggingFaceH4/orca_dpo_pairs", "orpo", {"chosen": M, "rejected": M, "prompt": S}, ""),
    Layout("Sharathhebbar24/orca_dpo_pairs", "dpo", same(S, "chosen", "rejected", "prompt"), ""),
    Layout("arcee-ai/general-dpo-datasets", "dpo", same(S, "source", "system", "prompt", "chosen", "rejected"), ""),
    Layout(
        "meta-math/MetaMathQA",
        "sft",
        same(S, "type", "query", "original_question", "response"),
        "query=prompt,response=completion",
    ),
    Layout("Intel/orca_dpo_pairs", "orpo", same(S, "system", "question", "chosen", "rejected"), "question=prompt"),
    Layout("uoft-cs/cifar10", "image_classification", {"img": "image", "label": "class<10>"}, "img=image"),
    Layout(
        "uoft-cs/cifar100",
        "image_classification",
        {"img": "image", "fine_label": "class<100>", "coarse_label": "class<20>"},
        None,
    ),
    Layout("sentence-transformers/stsb", "sentence_embedding", {**same(S, "sentence1", "sentence2"), "score": F}, ""),
    Layout(
        "sentence-transformers/natural-questions",
        "sentence_embedding",
        same(S, "query", "answer"),
        "query=anchor,answer=positive",
    ),
    Layout(
        "stanfordnlp/SHP",
        "dpo",
        {**same(S, "post_id", "domain", "history", "human_ref_A", "human_ref_B"), **same(N, "labels", "score_A")},
        None,
    ),
    Layout(
        "PKU-Alignment/PKU-SafeRLHF",
        "dpo",
        {**same(S, "prompt", "response_0", "response_1"), **same(N, "better_response_id", "safer_response_id")},
        None,
    ),
    Layout(
        "nvidia/HelpSteer2",
        "sft",
        {**same(S, "prompt", "response"), **same(N, "helpfulness", "correctness", "coherence", "verbosity")},
        "response=completion",
    ),
    Layout(
        "hf-internal-testing/tiny-object-detection-aquarium-dataset",
        "object_detection",
        {
            "image": "image",
            **same(N, "height", "width"),
            "bbox": "list<list<int64>>",
            "label": "list<int64>",
            "category": "list<string>",
            "annotations": "{annotations: list<{area: int64, bbox: list<int64>, category_id: int64, image_id: int64}>}",
        },
        None,
    ),
    Layout(
        "microsoft/orca-math-word-problems-200k",
        "sft",
        same(S, "question", "answer"),
        "question=prompt,answer=completion",
    ),
    Layout(
        "Rasi1610/ce502_classification_data",
        "image_classification",
        {"image": "image", "label": "class<3>", "ground_truth": S},
        "",
    ),
)
