"""The Hub that the jobs of the corpus use: tiny models and small data, some of them deliberately broken."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from gpuwarden.rehearsal.hub.store import HubStore
from trainer_kit import language_model, picture_model, pictures, rows_of, texts, turn

TOKEN = "hf_seededseededseededseeded00000000"
READER = "hf_seededreaderseededreader00000000"
EXPIRED = "hf_seededexpiredseededexpired000000"
STRANGER = "hf_seededstrangerseededstranger0000"


def lines(rows: list[dict[str, Any]]) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def supply(store: HubStore) -> None:
    """Fill the Hub."""
    for token, name, role in (
        (TOKEN, "rehearsal", "write"),
        (READER, "rehearsal", "read"),
        (STRANGER, "other", "write"),
    ):
        store.add_user(token, name, role=role)
    _models(store)
    _texts(store)
    _broken(store)
    _pictures(store)


def _models(store: HubStore) -> None:
    more: dict[str, dict[str, Any]] = {"tiny-chat": {}, "tiny-base": {"template": None}, "tiny-nopad": {"pad": None}}
    with tempfile.TemporaryDirectory() as made:
        for name, options in more.items():
            _model(store, f"lab/{name}", language_model(Path(made, name), **options))
        tiny = {path.name: path.read_bytes() for path in Path(made, "tiny-chat").iterdir()}
        vit = Path(made, "vit")
        vit.mkdir()
        _model(store, "lab/tiny-vit", picture_model(vit, "image_classification"))
    store.put("model", "lab/large-70b", tiny, extra=_size(70_000_000_000))
    gated = store.put("model", "lab/gated", tiny, extra=_size(100_000))
    gated.gated = "manual"
    store.save(gated)
    private = store.put("model", "other/private", tiny, extra=_size(100_000))
    private.private = True
    store.save(private)
    store.put("model", "lab/no-weights", {n: c for n, c in tiny.items() if not n.endswith(".safetensors")})


def _model(store: HubStore, name: str, folder: Path) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    store.put("model", name, files, extra=_size(100_000))


def _size(parameters: int) -> dict[str, Any]:
    return {"safetensors": {"parameters": {"F32": parameters}, "total": parameters}}


def _texts(store: HubStore) -> None:
    chat, pairs = rows_of("sft"), rows_of("dpo")
    texts_only = [{"text": text} for text in texts(48)]
    store.put("dataset", "lab/chat", {"data/train.jsonl": lines(chat), "data/test.jsonl": lines(chat[:8])})
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/train.jsonl\n" for name in ("en", "de"))
    two = {"README.md": f"---\nconfigs:\n{configs}---\n", "en/train.jsonl": lines(chat), "de/train.jsonl": lines(chat)}
    store.put("dataset", "lab/chat-two", two)
    store.put("dataset", "lab/chat-train-only", {"data/train.jsonl": lines(chat)})
    store.put("dataset", "lab/pairs", {"data/train.jsonl": lines(pairs)})
    other = [{"question": r["prompt"], "good": r["chosen"], "bad": r["rejected"]} for r in pairs]
    store.put("dataset", "lab/pairs-other", {"data/train.jsonl": lines(other)})
    synonyms = [
        {"prompt": r["prompt"], "chosen_response": r["chosen"], "rejected_response": r["rejected"]} for r in pairs
    ]
    store.put("dataset", "lab/pairs-response", {"data/train.jsonl": lines(synonyms)})
    store.put("dataset", "lab/questions", {"data/train.jsonl": lines(rows_of("grpo"))})
    store.put(
        "dataset", "lab/prompts-only", {"data/train.jsonl": lines([{"prompt": r["prompt"]} for r in rows_of("grpo")])}
    )
    plain = [{"question": text, "solution": text[0]} for text in texts(48)]
    store.put("dataset", "lab/problems", {"data/train.jsonl": lines(plain)})
    store.put("dataset", "lab/texts", {"data/train.jsonl": lines(texts_only)})
    store.put("dataset", "lab/articles", {"data/train.jsonl": lines([{"content": r["text"]} for r in texts_only])})
    alpaca = [{"instruction": text, "input": "", "output": text[::-1]} for text in texts(48)]
    store.put("dataset", "lab/alpaca", {"data/train.jsonl": lines(alpaca)})
    talk = [{"conversations": [{"from": "human", "value": t}, {"from": "gpt", "value": t[::-1]}]} for t in texts(48)]
    store.put("dataset", "lab/sharegpt", {"data/train.jsonl": lines(talk)})


def _broken(store: HubStore) -> None:
    chat = rows_of("sft")
    ask = [turn("user", "one"), turn("user", "two")]
    null = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}]
    long = [{"prompt": "two plus two " * 200, "completion": "four"} for _ in range(48)]
    files: dict[str, dict[str, str]] = {
        "empty": {"data/train.jsonl": ""},
        "cut-line": {"data/train.jsonl": lines(chat) + '{"messages": [{"role": "us'},
        "columns-differ": {"data/train-0.jsonl": lines(chat), "data/train-1.jsonl": lines(rows_of("dpo")[:4])},
        "with-script": {"with-script.py": "import datasets\n", "README.md": "# Data\n"},
        "last-user": {"data/train.jsonl": lines([*chat[:20], {"messages": ask}] * 2)},
        "null-content": {"data/train.jsonl": lines(chat[:20] + null * 4)},
        "blank-texts": {"data/train.jsonl": lines([{"text": ""} for _ in range(48)])},
        "long-prompts": {"data/train.jsonl": lines(long)},
        "pairs-null": {"data/train.jsonl": lines([*rows_of("dpo")[:20], rows_of("dpo")[20] | {"rejected": None}])},
        "four-rows": {"data/train.jsonl": lines(chat[:1])},
    }
    for name, content in files.items():
        store.put("dataset", f"lab/{name}", content)
    gated = store.put("dataset", "lab/gated-chat", {"data/train.jsonl": lines(chat)})
    gated.gated = "manual"
    store.save(gated)
    secret = store.put("dataset", "rehearsal/private-chat", {"data/train.jsonl": lines(chat)})
    secret.private = True
    store.save(secret)


def _pictures(store: HubStore) -> None:
    import io

    from datasets import ClassLabel, Dataset, Features, Image, Value

    with tempfile.TemporaryDirectory() as made:
        rows = pictures(Path(made))
        raw = [(Path(made) / Path(row["image"]).name).read_bytes() for row in rows]
    grey = [_changed(picture, "L") for picture in raw]
    numbers = [index % 2 for index in range(len(raw))]
    two, texts_of = ClassLabel(names=["red", "green"]), Value("string")
    sets: dict[str, tuple[list[bytes], list[Any], Any]] = {
        "pictures": (raw, numbers, two),
        "pictures-grey": (grey, numbers, two),
        "pictures-names": (raw, ["red" if n else "green" for n in numbers], texts_of),
        "pictures-cut": ([*raw[:-1], raw[-1][:60]], numbers, two),
        "pictures-void": (raw, [*numbers[:-1], 255], Value("int64")),
        "pictures-three": (raw, [index % 3 for index in range(len(raw))], Value("int64")),
        "pictures-column": (raw, numbers, two),
    }
    for name, (images, labels, kind) in sets.items():
        column = "category" if name == "pictures-column" else "label"
        features = Features({"image": Image(), column: kind})
        values = {"image": [{"bytes": image, "path": None} for image in images], column: labels}
        buffer = io.BytesIO()
        Dataset.from_dict(values, features=features).to_parquet(buffer)
        store.put("dataset", f"lab/{name}", {"data/train-00000-of-00001.parquet": buffer.getvalue()})


def _changed(picture: bytes, mode: str) -> bytes:
    import io

    import PIL.Image

    buffer = io.BytesIO()
    PIL.Image.open(io.BytesIO(picture)).convert(mode).save(buffer, "PNG")
    return buffer.getvalue()
