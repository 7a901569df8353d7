"""Load the data, convert common formats, and check the rows before any weight is loaded."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain.coco import from_coco
from gputrain.outcome import Exit, Stop, rank, say
from gputrain.settings import Settings

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".tsv": "csv"}
LOOK = 2000
SHOW = 3
ALL = "*"
SHAREGPT = {
    "human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "bot": "assistant", "model": "assistant", "observation": "tool",
}  # fmt: skip
# Chat templates silently skip unknown roles.
NOT_ROLES = {"human", "prompter", "gpt", "chatgpt", "bing", "bard", "bot", "function_call", "observation"}


@dataclass
class Data:
    """Rows for training and evaluation, and their identity: count, columns and digest."""

    train: Any
    held_out: Any | None
    identity: dict[str, Any]


Check = Callable[[Any, str, set[str]], None]


def load(
    settings: Settings, wanted: tuple[tuple[str, ...], ...], also: tuple[str, ...] = (), check: Check | None = None
) -> Data:
    """Return the data for a run, with the columns that the method reads.

    Raises:
        Stop: the data can't be read, is empty, or lacks columns or the split.

    """
    check = check or check_rows
    train = prepared(settings, settings.dataset, settings.split, wanted, also, check)
    identity = {"rows": len(train), "columns": sorted(train.column_names), "sha256": digest(settings.dataset)}
    if settings.eval_dataset or settings.eval_split:
        source, split = settings.eval_dataset or settings.dataset, settings.eval_split or settings.split
        held_out = prepared(settings, source, split, wanted, also, check)
    elif settings.eval_fraction and len(train) > 1:
        size = min(max(1, round(len(train) * settings.eval_fraction)), settings.eval_rows, len(train) - 1)
        parts = train.train_test_split(test_size=size, seed=settings.seed)
        train, held_out = parts["train"], parts["test"]
    else:
        held_out = None
    if held_out is not None and len(held_out) > settings.eval_rows:
        held_out = held_out.select(range(settings.eval_rows))
    say(f"data: {len(train)} rows to train on, {len(held_out) if held_out is not None else 0} to evaluate on")
    return Data(train, held_out, identity)


def digest(source: str) -> str:
    """Return the SHA-256 digest of a local file, or an empty string for other sources."""
    path = Path(source)
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prepared(
    settings: Settings,
    source: str,
    split: str,
    wanted: tuple[tuple[str, ...], ...],
    also: tuple[str, ...],
    check: Check,
) -> Any:
    """Return one split with renamed columns and converted, checked rows."""
    rows = read(settings, source, split)
    if not len(rows):
        raise Stop(Exit.DATA, f"{source} (split {split}) has no rows", "choose other data or another --split")
    renames = pairs(settings.columns)
    for old, new in renames.items():
        if old not in rows.column_names:
            raise Stop(
                Exit.DATA, f"{source} has no column {old}; it has {', '.join(rows.column_names)}", "correct --columns"
            )
        if (new in rows.column_names and new not in renames) or [*renames.values()].count(new) > 1:
            raise Stop(
                Exit.DATA, f"{source} would have two columns {new}", "correct --columns; rename the other column too"
            )
    rows = rows.rename_columns(renames) if renames else rows
    before, (rows, what) = rows, converted(rows, wanted)
    has = set(rows.column_names)
    found = next((names for names in wanted if set(names) <= has), None)
    if found is None:
        needs = " or ".join(" + ".join(names) for names in wanted)
        message = f"{source} has the columns {', '.join(sorted(has))}; this method needs {needs}"
        fix = "rename with --columns old=new, or choose other data"
        if Path(source).is_dir() and "label" in needs:
            fix = "make one subfolder of pictures for each class, all at the same depth"
        raise Stop(Exit.DATA, message, fix)
    if what and rank() == 0:
        some = range(min(SHOW, len(rows)))
        print(f"rows converted from {what}; before:", *(f"  {shortened(before[i])}" for i in some), sep="\n")
        print("after:", *(f"  {shortened(rows[i])}" for i in some), sep="\n", flush=True)
    check(rows, source, {*found, *also} & has)
    return rows if ALL in also else rows.select_columns(sorted({*found, "prompt", *also} & has))


def pairs(text: str) -> dict[str, str]:
    """Return old=new,old=new as a mapping."""
    found = dict(part.partition("=")[::2] for part in text.split(",") if part.strip())
    if not all(found.values()):
        raise Stop(Exit.CONFIG, f"columns is {text!r}", "write old=new,old=new")
    return {old.strip(): new.strip() for old, new in found.items()}


def read(settings: Settings, source: str, split: str) -> Any:
    """Return one split of a file, a URL, a folder or a Hub dataset."""
    from datasets import get_dataset_split_names, load_dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = Path(source)
    try:
        if path.is_dir():
            return read_folder(path, split)
        if Path(source.partition("?")[0]).suffix in BUILDERS:
            return read_file_of_rows(settings, source, split)
        if path.exists():
            raise Stop(Exit.DATA, f"{source} is not {', '.join(BUILDERS)}", "convert it to one of these")
        splits = get_dataset_split_names(source, settings.dataset_config or None)
        if split.partition("[")[0] not in splits:
            raise Stop(Exit.DATA, f"{source} has no split {split}; it has {', '.join(splits)}", "correct the split")
        return load_dataset(source, settings.dataset_config or None, split=split)
    except Stop:
        raise
    except Exception as error:
        raise Stop(*why_not_read(source, error)) from error


def read_folder(path: Path, split: str) -> Any:
    """Return one split of a folder saved by datasets, a COCO folder, or a folder with one subfolder for each class."""
    from datasets import load_dataset, load_from_disk

    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        kept = load_from_disk(str(path))
        if hasattr(kept, "keys") and split not in kept:
            raise Stop(Exit.DATA, f"{path} has no split {split}; it has {', '.join(kept)}", "correct the split")
        return kept[split] if hasattr(kept, "keys") else kept
    if coco := sorted(path.glob("*annotations*.json")):
        return from_coco(path, coco[0])
    return load_dataset("imagefolder", data_dir=str(path), split=split)


def read_file_of_rows(settings: Settings, source: str, split: str) -> Any:
    """Return the rows of a file or URL."""
    from datasets import load_dataset

    path, suffix = Path(source), Path(source.partition("?")[0]).suffix
    if "://" not in source and not path.is_file():
        raise Stop(Exit.DATA, f"{source} does not exist", "correct --dataset; paths are relative to the working folder")
    if "://" not in source and not path.stat().st_size:
        raise Stop(Exit.DATA, f"{source} is empty", "choose other data")
    if split != settings.split:
        raise Stop(Exit.DATA, f"{source} is one file and has no split {split}", "pass --eval-dataset FILE")
    more = {"delimiter": "\t"} if suffix == ".tsv" else {}
    return load_dataset(BUILDERS[suffix], data_files=source, split="train", **more)


def why_not_read(source: str, error: Exception) -> tuple[Exit, str, str]:
    """Return the exit code, message and fix for data that can't be read."""
    cause = error.__cause__ or error
    text = " ".join(str(cause).split())[:300]
    kind = type(error).__name__
    if Path(source).is_dir() and (kind == "EmptyDatasetError" or "corresponds to no data" in text):
        fix = "use one subfolder of pictures for each class, COCO annotations next to pictures, or a file of rows"
        return Exit.DATA, f"the folder {source} has no rows that can be read", fix
    if isinstance(cause, StopIteration):
        return Exit.DATA, f"{source} has no rows", "choose other data or another --split"
    if "Gated" in kind or "gated" in text:
        return Exit.ENVIRONMENT, f"{source} is gated: {text}", "accept its terms on the Hub and pass HF_TOKEN"
    if kind in {"ConnectionError", "OfflineModeIsEnabled", "ConnectTimeout"}:
        return Exit.ENVIRONMENT, f"{source} can't be reached: {text}", "check the network, HF_HUB_OFFLINE and the name"
    return (
        Exit.DATA,
        f"{source} can't be read: {type(cause).__name__}: {text}",
        "check the name, --dataset-config and the file's lines",
    )


def shortened(row: dict[str, Any]) -> str:
    """Return a row as one line of at most 200 characters."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    return text if len(text) <= 200 else text[:199] + "…"


def converted(rows: Any, wanted: tuple[tuple[str, ...], ...]) -> tuple[Any, str]:
    """Return the rows in a format that the method reads, and the name of their original format."""
    has, names = set(rows.column_names), {n for group in wanted for n in group}
    pairs_too = {"prompt", "chosen", "rejected"} <= has & names
    if pairs_too and isinstance(rows[0]["prompt"], str) and isinstance(rows[0]["chosen"], list):
        return rows.map(from_whole_pair, remove_columns=rows.column_names), "pairs of whole conversations"
    if any(set(group) <= has for group in wanted):
        return rows, ""
    if "messages" in names and "conversations" in has:
        first = rows[0]["conversations"]
        if first and "from" in (first if isinstance(first, dict) else first[0]):
            return rows.map(from_sharegpt, remove_columns=rows.column_names), "ShareGPT"
        return rows.rename_column("conversations", "messages"), "conversations"
    if "completion" in names and {"instruction", "output"} <= has:
        return rows.map(from_alpaca, remove_columns=rows.column_names), "Alpaca"
    if names >= {"prompt"} and not names & {"chosen", "completion"} and "messages" in has:
        return rows.map(to_prompt, remove_columns=["messages"]), "messages"
    return rows, ""


def from_sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    """Return ShareGPT turns as messages."""
    turns = row["conversations"] or []
    if isinstance(turns, dict):  # stored as columns: a list of speakers and a list of texts
        turns = [{"from": who, "value": text} for who, text in zip(turns["from"], turns["value"], strict=True)]
    return {"messages": [{"role": SHAREGPT.get(t["from"], t["from"]), "content": t["value"]} for t in turns]}


def from_whole_pair(row: dict[str, Any]) -> dict[str, Any]:
    """Return two conversations as their common turns and the answers; `prompt` repeats the common turns as text.

    TRL concatenates the prompt and the answers, but can't concatenate a string and a conversation.
    """
    chosen, rejected = row["chosen"], row["rejected"]
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    prompt = chosen[:same] or [{"role": "user", "content": row["prompt"]}]
    return {"prompt": prompt, "chosen": chosen[same:], "rejected": rejected[same:]}


def from_alpaca(row: dict[str, Any]) -> dict[str, Any]:
    """Return an Alpaca row as one exchange."""
    text = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
    user, assistant = {"role": "user", "content": text}, {"role": "assistant", "content": row["output"]}
    return {"prompt": [user], "completion": [assistant]}


def to_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """Return the turns before the assistant's final turn."""
    turns = row["messages"]
    return {"prompt": turns[:-1] if turns and turns[-1]["role"] == "assistant" else turns}


def sample(rows: Any, most: int = LOOK) -> list[int]:
    """Return the indices of rows spread evenly over the data."""
    return list(range(0, len(rows), max(1, len(rows) // most)))


def check_rows(rows: Any, source: str, names: set[str]) -> None:
    """Raise Stop at the first row with a value that the method can't train on."""
    rows = rows.select_columns(sorted(names))
    looked, ties = sample(rows), 0
    for index in looked:
        row = rows[index]
        ties += "rejected" in names and row["chosen"] == row["rejected"]
        for name, value in row.items():
            if problem := why_bad(name, value):
                message = f"{source}, row {index + 1}, column {name}: {problem}"
                raise Stop(Exit.DATA, message, "correct or remove such rows; `gpuwarden template convert` can help")
    if ties == len(looked):
        raise Stop(Exit.DATA, f"{source}: the two answers are equal in every pair", "use pairs of different answers")
    if ties:
        say(f"{ties} of {len(looked)} pairs have two equal answers, from which the model can't learn")


def why_bad(name: str, value: Any) -> str:
    """Return the problem with one value, or an empty string."""
    if name == "tools":
        return "" if value is None or isinstance(value, list) else why_not_tools(value)
    if value is None or value in ("", []):
        return "empty"
    if name == "label" and not isinstance(value, (bool, int)):
        return f"{value!r} is not a label"
    if name == "messages" and isinstance(value, str):
        return "text instead of a list of messages"
    if name not in {"messages", "completion", "chosen", "rejected", "prompt"} or isinstance(value, str):
        return "" if name != "text" or isinstance(value, str) else f"{type(value).__name__} instead of text"
    if not isinstance(value, list) or not all(isinstance(t, dict) and "role" in t and "content" in t for t in value):
        return "neither text nor a list of messages with role and content"
    if strange := next((turn["role"] for turn in value if turn["role"] in NOT_ROLES), ""):
        return f"a message with role {strange!r}, which chat templates skip; use system, user, assistant or tool"
    if any(turn["content"] is None and not turn.get("tool_calls") for turn in value):
        return "a message without content"
    if name != "prompt" and value[-1]["role"] != "assistant":
        return "the last message is not the assistant's"
    if name == "prompt" and value[-1]["role"] == "assistant":
        return "the last message of a prompt is the assistant's"
    return ""


def why_not_tools(text: Any) -> str:
    """Return the reason why a string is not a list of tools, or an empty string."""
    try:
        return "" if isinstance(json.loads(text), list) else "not a list of tools"
    except (TypeError, ValueError):
        return "neither a list of tools nor a JSON string of a list of tools"
