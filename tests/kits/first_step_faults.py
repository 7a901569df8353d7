"""Insert faults into training scripts automatically that only running the script reveals."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Fault = Callable[[str, ast.Module], "str | None"]
_CONFIGURES = re.compile(r"\w*TrainingArguments|(SFT|DPO|GRPO|KTO|RLOO|Reward|ORPO|CPO|PRM)Config")
_SAVES = frozenset({"save_pretrained", "save_model", "save_state", "save", "push_to_hub", "create_model_card"})


def replaced(text: str, node: ast.expr | ast.stmt | ast.keyword, new: str) -> str:
    """Return the text with a node replaced."""
    lines = text.splitlines(keepends=True)
    start = sum(len(line.encode()) for line in lines[: node.lineno - 1]) + node.col_offset
    end = sum(len(line.encode()) for line in lines[: (node.end_lineno or 0) - 1]) + (node.end_col_offset or 0)
    raw = text.encode()
    return (raw[:start] + new.encode() + raw[end:]).decode()


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield a script's calls, each with the last part of the function's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""), node


def last_save(tree: ast.Module) -> ast.Call | None:
    """Return the last call that saves."""
    found = [call for name, call in calls(tree) if name in _SAVES and isinstance(call.func, ast.Attribute)]
    return max(found, key=lambda call: call.lineno, default=None)


def keyword_in_a_dictionary(text: str, tree: ast.Module) -> str | None:
    for name, call in calls(tree):
        if _CONFIGURES.fullmatch(name) and call.keywords and not call.args:
            inner = ", ".join(ast.unparse(keyword) for keyword in call.keywords)
            return replaced(text, call, f"{ast.unparse(call.func)}(**dict({inner}, **{{'lerning' + '_rate_x': 1}}))")
    return None


def setting_of_another_type(text: str, tree: ast.Module) -> str | None:
    for name, call in calls(tree):
        for keyword in call.keywords if _CONFIGURES.fullmatch(name) else ():
            if keyword.arg in {"learning_rate", "save_steps", "per_device_train_batch_size", "num_train_epochs"}:
                return replaced(text, keyword.value, f"str({ast.unparse(keyword.value)}) + 'x'")
    return None


def save_of_another_name(text: str, tree: ast.Module) -> str | None:
    call = last_save(tree)
    if call is None or not isinstance(call.func, ast.Attribute):
        return None
    return replaced(text, call.func, f"{ast.unparse(call.func.value)}.{call.func.attr}d")


def save_of_what_is_not_defined(text: str, tree: ast.Module) -> str | None:
    call = last_save(tree)
    return replaced(text, call, f"{ast.unparse(call.func)}(final_folder)") if call else None


def frozen(text: str, tree: ast.Module) -> str | None:
    """Freeze all parameters immediately before training."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            if called.endswith("trainer.train"):
                pad = " " * node.col_offset
                what = f"[p.requires_grad_(False) for p in {called[: -len('.train')]}.model.parameters()]"
                return replaced(text, node, f"{what}\n{pad}{ast.unparse(node)}")
    return None


def detached_loss(text: str, tree: ast.Module) -> str | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            if node.args:
                return replaced(text, node.args[0], f"{ast.unparse(node.args[0])}.detach()")
            return replaced(text, node.func.value, f"({ast.unparse(node.func.value)}).detach()")
    return None


def target_that_is_not_there(text: str, tree: ast.Module) -> str | None:
    for name, call in calls(tree):
        if name.endswith("Config") and "ora" in name.lower() and not _CONFIGURES.fullmatch(name):
            kept = [k for k in call.keywords if k.arg != "target_modules"]
            given = ", ".join([*(ast.unparse(a) for a in call.args), *(ast.unparse(k) for k in kept)])
            return replaced(text, call, f"{ast.unparse(call.func)}({given}, target_modules=['query_' + 'projection'])")
    return None


def column_by_computation(text: str, tree: ast.Module) -> str | None:
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda) and n.args.args]
    for function in functions:
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Subscript)
                and isinstance(node.value, ast.Name)
                and isinstance(node.ctx, ast.Load)
                and isinstance(node.slice, ast.Constant)
                and isinstance(node.slice.value, str)
                and node.value.id in {a.arg for a in function.args.args} | {"row", "rows", "example", "examples"}
            ):
                return replaced(text, node.slice, f"''.join([{node.slice.value!r}, 's_x'])")
    return None


def nothing_saved(text: str, tree: ast.Module) -> str | None:
    """Remove every statement that saves, and disable a trainer's saving in a way that static analysis can't detect."""
    found = False
    for _ in range(20):
        again = ast.parse(text)
        statements = [
            n for n in ast.walk(again)
            if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) and isinstance(n.value.func, ast.Attribute)
            and n.value.func.attr in _SAVES
        ]  # fmt: skip
        if not statements:
            break
        text, found = replaced(text, statements[0], "pass"), True
    for name, call in calls(ast.parse(text)):
        if _CONFIGURES.fullmatch(name) and call.keywords:
            kept = [k for k in call.keywords if k.arg not in {"save_strategy", "push_to_hub", "load_best_model_at_end"}]
            given = ", ".join([*(ast.unparse(a) for a in call.args), *(ast.unparse(k) for k in kept)])
            return replaced(text, call, f"{ast.unparse(call.func)}({given}, save_strategy='on'[::-1])")
    return text if found and not any(_CONFIGURES.fullmatch(n) for n, _ in calls(ast.parse(text))) else None


def name_that_is_not_there(text: str, tree: ast.Module) -> str | None:
    """Look up a missing class by a computed name, immediately after the imports."""
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    roots = {"transformers", "torch", "trl", "peft"}
    for node in imports:
        root = (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        if root.split(".")[0] in roots:
            words = f"\nimport importlib\nSchedule = getattr(importlib.import_module({root!r}), 'Lineer' + 'Schedule')"
            return replaced(text, imports[-1], (ast.get_source_segment(text, imports[-1]) or "") + words)
    return None


def folder_that_is_not_there(text: str, tree: ast.Module) -> str | None:
    for name, call in calls(tree):
        if name == "save" and len(call.args) > 1:
            return replaced(text, call.args[1], "'checkpoints/last/model.pt'")
    return None


KINDS: dict[str, Fault] = {
    "keyword in a dictionary": keyword_in_a_dictionary,
    "setting of another type": setting_of_another_type,
    "method that does not exist": save_of_another_name,
    "name that is not defined": save_of_what_is_not_defined,
    "nothing to train": frozen,
    "loss without a gradient": detached_loss,
    "LoRA target that does not exist": target_that_is_not_there,
    "column by a computed name": column_by_computation,
    "nothing saved": nothing_saved,
    "class by a computed name": name_that_is_not_there,
    "folder that does not exist": folder_that_is_not_there,
}


def seeds(text: str) -> Iterator[tuple[str, str]]:
    """Yield one faulty copy of the script for each kind of fault that fits it."""
    for kind, fault in KINDS.items():
        changed = fault(text, ast.parse(text))
        if changed is not None and changed != text:
            ast.parse(changed)
            yield kind, changed


@dataclass(frozen=True)
class Written:
    """A hand-written fault for one public script, with words from the expected error."""

    kind: str
    old: str
    new: str
    words: str

    def put_into(self, text: str) -> str:
        """Return the script with this fault, at the first suitable place."""
        assert self.old in text, self
        changed = text.replace(self.old, self.new, 1)
        ast.parse(changed)
        return changed


@dataclass(frozen=True)
class Case:
    """A public script, identified by repository, commit, and path, with its input files and faults."""

    repo: str
    commit: str
    path: str
    faults: tuple[Written, ...]
    files: tuple[tuple[str, str], ...] = ()


def cases(file: Path) -> tuple[Case, ...]:
    """Return the scripts in a data file, with their faults."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return tuple(
        Case(row["repo"], row["commit"], row["path"], tuple(Written(**fault) for fault in row["faults"]),
             tuple(row.get("files", {}).items()))
        for row in rows
    )  # fmt: skip
