"""Load the data, and check the rows before any weights are loaded."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from gputrain.coco import from_coco
from gputrain.outcome import Exit, Stop, say
from gputrain.settings import Settings, pairs

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".tsv": "csv"}
LOOK = 2000
JOINED = {"prompt", "completion", "chosen", "rejected"}  # either all text or all messages, because TRL joins them
ALL = "*"
# Chat templates silently skip unknown roles.
NOT_ROLES = {"human", "prompter", "gpt", "chatgpt", "bing", "bard", "bot", "function_call", "observation"}


@dataclass
class Data:
    """Rows for training and evaluation, and their identity: count, columns and digest."""

    train: Any
    held_out: Any | None
    identity: dict[str, Any]


Row = dict[str, Any]
Check = Callable[[Any, str, set[str]], None]


def load(
    settings: Settings,
    wanted: tuple[tuple[str, ...], ...],
    also: tuple[str, ...] = (),
    check: Check | None = None,
    convert: Callable[[Row], Row] | None = None,
) -> Data:
    """Return the data for a run.

    Args:
        settings: the settings.
        wanted: the sets of columns that the method can read; the first set that the data has is read.
        also: further columns to keep if the data has them; `ALL` keeps every column.
        check: raises Stop for a bad row; replaces `check_rows`.
        convert: converts each row of data that has another format.

    Raises:
        Stop: the data can't be read, is empty, or lacks columns or the split.

    """

    def prepared(source: str, split: str) -> Any:
        rows = renamed(settings, source, read(settings, source, split))
        try:
            rows = rows.map(convert, remove_columns=rows.column_names) if convert else rows
        except Exception as error:
            message = f"{source}: the function `convert` failed: {type(error).__name__}: {error}"
            raise Stop(Exit.DATA, message, "correct the function, or the rows") from error
        return checked(rows, source, wanted, also, check or check_rows)

    train = prepared(settings.dataset, settings.split)
    identity = {"rows": len(train), "columns": sorted(train.column_names), "sha256": digest(settings.dataset)}
    if settings.eval_dataset or settings.eval_split:
        held_out = prepared(settings.eval_dataset or settings.dataset, settings.eval_split or settings.split)
    elif settings.eval_fraction and len(train) > 1:
        size = min(max(1, round(len(train) * settings.eval_fraction)), settings.eval_rows, len(train) - 1)
        parts = train.train_test_split(test_size=size, seed=settings.seed)
        train, held_out = parts["train"], parts["test"]
    else:
        held_out = None
    train = train.select(range(min(len(train), settings.max_rows or len(train))))
    held_out = held_out.select(range(min(len(held_out), settings.eval_rows))) if held_out is not None else None
    say(f"data: {len(train)} rows to train on, {len(held_out) if held_out is not None else 0} to evaluate on")
    return Data(train, held_out, identity)


def digest(source: str) -> str:
    """Return the SHA-256 digest of a local file, or an empty string for other sources."""
    path = Path(source)
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def renamed(settings: Settings, source: str, rows: Any) -> Any:
    """Return the rows with the columns renamed according to the setting `columns`."""
    renames = pairs("columns", settings.columns)
    has = rows.column_names
    for old, new in renames.items():
        if old not in has:
            raise Stop(Exit.DATA, f"{source} has no column {old}; it has {', '.join(has)}", "correct --columns")
        if (new in has and new not in renames) or [*renames.values()].count(new) > 1:
            fix = "correct --columns; rename the other column too"
            raise Stop(Exit.DATA, f"{source} would have two columns {new}", fix)
    return rows.rename_columns(renames) if renames else rows


def checked(rows: Any, source: str, wanted: tuple[tuple[str, ...], ...], also: tuple[str, ...], check: Check) -> Any:
    """Check the rows, and return them with only the columns that the method reads."""
    has = set(rows.column_names)
    pairs_too = {"prompt", "chosen"} <= has and any("chosen" in names for names in wanted)
    if pairs_too and isinstance(rows[0]["prompt"], str) and isinstance(rows[0]["chosen"], list):
        has.remove("prompt")  # this prompt repeats the first messages of the answers, from which TRL extracts it
    found = next((names for names in wanted if set(names) <= has), None)
    if found is None:
        needs = " or ".join(" + ".join(names) for names in wanted)
        message = f"{source} has the columns {', '.join(sorted(has))}; this method needs {needs}"
        fix = "rename them with --columns old=new, or convert the rows with `gpuwarden template convert`"
        if Path(source).is_dir() and "label" in needs:
            fix = "create one subfolder of pictures for each class, all at the same depth"
        raise Stop(Exit.DATA, message, fix)
    check(rows, source, {*found, *also} & has)
    return rows if ALL in also else rows.select_columns(sorted({*found, "prompt", *also} & has))


def read(settings: Settings, source: str, split: str) -> Any:
    """Return one split of a file, a URL, a folder or a Hub dataset."""
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = Path(source)
    try:
        if path.is_dir():
            rows = read_folder(path, split)
        elif Path(source.partition("?")[0]).suffix in BUILDERS:
            rows = read_file_of_rows(settings, source, split)
        elif path.exists():
            raise Stop(
                Exit.DATA, f"{source} has none of the extensions {', '.join(BUILDERS)}", "convert it to one of them"
            )
        else:
            rows = read_hub(settings, source, split)
    except Stop:
        raise
    except Exception as error:
        raise Stop(*why_not_read(source, error)) from error
    if not len(rows):
        raise Stop(Exit.DATA, f"{source} (split {split}) has no rows", "choose other data or another --split")
    return rows


def read_hub(settings: Settings, source: str, split: str) -> Any:
    """Return one split of a Hub dataset."""
    from datasets import get_dataset_split_names, load_dataset

    splits = get_dataset_split_names(source, settings.dataset_config or None)
    if split.partition("[")[0] not in splits:
        raise Stop(Exit.DATA, f"{source} has no split {split}; it has {', '.join(splits)}", "correct the split")
    return load_dataset(source, settings.dataset_config or None, split=split)


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


def sample(rows: Any, most: int = LOOK) -> list[int]:
    """Return the indices of a sample of rows, spread evenly over the data."""
    return list(range(0, len(rows), max(1, len(rows) // most)))


def check_rows(rows: Any, source: str, names: set[str]) -> None:
    """Raise Stop at the first sampled row with a value that the method can't train on."""
    rows = rows.select_columns(sorted(names))
    looked, ties = sample(rows), 0
    kinds: set[type] = set()
    for index in looked:
        row = rows[index]
        kinds |= {type(value) for name, value in row.items() if name in JOINED}
        ties += "rejected" in names and row["chosen"] == row["rejected"]
        for name, value in row.items():
            if problem := why_bad(name, value) or (name == "chosen" and why_no_prompt(row)):
                message = f"{source}, row {index + 1}, column {name}: {problem}"
                raise Stop(Exit.DATA, message, "correct or remove such rows; `gpuwarden template convert` can help")
        if len(kinds) > 1:
            message = f"{source}, row {index + 1}: text and messages are mixed in the prompts and answers"
            raise Stop(Exit.DATA, message, "convert the rows with `gpuwarden template convert`")
    if ties == len(looked):
        raise Stop(Exit.DATA, f"{source}: the two answers are equal in every pair", "use pairs of different answers")
    if ties:
        say(f"{ties} of {len(looked)} pairs have two equal answers, from which the model can't learn")


def why_no_prompt(row: Row) -> str:
    """Return the reason why a pair's prompt is unknown, or an empty string."""
    chosen, rejected = row["chosen"], row["rejected"]
    if "prompt" in row or not isinstance(chosen, list) or not isinstance(rejected, list):
        return ""
    same = [first for first, _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))]
    asked = any(turn["role"] == "user" for turn in same)
    return "" if asked else "the two answers don't start with the same prompt"


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
