"""Protect the settings reserved for the user: gpuwarden's variables, and the guard's entry in a client's settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

MARK: Final = "gpuwarden.interfaces.hooks.guard"
OLD_MARK: Final = "guard.py"
"""This guard's names in a client's configuration, in this version and in older versions."""
MOST_BYTES: Final = 2_000_000
DECIDES: Final = re.compile(
    r"GPUWARDEN_(?:HOME|POLICY|REHEARSAL_CAPS_\w+|CAPS_\w+|PLATFORMS|APPROVAL_\w+|SECRETS_\w+|WATCH_\w+|RECEIPT_\w+"
    r"|[A-Z_]+_URL|REHEARSAL_CLOCK)"
)
"""Variables that change the path of the ledger or the policy, a platform's address, the time, or a policy value."""
PLUGIN: Final = re.compile(r"gpuwarden@[\w-]+")
"""The name of this guard's plugin in a client's list of enabled plugins."""
_PLACES: Final = frozenset({"HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"})
"""Variables that relocate the folders of gpuwarden and of many other programs."""
_CLIENT_PLACES: Final = frozenset({"HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "CLAUDE_CODE_SAFE_MODE",
                                   "CLAUDE_CODE_SIMPLE"})  # fmt: skip
_BARE: Final = frozenset({"--bare", "--safe-mode", "--ignore-user-config"})
"""Variables and options that make a client start without the user's hooks."""
_SET: Final = re.compile(rf"({DECIDES.pattern})[\"']?\s*(?:=|:|\s)\s*[\"']?([^\"',;\s}}]*)")
_OFF: Final = re.compile(
    r"disableAllHooks\W{1,4}true|allowManagedHooksOnly\W{1,4}true|\bhooks\s*=\s*false|(?s:hooks\.state.{0,300}enabled\s*=\s*false)"
    r"|gpuwarden@[\w-]{1,80}[\"']?\s*:\s*false|gpuwarden@[\w-]{1,80}[\"']?\]\s*enabled\s*=\s*false"
    r"|(?s:hooksConfig.{0,300}(?:enabled\W{1,4}false|disabled\W{1,9}\w))"
)
_ANSWERS: Final = re.compile(r"\bElicitation(?:Result)?\b")
"""Hooks that answer a client's forms for the user."""
_CLIENT: Final = re.compile(
    r"(?:^|/)(?:\.claude/[\w.-]*\.json|\.claude\.json|\.?mcp\.json|claude_desktop_config\.json|managed-settings\.json"
    r"|\.codex/(?:config\.toml|hooks\.json)|\.cursor/(?:hooks|mcp|cli-config)\.json|\.gemini/settings\.json"
    r"|gemini-extension\.json|\.vscode/mcp\.json|zed/settings\.json|\.mcp/[\w.-]+\.json)$"
)
_STARTUP: Final = re.compile(
    r"(?:^|/)(?:\.(?:bash|zsh|k)(?:rc|env|profile|_profile|login)|\.profile|\.bash_profile|\.envrc|\.env[\w.]*"
    r"|environment|config\.fish|[\w.-]+\.service)$"
)
_KEPT_IN_CODE: Final = re.compile(
    r"\.claude[/\\\"', ]{1,5}settings|\.codex[/\\\"', ]{1,5}(?:hooks|config)|\.cursor[/\\\"', ]{1,5}hooks"
    r"|gpuwarden[/\\\"', ]{1,5}(?:policy\.toml|ledger\.db|hooks)|\.mcp\.json"
)
_WRITES_IN_CODE: Final = re.compile(
    r"write|WriteStream|put_contents|urlretrieve|\bdownload\(|\.(?:output|once|save|backup|clone)\s+\S*gpuwarden"
    r"|unlink|append|symlink|shutil\.|\bcopy\w*\s*\(|os\.replace|open\b[^;\n]{0,80}[\"']\s*\+?>|File\.open|\bopen\s*\([^)]{0,200}mode\s*=\s*[\"'][wax]|\bremove\b|rename|\bdump\(|\bsave\(|rmtree|truncate|\bprintf?\b[^;\n]{0,200}>\s*[\"'(]|execute\w*\s*\([^;]{0,200}\b(?i:insert|update|delete|replace|drop|alter)\b|open\([^)]{0,200}[\"'][wax]b?\+?[\"']"
)
CLIENTS: Final = frozenset({"claude", "codex", "cursor", "cursor-agent", "gemini"})
SENTENCES: Final = frozenset({"echo", "printf", "grep", "rg", "ag", "git", "gh", "glab", "jira", "sed", "awk", "cat",
                              "ugrep", "egrep", "fgrep", "head", "tail", "jq", "test", "["})  # fmt: skip
"""Programs whose arguments are usually plain text, not commands."""


def decided(name: str, words: Sequence[str], assigned: Iterable[tuple[str, str]]) -> str | None:
    """Return the reason to block a command that sets or unsets a variable reserved for the user."""
    for variable, _ in assigned:
        moved = name in CLIENTS and variable in _CLIENT_PLACES
        if moved or (name == "gpuwarden" and variable in _PLACES) or DECIDES.fullmatch(variable):
            return f"only the user may set {variable}"
    if name in SENTENCES:
        return None
    drops = name == "unset" or (
        name == "env" and any(w in {"-u", "--unset"} or w.startswith("--unset=") for w in words)
    )
    for word in words:
        found = DECIDES.search(word) if "GPUWARDEN_" in word else None
        if found is None:
            continue
        # The variable is at the start of the word or of an option's value (`-eNAME=`, `--env=NAME=`).
        begins = re.fullmatch(r"|-e|--?[\w-]+=", word[: found.start()])
        if drops or (begins and word[found.end() : found.end() + 1] in {"=", "+"}):
            return f"only the user may set {found[0]}"
    if name in {"launchctl", "setx", "systemctl"} and (found := DECIDES.search(" ".join(words))):
        return f"only the user may set {found[0]}"
    if name in CLIENTS and without_hooks(words):
        return f"`{name}` would start without its hooks; only the user may disable them"
    return None


def without_hooks(words: Sequence[str]) -> bool:
    """Return whether a client's options make it start without the user's hooks or plugins."""
    if _OFF.search(" ".join(words)) or any("hooks" in w and "=" in w for w in words) or _BARE & set(words):
        return True
    for word, following in pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        value = value if equals else following
        if option == "--setting-sources" and "user" not in value.split(","):
            return True
        if option == "--disable" and re.search("hook|plugin", value):
            return True
        if option in {"-c", "--config"} and re.search(r"^(?:plugins|features\.plugin).*=\s*false", value):
            return True
    return False


def is_client_file(path: str) -> bool:
    """Return whether a file is a client's configuration."""
    return _CLIENT.search(path) is not None


def watched(path: str) -> bool:
    """Return whether text written to a file has to be checked, because the file is a client's configuration or a shell
    startup file.
    """
    return is_client_file(path) or _STARTUP.search(path) is not None


def facts(text: str) -> tuple[bool, bool, frozenset[tuple[str, str]]]:
    """Return the facts that an edit must not change: whether text names the guard, whether it disables hooks, and its
    values for gpuwarden's variables.
    """
    named = MARK in text or OLD_MARK in text or PLUGIN.search(text) is not None
    return named, _OFF.search(text) is not None, frozenset(_SET.findall(text))


def edited(path: str, before: str, after: str) -> str | None:
    """Return the reason to block an edit that turns `before` into `after`."""
    if is_client_file(path):
        (named, off, variables), (named_after, off_after, variables_after) = facts(before), facts(after)
        if named and not named_after:
            return f"{path} configures this guard; only the user may change it"
        if off_after and not off:
            return f"{path} would disable hooks; only the user may do that"
        if len(_ANSWERS.findall(after)) > len(_ANSWERS.findall(before)):
            return f"{path} would let a script answer forms; only the user may allow that"
        if variables != variables_after:
            return f"{path} would change gpuwarden's variables; only the user may set them"
    elif _STARTUP.search(path) and facts(before)[2] != facts(after)[2]:
        return f"{path} would change gpuwarden's variables; only the user may set them"
    return None


def shell_written(path: str, text: str) -> str | None:
    """Return the reason to block a shell command that writes `text`, as far as it is known, to a file."""
    if is_client_file(path):
        before = contents(path) or ""
        drops = bool(text) and "GPUWARDEN_" in before and "GPUWARDEN_" not in text
        if drops or _OFF.search(text) or _ANSWERS.search(text) or DECIDES.search(text):
            return f"{path} configures a coding agent; only the user may change it"
    if _STARTUP.search(path) and DECIDES.search(text):
        return f"{path} would change gpuwarden's variables; only the user may set them"
    return None


def names_kept(text: str) -> bool:
    """Return whether text names a file or sets a value that is reserved for the user."""
    return any(pattern.search(text) for pattern in (_KEPT_IN_CODE, _OFF, _SET))


def may_be_off(text: str) -> bool:
    """Return whether text contains `disableAllHooks` with a value other than false."""
    return re.search(r"disableAllHooks(?!\W{1,4}false)", text) is not None


def code_edits(text: str) -> str | None:
    """Return the reason to block code, such as Python, if it writes a file that is reserved for the user."""
    found = _KEPT_IN_CODE.search(text)
    return (
        f"the code writes `{found[0]}`; only the user may do that" if found and _WRITES_IN_CODE.search(text) else None
    )


def contents(path: str, most: int = MOST_BYTES) -> str | None:
    """Return a file's text; None if it is missing, too large or unreadable."""
    try:
        file = Path(path)
        return file.read_text("utf-8", "replace") if file.stat().st_size <= most else None
    except (OSError, ValueError):
        return None


def after_edits(before: str, edits: Sequence[dict[str, Any]]) -> str:
    """Apply the edits in an Edit or MultiEdit call to text, and return the result."""
    for edit in edits:
        old, new = str(edit.get("old_string") or ""), str(edit.get("new_string") or "")
        before = before.replace(old, new, -1 if edit.get("replace_all") else 1) if old else before + new
    return before
