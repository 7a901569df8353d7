"""Recognize the common row forms, and convert each to the form that a training method reads.

A row is first converted to one of a few plain forms: a conversation, a prompt with its answer, a pair of answers, an
answer with a label, text, or an image. A second step converts the plain form to the method's form. Conversions are
never guessed: if a row can't be converted, `BadRow` is raised with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any, Final

from gpuwarden.core.sanitize import line
from gpuwarden.lifecycle.templates.json_rows import Row
from gpuwarden.lifecycle.templates.rows import EXTRA
from gpuwarden.static_analysis.shipped_trainers import Trainer

_ROLES: Final = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "assistant": "assistant", "model": "assistant", "ai": "assistant",
    "system": "system", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
_TURN: Final = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
_CHOSEN: Final = ("chosen", "chosen_response", "response_j", "preferred", "accepted", "winner", "better")
_REJECTED: Final = ("rejected", "rejected_response", "response_k", "dispreferred", "loser", "worse")
_PROMPT: Final = ("prompt", "question", "instruction", "input", "query", "history", "problem")
_ANSWER: Final = ("completion", "output", "response", "answer", "target", "solution")
_CONTEXT: Final = ("input", "context")
_TWO: Final = (
    ("response_0", "response_1", "better_response_id", 0, 1),
    ("response_a", "response_b", "winner", "model_a", "model_b"),
    ("human_ref_A", "human_ref_B", "labels", 1, 0),
    ("answer_0", "answer_1", "score", 1, 0),
)  # the columns for the two answers and the preference, and the preference values for the first and the second answer


class BadRow(ValueError):
    """A row can't be converted. The message contains the reason."""


def plain_form(row: Row) -> tuple[str, Row]:
    """Return the name of a row's form, and the row in a plain form."""
    if EXTRA in row:
        raise BadRow("the row has more cells than the header; a cell that contains a comma must be quoted")
    for form, read in _FORMS:
        if (found := read(row)) is not None:
            return form, found
    raise BadRow(f"no supported form has the columns {line(', '.join(sorted(row)), 160)}")


def conversation_of(row: Row) -> Row | None:
    """Read a conversation as in ShareGPT, OpenAI messages or a variant of them: a list, a JSON string that contains a
    list, or a table of lists.
    """
    name = next((n for n in ("messages", "conversations", "conversation", "chat", "dialogue") if row.get(n)), None)
    if name is None or {"chosen", "rejected"} <= row.keys():
        return None
    messages = _messages(row[name])
    system = row.get("system") or row.get("system_prompt")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return {"messages": messages}


def _messages(value: Any) -> list[dict[str, str]]:
    """Convert turns to messages with role and content."""
    if isinstance(value, str):
        if value.lstrip()[:1] not in "[{":
            return transcript_of(value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow("the conversation is a string that is not JSON") from None
    if isinstance(value, dict):
        lists = {k: v for k, v in value.items() if isinstance(v, list)}
        size = min(map(len, lists.values()), default=0)
        value = [{k: v[n] for k, v in lists.items()} for n in range(size)]
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise BadRow("the conversation is not a list of turns")
    return [message_of(turn) for turn in value]


def message_of(turn: Row) -> dict[str, str]:
    """Convert a turn to a message with a standard role."""
    who = str(turn.get("role") or turn.get("from") or "").lower()
    content = turn.get("content", turn.get("value"))
    if who not in _ROLES:
        raise BadRow(f"a turn has the role {line(who or 'none', 40)!r}, which is unknown")
    if not isinstance(content, str):
        raise BadRow("a turn is not text")
    return {"role": _ROLES[who], "content": content}


def transcript_of(text: str) -> list[dict[str, str]]:
    r"""Convert a string in the form `\n\nHuman: ... \n\nAssistant: ...` to messages."""
    parts = _TURN.split(text)
    if len(parts) < 3 or parts[0].strip():
        raise BadRow("the text is not a transcript with Human and Assistant turns")
    turns = zip(parts[1::2], parts[2::2], strict=True)
    return [
        {"role": _ROLES[who.lower()] if who == "Human" else "assistant", "content": content} for who, content in turns
    ]


def pair_of(row: Row) -> Row | None:
    """Read a preferred and a rejected answer, with the prompt in a separate column or inside both answers."""
    good = next((n for n in _CHOSEN if row.get(n)), None)
    bad = next((n for n in _REJECTED if row.get(n)), None)
    if good is None or bad is None:
        return None
    chosen, rejected = row[good], row[bad]
    prompt = next((row[n] for n in _PROMPT if row.get(n)), None)
    inside = isinstance(chosen, list) or (prompt is None and isinstance(chosen, str) and _TURN.search(chosen))
    if inside:
        first, second = _messages(chosen), _messages(rejected)
        common = list(takewhile(lambda both: both[0] == both[1], zip(first[:-1], second[:-1], strict=False)))
        shared, first, second = [a for a, _ in common], first[len(common) :], second[len(common) :]
        beside = [] if prompt is None else _messages(prompt) if isinstance(prompt, list) else _prompt_messages(prompt)
        asked = shared or beside
        if (
            not asked
            or not first
            or not second
            or first[-1]["role"] != "assistant"
            or second[-1]["role"] != "assistant"
        ):
            raise BadRow("the two answers don't start with the same prompt")
        return {"prompt": asked, "chosen": first, "rejected": second}
    if prompt is None:
        raise BadRow("the pair has no prompt")
    return {"prompt": _prompt_messages(prompt, row), "chosen": _answered(chosen), "rejected": _answered(rejected)}


def judged_of(row: Row) -> Row | None:
    """Read two answers, and a column that states which answer is better."""
    for one, other, verdict, first, second in _TWO:
        if not {one, other, verdict} <= row.keys():
            continue
        prompt = next((row[n] for n in _PROMPT if row.get(n)), None)
        if prompt is None or row[verdict] is None:
            raise BadRow("the two answers have no prompt, or neither is preferred")
        if row[verdict] not in (first, second):
            raise BadRow(f"{verdict} is {line(repr(row[verdict]), 40)}, which does not prefer either answer")
        pair = (row[one], row[other]) if row[verdict] == first else (row[other], row[one])
        return {"prompt": _prompt_messages(prompt, row), "chosen": _answered(pair[0]), "rejected": _answered(pair[1])}
    return None


def marked_of(row: Row) -> Row | None:
    """Read a prompt, an answer and a label."""
    if not {"prompt", "completion", "label"} <= row.keys():
        return None
    if row["label"] not in (True, False):
        raise BadRow(f"the label is {line(row['label'], 40)!r}, not true or false")
    return {
        "prompt": _prompt_messages(row["prompt"]),
        "completion": _answered(row["completion"]),
        "label": bool(row["label"]),
    }


def exchange_of(row: Row) -> Row | None:
    """Read a row with a question and one answer, as in Alpaca and Dolly."""
    asked = next((n for n in _PROMPT if row.get(n)), None)
    answer = next((n for n in _ANSWER if row.get(n) and n != asked), None)
    if asked is None or answer is None:
        return None
    more = next((row[n] for n in _CONTEXT if n != asked and isinstance(row.get(n), str) and row[n]), "")
    prompt = _prompt_messages(row[asked], row)
    if more and isinstance(row[asked], str):
        prompt[-1]["content"] += f"\n\n{more}"
    return {"prompt": prompt, "completion": _answered(row[answer])}


def _prompt_messages(value: Any, row: Row | None = None) -> list[dict[str, str]]:
    """Convert a prompt to messages, with the row's system prompt first if the row has one."""
    if isinstance(value, list):
        return _messages(value)
    if not isinstance(value, str) or not value:
        raise BadRow("the prompt is empty or not text")
    system = (row or {}).get("system") or (row or {}).get("system_prompt")
    before = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    return [*before, {"role": "user", "content": value}]


def _answered(value: Any) -> list[dict[str, str]]:
    """Convert an answer to messages."""
    if isinstance(value, list):
        return _messages(value)
    if not isinstance(value, str) or not value.strip():
        raise BadRow("an answer is empty or not text")
    return [{"role": "assistant", "content": value}]


def text_of(row: Row) -> Row | None:
    """Read a row of plain text."""
    value = row.get("text") or row.get("content")
    return {"text": value} if isinstance(value, str) and value.strip() else None


def picture_of(row: Row) -> Row | None:
    """Read an image with its class or its objects. Objects may be lists in other columns, a table of lists, or a list
    of objects.
    """
    image = next((row[n] for n in ("image", "img", "file_name", "image_path") if row.get(n)), None)
    if image is None:
        return None
    if not isinstance(image, str):
        raise BadRow("the image is not a path")
    objects = row.get("objects") or row.get("annotations") or (row if "bbox" in row else None)
    if objects is not None:
        return {"image": image, "objects": objects_of(objects)}
    label = next((row[n] for n in ("label", "labels", "class") if row.get(n) is not None), None)
    if not isinstance(label, int | str):
        raise BadRow("the image has no label")
    return {"image": image, "label": label}


def objects_of(value: Any) -> Row:
    """Return boxes (x, y, width, height) with their categories."""
    if isinstance(value, list) and all(isinstance(o, dict) for o in value):
        value = {"bbox": [o.get("bbox") for o in value], "category": [_category(o) for o in value]}
    if not isinstance(value, dict):
        raise BadRow("the objects are neither a table of lists nor a list of objects")
    boxes, kinds = value.get("bbox"), _category(value)
    if not isinstance(boxes, list) or not isinstance(kinds, list) or len(boxes) != len(kinds):
        raise BadRow("the boxes and their categories don't match")
    if not all(isinstance(b, list) and len(b) == 4 and all(isinstance(n, int | float) for n in b) for b in boxes):
        raise BadRow("a box does not have four numbers")
    if not all(isinstance(kind, int | str) for kind in kinds):
        raise BadRow("an object has no category")
    return {"bbox": boxes, "category": kinds}


def _category(value: Row) -> Any:
    return next((value[n] for n in ("category", "categories", "category_id", "label", "labels") if n in value), None)


_FORMS: Final[tuple[tuple[str, Callable[[Row], Row | None]], ...]] = (
    ("conversation", conversation_of),
    ("pair of answers", pair_of),
    ("judged answers", judged_of),
    ("marked answer", marked_of),
    ("picture", picture_of),
    ("question and answer", exchange_of),
    ("text", text_of),
)


def for_method(row: Row, to: Trainer) -> Iterator[Row]:
    """Convert a plain row to the rows that a training method reads."""
    wanted = {name for names in to.wanted for name in names}
    if "chosen" in row and row["chosen"] == row["rejected"] and {"rejected", "label"} & wanted:
        raise BadRow("the two answers are the same")
    if "messages" in row and "messages" not in wanted:
        *asked, last = row["messages"]
        if last["role"] != "assistant" or not any(m["role"] == "user" for m in asked):
            raise BadRow("the conversation does not end with an answer")
        row = {"prompt": asked, "completion": [last]}
    if wanted == {"prompt"} and "prompt" in row:
        answer = {"answer": row["completion"][-1]["content"]} if "completion" in row else {}
        yield {"prompt": row["prompt"], **answer}
    elif any(set(names) <= row.keys() for names in to.wanted):
        yield row
    elif {"prompt", "chosen", "rejected"} <= row.keys() and "label" in wanted:
        yield {"prompt": row["prompt"], "completion": row["chosen"], "label": True}
        yield {"prompt": row["prompt"], "completion": row["rejected"], "label": False}
    elif {"prompt", "chosen"} <= row.keys() and "completion" in wanted:
        yield {"prompt": row["prompt"], "completion": row["chosen"]}
    elif {"anchor", "positive"} <= wanted and {"prompt", "completion"} <= row.keys():
        yield {"anchor": row["prompt"][-1]["content"], "positive": row["completion"][-1]["content"]}
    else:
        raise BadRow(f"{', '.join(sorted(row))} can't be converted to rows for {to.name}")
