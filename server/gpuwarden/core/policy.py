"""What the user allows: one TOML file, read into this model. Every field has a default that spends nothing."""

from __future__ import annotations

import hashlib
import hmac
import os
from fnmatch import fnmatchcase
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from gpuwarden.core.models import Frozen

Channel = Literal["elicitation", "terminal", "rehearsal"]
"""How a yes came in. `rehearsal` is a flag instead of a person, which only pretend machines take."""
Usd = Annotated[float, Field(ge=0, le=1_000_000)]


class Caps(Frozen):
    """Spending that needs no question, in US dollars. Above a cap a person is asked. 0 asks every time."""

    per_job_usd: Usd = 0.0
    per_day_usd: Usd = 0.0
    per_instance_usd: Usd = 0.0


class Approval(Frozen):
    """How a person says yes. `pin_hash` is made by `gpuwarden approve --set-pin`; the PIN itself is stored nowhere."""

    channels: tuple[Channel, ...] = ("terminal", "elicitation")
    pin_hash: str | None = None
    ttl_s: int = Field(default=900, ge=30, le=86_400)

    @field_validator("pin_hash")
    @classmethod
    def _shape(cls, text: str | None) -> str | None:
        if text is not None and _parse_pin(text) is None:
            raise ValueError("pin_hash is not of the form made by `gpuwarden approve --set-pin`")
        return text


Minutes = Annotated[int, Field(ge=1, le=10_080)]


class Watch(Frozen):
    """When gpuwarden speaks up, and where besides the ledger and the terminal.

    `desktop` is an argument list; the arguments `{title}` and `{text}` are replaced. `webhook_url` gets signed JSON,
    its secret is the variable GPUWARDEN_WEBHOOK_SECRET. `slack_url` gets what Slack's incoming webhooks take.
    """

    idle_minutes: Minutes = 30
    stall_minutes: Minutes = 30
    finished_minutes: Minutes = 10
    unknown_minutes: Minutes = 15
    disk_free_percent: int = Field(default=10, ge=1, le=90)
    danger_hours: int = Field(default=48, ge=1, le=720)
    desktop: tuple[str, ...] = Field(default=(), max_length=32)
    webhook_url: str | None = None
    slack_url: str | None = None

    @field_validator("webhook_url", "slack_url")
    @classmethod
    def _guarded(cls, url: str | None) -> str | None:
        if not url:
            return None
        parts = urlsplit(url)
        local = parts.hostname in {"localhost", "127.0.0.1", "::1"}
        if not parts.hostname or parts.username or parts.scheme not in ({"http", "https"} if local else {"https"}):
            raise ValueError("give an https address without a user name; http is for this machine only")
        return url


class Secrets(Frozen):
    """Which variables of the user's a job may be given as secrets: names, or patterns such as `WANDB_*`.

    The key of an account that rents machines is never given, whatever stands here.
    """

    allowed: tuple[str, ...] = (
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "WANDB_API_KEY",
        "COMET_API_KEY",
        "SWANLAB_API_KEY",
        "NEPTUNE_API_TOKEN",
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
        "CLEARML_API_ACCESS_KEY",
        "CLEARML_API_SECRET_KEY",
        "KAGGLE_USERNAME",
        "KAGGLE_KEY",
    )

    def allows(self, name: str) -> bool:
        """Whether a job may be given the variable of that name."""
        return any(fnmatchcase(name, pattern) for pattern in self.allowed)


class Local(Frozen):
    """What jobs on this machine may do, rehearsals included. Only the policy file sets it, never a variable.

    They run in a sandbox. `unsandboxed` lets them run without one where none works: `gpuwarden policy allow local`.
    `network` gives them this machine's network, with what listens on it. `caches` shows them the Hub's cache, read
    only. `paths` are folders that they may read and write besides their own.
    """

    unsandboxed: bool = False
    network: bool = False
    caches: bool = True
    paths: Annotated[tuple[Annotated[str, Field(pattern=r"^[/~]", max_length=4096)], ...], Field(max_length=64)] = ()


class Policy(Frozen):
    """The whole policy. `rehearsal_caps` bound pretend money, so that a rehearsal can show the question too."""

    caps: Caps = Caps()
    rehearsal_caps: Caps = Caps(per_job_usd=10, per_day_usd=100, per_instance_usd=20)
    platforms: tuple[str, ...] = ("*",)
    approval: Approval = Approval()
    secrets: Secrets = Secrets()
    watch: Watch = Watch()
    local: Local = Local()
    receipt_ttl_s: int = Field(default=1800, ge=30, le=86_400)

    def allows(self, platform: str) -> bool:
        """Whether a platform may be used; entries are names or patterns such as `rehearsal/*`."""
        return any(fnmatchcase(platform, pattern) for pattern in self.platforms)

    def caps_for(self, platform: str) -> Caps:
        """The caps of real or of pretend money."""
        return self.rehearsal_caps if platform.startswith("rehearsal/") else self.caps


_SCRYPT = {"n": 2**14, "r": 8, "p": 1}


def hash_pin(pin: str, salt: bytes | None = None) -> str:
    """`scrypt$salt$digest` of a PIN, in hex."""
    salt = salt or os.urandom(16)
    return f"scrypt${salt.hex()}${hashlib.scrypt(pin.encode(), salt=salt, **_SCRYPT).hex()}"


def pin_matches(pin: str, pin_hash: str) -> bool:
    """Whether a PIN is the one that was hashed; compared in constant time."""
    parsed = _parse_pin(pin_hash)
    return parsed is not None and hmac.compare_digest(hash_pin(pin, parsed), pin_hash.lower())


def _parse_pin(text: str) -> bytes | None:
    parts = text.split("$")
    try:
        salt, key = bytes.fromhex(parts[1]), bytes.fromhex(parts[2])
    except (IndexError, ValueError):
        return None
    return salt if parts[0] == "scrypt" and len(parts) == 3 and len(salt) == 16 and len(key) == 64 else None
