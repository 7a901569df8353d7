"""Push to a machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import PurePosixPath

from gpuwarden.core.errors import BadRequest
from gpuwarden.remote.ssh import Ssh

PUT_S = 60.0
_CHUNK = 1 << 18

# $1 folder, $2 name, $3 size. What is there under its name is complete.
_PUT = r"""
umask 077
[ -f "$1/$2" ] && [ "$(wc -c < "$1/$2")" -eq "$3" ] && exec cat > /dev/null
mkdir -p -- "$1" || exit 73
temporary="$1/.$2.$$.tmp"
trap 'rm -f -- "$temporary"' EXIT
cat > "$temporary" && [ "$(wc -c < "$temporary")" -eq "$3" ] || exit 74
sync "$temporary" 2>/dev/null
mv -f -- "$temporary" "$1/$2"
""".strip()


async def put(machine: Ssh, path: str, content: bytes) -> None:
    """Write one small file whose name is made of its content: atomic, private, and left alone when it is there.

    Raises `BadRequest` when the machine can't hold it.
    """
    folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(content), _CHUNK):
            yield content[at : at + _CHUNK]

    ran = await machine.feed(["/bin/sh", "-c", _PUT, "sh", folder, name, str(len(content))], pieces(), stall_s=PUT_S)
    if ran.code != 0:
        why = ran.err.decode("utf-8", "replace").strip()[-300:] or "it did not say why"
        raise BadRequest(
            f"{path} can't be written on the machine: {why}", "Check free space, inodes and permissions there."
        )
