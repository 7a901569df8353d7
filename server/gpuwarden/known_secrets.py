"""Remember the secrets that jobs received, so that later processes can redact them in replies without knowing them.

The state folder contains keyed digests, never values: one file with a digest per line, mode 0600, and this
installation's key. A program that can read both files can test guesses, but such a program could also read the values
from a shell's environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from gpuwarden.core.errors import DiskError
from gpuwarden.core.secret_digests import SecretDigest, found_in, parts_of, texts_of
from gpuwarden.private import private_folder

FILE: Final = "secrets.jsonl"
MAX_BYTES: Final = 1 << 20
"""Maximum number of bytes read from the file; enough for thousands of secrets."""


def installation_key(home: Path, purpose: str) -> bytes:
    """Return a 32-byte key for one purpose, derived from a random key that never leaves this machine.

    The random key is created at first use.
    """
    place = home / "seal.key"
    if not place.exists():
        private_folder(place.parent)
        draft = place.with_name(f"{place.name}.{os.urandom(6).hex()}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as out:
            out.write(os.urandom(32))
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(draft, place)  # the first process to create the file determines the key
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    root = hashlib.sha256(place.read_bytes()).digest()
    return hmac.new(root, purpose.encode(), "sha256").digest()


class KnownSecrets:
    """The digests in one state folder. Any number of processes may add digests."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._file = home / FILE
        self._read: tuple[int, int] = (0, 0)
        self._known: frozenset[SecretDigest] = frozenset()

    def remember(self, values: Iterable[str]) -> None:
        """Add the digests of values. Raises DiskError if that fails, so that no job gets a secret that can't be
        redacted.
        """
        try:
            key, known = self._key(), self._digests()
            new = {SecretDigest.of(key, part) for value in values for part in parts_of(value)} - known
            if not new:
                return
            lines = "".join(json.dumps([one.length, one.spaced, one.bits, one.digest]) + "\n" for one in new)
            private_folder(self.home)
            fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(fd, "wb", buffering=0) as file:
                file.write(lines.encode())
                os.fsync(file.fileno())
        except OSError as error:
            raise DiskError(
                f"the digests of this job's secrets can't be written to {self._file}: {error.strerror}",
                "Free some disk space, then call again; the job waits until then.",
            ) from error

    def found_in(self, body: Any) -> tuple[str, ...]:
        """Return every remembered secret that a JSON body contains."""
        known = self._digests()
        if not known:
            return ()
        return tuple(sorted(found_in("\n".join(texts_of(body)), self._key(), known)))

    def _key(self) -> bytes:
        return installation_key(self.home, "secrets")

    def _digests(self) -> frozenset[SecretDigest]:
        """Return the digests in the file. Read the file again if another process has added digests."""
        try:
            info = self._file.stat()
        except OSError:
            return frozenset()
        if (info.st_mtime_ns, info.st_size) != self._read:
            with self._file.open("rb") as file:
                lines = file.read(MAX_BYTES).splitlines()
            known = set()
            for line in lines:
                with contextlib.suppress(ValueError, TypeError):  # a line truncated by a crash
                    length, spaced, bits, digest = json.loads(line)
                    known.add(SecretDigest(int(length), bool(spaced), int(bits), str(digest)))
            self._known = frozenset(known)
            self._read = (info.st_mtime_ns, info.st_size)
        return self._known
