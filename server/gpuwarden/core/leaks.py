"""Find secrets written in plain text in a command line, a variable or a script.

`sanitize.TOKEN` matches tokens of known formats. This module recognizes a secret by the name before it or by its
position: `--password X`, `api_key=X`, `Authorization: Bearer X`, `https://user:X@host`. A reference to a secret, such
as `$HF_TOKEN` or the path of a key file, is not reported.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

_PASSWORDS: Final = frozenset({"password", "passwd", "passphrase", "pwd", "pass", "pw"})
_SECRETS: Final = frozenset(
    {"secret", "secrets", "token", "apikey", "credential", "credentials", "authtoken", "pat", "bearer"}
)
_OWNERS: Final = frozenset({
    "access", "account", "admin", "anthropic", "api", "app", "auth", "aws", "azure", "bearer", "bot", "clearml",
    "client", "comet", "deploy", "discord", "gcp", "gh", "git", "github", "gitlab", "google", "hf", "hub",
    "hugging", "huggingface", "huggingfacehub", "jupyter", "kaggle", "lambda", "login", "mlflow", "neptune",
    "notebook", "oauth", "openai", "personal", "private", "prime", "refresh", "roboflow", "runpod", "secret",
    "server", "service", "session", "slack", "swanlab", "telegram", "user", "vast", "vastai", "wandb", "webhook",
    "write", "read",
})  # fmt: skip
"""Words before `key` or `token` in a secret's name. A `pad_token` or a `sort_key` is not a secret."""

_IDENTITIES: Final = frozenset({"cache", "hash", "content", "dedup", "row", "commit", "data", "primary"})
"""Words before `key` in names whose value is random but not a secret."""

_REFERENCE: Final = re.compile(
    r"""(?xi)
      [$%{<(\[@*]. * | .*\$[{(]? \w+ .* | .* \{[^}]*\} .*            # a variable, a template, a mask
    | true | false | yes | no | none | null | auto | ask | prompt | stdin | env | env:.* | vault:.* | file:.* | -.*
    | x{3,} | \.{3,} | your[-_].* | changeme | redacted
    | (?:~|\.{1,2})?/.* | [\w./\\-]+\.(?:txt|json|pem|ya?ml|key|env|ini|toml|cfg|pub|conf|enc|gpg|py|sh)
    """
)
_VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|os\.\w+.*|secrets?[.\[].*")
_RANDOM: Final = re.compile(r"(?<![A-Za-z0-9])(?=[A-Za-z0-9]*[0-9])(?=[A-Za-z0-9]*[A-Za-z])[A-Za-z0-9]{16,}")
_WORD: Final = re.compile(r"[^\s\"']+|\"[^\"]*\"|'[^']*'")
_NAME: Final = r"(?<![\w.-])-{0,2}(?P<name>[A-Za-z_][\w.-]{0,80})"
_ASSIGNED: Final = re.compile(_NAME + r"""["']?\s?(?:=|:\s)\s?["']?(?P<value>[^\s"',;}&]+)""")
_LITERAL: Final = re.compile(_NAME + r"""["']?\]?\s?[=:]\s?[rb]?["'](?P<value>[^\s"']{8,200})["']""")
# After a quoted header name, a value without quotes is an expression in code.
_IS: Final = r"""(?: ["'] \s?[:=]\s? ["'] | \s?[:=]\s? ["']? )"""
_HEADER: Final = re.compile(
    rf"""(?xi)\b(?: (?:proxy-)? auth(?:orization)? {_IS} (?:bearer|basic|token|apikey) \s{{1,4}}
      | (?:x-api-key|api-key|private-token|x-auth-token|x-access-token) {_IS}
      | bearer \s{{1,4}} (?=[\w.~+/-]{{16}}) (?=[\w.~+/-]{{0,60}}[0-9]) )
    (?P<value>[^\s"',;)]{{4,}})"""
)
_URL: Final = re.compile(
    r"(?i)\b[a-z][a-z0-9+.-]{1,20}://(?P<user>[^\s/:@\"']{0,200})(?::(?P<value>[^\s/@\"']{1,200}))?@"
)
_HOOK: Final = re.compile(
    r"(?i)https://(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks|[\w.-]{1,80}\.webhook\.office\.com)/\w"
)
_NETRC: Final = re.compile(
    r"\bmachine\s{1,9}\S{1,200}\s{1,9}login\s{1,9}\S{1,200}\s{1,9}password\s{1,9}(?P<value>[^\s\"']+)"
)
_QUERY: Final = re.compile(
    r"(?i)[?&](?:token|access_token|auth|api_?key|key|sig|signature|x-amz-signature|password)=(?P<value>[^\s&\"'#]+)"
)


def forms_of(value: str) -> Iterator[str]:
    """Yield a secret in plain text, in hexadecimal, and in base64 at each of three possible offsets."""
    raw = value.encode("utf-8", "surrogateescape")
    yield value
    yield raw.hex()
    for before, skipped in enumerate((0, 2, 3)):  # skip the characters that also depend on the bytes before the secret
        yield base64.b64encode(bytes(before) + raw).decode()[skipped : (before + len(raw)) * 8 // 6]


def spelled(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the position of each argument that contains a secret, with a description of the secret."""
    parts = [(n, part.strip("\"'")) for n, word in enumerate(words) for part in (word, *_WORD.findall(word)) if part]
    for (_, flag), (at, value) in pairwise(parts):
        if flag.startswith("-") and "=" not in flag and " " not in flag and secret_value(flag, value):
            yield at, f"the value of {flag[:40]}"
    for at, word in enumerate(words):
        yield from ((at, what) for what in spelled_in(word))
    # Some well-known programs accept a secret as the value of a short option or as a positional argument.
    programs = {part.rsplit("/", 1)[-1] for _, part in parts}
    for (_, before), (at, value) in pairwise(parts):
        glued = programs & {"sshpass", "mysql", "mysqldump", "mariadb"}
        if glued and value.startswith("-p") and _is_value(value[2:]):
            yield at, f"a password for {min(glued)}"
        elif _is_value(value) and (what := _secret_in_argument(programs, before, value)):
            yield at, what


def spelled_in(text: str) -> Iterator[str]:
    """Yield a description of each secret in a command argument or in a variable's value."""
    for found in _ASSIGNED.finditer(text):
        if secret_value(found["name"], found["value"]):
            yield f"the value of {found['name'][:40]}"
    yield from _marked(text)


def spelled_in_script(text: str) -> Iterator[str]:
    """Yield a description of each secret in a script. In code, only values that look random count as secrets."""
    for found in _LITERAL.finditer(text):
        if secret_value(found["name"], found["value"]) and _RANDOM.search(found["value"]):
            yield f"the value of {found['name'][:40]}"
    yield from _marked(text)


def _marked(text: str) -> Iterator[str]:
    """Yield a description of each secret in the HTTP headers and URLs in a text."""
    if any(_is_value(found["value"]) for found in _HEADER.finditer(text)):
        yield "an authorization header"
    for found in _URL.finditer(text):
        if found["value"] is not None and _is_value(found["value"]):
            yield "a password in a URL"
        elif found["value"] is None and _RANDOM.search(found["user"]):
            yield "a token in a URL"
    if any(_is_value(found["value"]) for found in _NETRC.finditer(text)):
        yield "a password for a netrc file"
    if _HOOK.search(text):
        yield "a webhook URL"
    if any(_RANDOM.search(found["value"]) for found in _QUERY.finditer(text)):
        yield "a key in a URL"


def _secret_in_argument(words: set[str], before: str, value: str) -> str:
    """Return a description of the secret in an argument, given the argument before it; empty if there is none."""
    if "sshpass" in words and before == "-p" and not re.fullmatch(r"\d{1,5}", value):  # for ssh, `-p` is a port
        return "a password for sshpass"
    if words & {"curl", "wget", "http"} and before in {"-u", "--user", "-a"}:
        return "a user name and password" if _user_and_password(value) else ""
    if "login" in words and before in {"-p", "-k", "-t"} and len(value) >= 6:
        return f"the value of {before} in a login command"
    if "set" in words and not before.startswith("-") and secret_value(before, value):
        return f"the value of {before[:40]}"
    return "a login key" if before == "login" and re.fullmatch(r"[0-9a-f]{40}|wandb_\w{20,}", value) else ""


def _user_and_password(value: str) -> bool:
    user, mark, password = value.partition(":")
    return bool(mark and user and password) and not user.isdigit() and _is_value(password)


def secret_value(name: str, value: str) -> bool:
    """Return whether a name is typical of secrets and its value is a secret, not a reference to one."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip("-").rsplit(".", 1)[-1]).lower()
    parts = [p for p in re.split(r"[_-]+", snake) if p]
    if not parts or not _is_value(value):
        return False
    last, owner = parts[-1], parts[-2] if len(parts) > 1 else ""
    if last in _PASSWORDS or last.endswith(("password", "passwd")):
        return len(value) >= 3
    if last in {"auth", "authorization"}:
        return _user_and_password(value) or bool(_RANDOM.search(value))
    if last in _SECRETS and (not owner or owner in _OWNERS or last != "token"):
        return len(value) >= 6 and not value.isdigit()
    if last == "key" and owner in _OWNERS:
        return len(value) >= 6 and not value.isdigit()
    return last in {"token", "key"} and owner not in _IDENTITIES and "/" not in value and bool(_RANDOM.search(value))


def _is_value(value: str) -> bool:
    """Return whether a string is a literal value, not a placeholder, flag, variable name or path."""
    value = value[:500].strip("\"'")
    return bool(value) and not _REFERENCE.fullmatch(value) and not _VARIABLE.fullmatch(value)
