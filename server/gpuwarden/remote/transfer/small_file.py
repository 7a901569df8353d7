"""Write a small file to a machine through its shell, so Python is not required there. The runner is sent this way."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import PurePosixPath

from gpuwarden.core.errors import BadRequest
from gpuwarden.remote.ssh.machine import Ssh

PUT_S = 60.0
_CHUNK = 1 << 18
_LARGE = 64 << 10

# $1 file, $2 size: succeed if the file is complete.
_THERE = '[ -f "$1" ] && [ "$(wc -c < "$1")" -eq "$2" ]'

# $1 folder, $2 name, $3 size: write stdin to a file.
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
    """Write one small file atomically, readable only by its owner.

    An existing file of the same size is skipped, because each file's name contains its digest. Raises `BadRequest` if
    the machine can't write the file, for example because the disk is full.
    """
    folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    # The connection may break before all files are sent; the next attempt then skips the files that have arrived.
    if len(content) > _LARGE:
        seen = await machine.run(["/bin/sh", "-c", _THERE, "sh", path, str(len(content))], timeout_s=PUT_S)
        if seen.code == 0:
            return

    async def pieces() -> AsyncGenerator[bytes, None]:
        for at in range(0, len(content), _CHUNK):
            yield content[at : at + _CHUNK]

    argv = ["/bin/sh", "-c", _PUT, "sh", folder, name, str(len(content))]
    ran = await machine.feed(argv, pieces(), stall_s=PUT_S)
    if ran.code != 0:
        why = ran.err.decode("utf-8", "replace").strip()[-300:] or "no reason given"
        raise BadRequest(
            f"{path} can't be written on the machine: {why}", "Check free space, inodes and permissions there."
        )
