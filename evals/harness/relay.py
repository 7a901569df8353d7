"""Forward standard streams to the proxy. The harness of an agent under test starts this program instead of the server.

    python -I relay.py DOOR

DOOR is a file that contains a loopback port and a password. This program has no other data: only the proxy (`proxy.py`)
can access the server, its environment and the key of the seals. It imports nothing from this package.
"""

from __future__ import annotations

import json
import socket
import sys
import threading

BLOCK = 1 << 16


def main(door: str) -> int:
    """Forward bytes in both directions until the server closes the connection."""
    with open(door, encoding="utf-8") as file:  # noqa: PTH123
        known = json.load(file)
    with socket.create_connection(("127.0.0.1", known["port"]), timeout=10) as connection:
        connection.settimeout(None)
        connection.sendall(known["word"].encode() + b"\n")

        def upwards() -> None:
            while block := sys.stdin.buffer.read1(BLOCK):  # type: ignore[union-attr,unused-ignore]
                connection.sendall(block)
            connection.shutdown(socket.SHUT_WR)

        threading.Thread(target=upwards, daemon=True).start()
        while block := connection.recv(BLOCK):
            sys.stdout.buffer.write(block)
            sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
