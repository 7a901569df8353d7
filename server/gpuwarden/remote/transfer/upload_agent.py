"""Receive small files as tar streams on the machine that they are pushed to, and confirm each stream.

    python -I -c SOURCE FOLDER

stdin is a sequence of requests: a line of JSON, `{"files": [[name, size, sha256], ...], "bytes": N}`, and N bytes of
tar whose members are named by their number in `files`. Each is answered by a line: `{"here": [number, ...]}`, the files
that now are there with size and digest; or `{"error": ...}`. Without bytes the request only asks. `{"sync": true}`
makes all of it durable. Python >= 3.8, standard library only.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import sys
import tarfile
from typing import Any, BinaryIO, Dict, List

Json = Dict[str, Any]  # noqa: UP006 (evaluated at run time, on Python 3.8 too)


def place(root: str, name: str) -> str:
    """Return a file's destination, with its parents created. Raises `ValueError` for a name or link that leaves."""
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"the name {name!r} leaves the folder")
    path = root
    for part in parts[:-1]:
        path = path + "/" + part
        if not os.path.isdir(path):
            os.makedirs(path, exist_ok=True)
        if os.path.islink(path):
            raise ValueError(f"{path!r} is a link")
    return path + "/" + parts[-1]


def is_here(path: str, size: int, sha256: str) -> bool:
    """Return whether exactly this file is there."""
    try:
        info = os.lstat(path)
        if not stat.S_ISREG(info.st_mode) or info.st_size != size:
            return False
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest() == sha256
    except OSError:
        return False


def unpack(root: str, files: List[Any], data: bytes) -> None:  # noqa: UP006
    """Write the members that are what their row says; each gets its name when it is complete."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            content = tar.extractfile(member).read()  # type: ignore[union-attr]
            name, size, sha256 = files[int(member.name)]
            if len(content) == size and hashlib.sha256(content).hexdigest() == sha256:
                write(place(root, name), content)


def write(path: str, content: bytes) -> None:
    """Write one file atomically."""
    folder, name = os.path.split(path)
    draft = os.path.join(folder, f".{name[:60]}.{os.getpid()}.part")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def answer(root: str, request: Json, stdin: BinaryIO) -> Json:
    """Carry out one request."""
    if request.get("sync"):
        os.sync()
        return {"here": []}
    files = request["files"]
    data = stdin.read(request["bytes"])
    if len(data) < request["bytes"]:
        sys.exit(0)  # the connection was cut
    if data:
        unpack(root, files, data)
    rows = [(place(root, name), size, sha256) for name, size, sha256 in files]
    return {"here": [n for n, row in enumerate(rows) if is_here(*row)]}


def main(root: str) -> None:
    """Answer until stdin closes."""
    os.umask(0o077)
    os.makedirs(root, exist_ok=True)
    stdin = sys.stdin.buffer
    for line in iter(stdin.readline, b""):
        if not line.strip():
            continue
        try:
            reply = answer(root, json.loads(line), stdin)
        except OSError as error:
            reply = {"error": f"{error.strerror}: {error.filename}"}
        except (ValueError, TypeError, KeyError, IndexError, tarfile.TarError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
