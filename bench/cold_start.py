"""Measure the MCP server's cold start against a bare server of the SDK, on this machine, in one run.

    python bench/cold_start.py [--rounds 5] [--events 0,1000,10000]

Prints ratios to a server with ten trivial tools that only calls `MCPServer(...).run()`. Measured are the time from the
start of the process to the answer to tools/list (aim 1.2 at most), in both protocol versions and with ledgers of
several sizes, and the time to the answer to a first call, which loads most of the package and has no aim. Times and
ratios are those of the fastest runs; every round runs all servers, one after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._figures import arguments, figure

from gpuwarden.core.clock import SystemClock
from gpuwarden.ledger.events import PinWrong
from gpuwarden.ledger.store import Ledger

BARE = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("bare")
for number in range(10):
    def tool(text: str, times: int = 1) -> str:
        "Return the text."
        return text * times

    server.add_tool(tool, name=f"tool{number}")
server.run()
"""
CLIENT = {"name": "bench", "version": "1"}
META = "io.modelcontextprotocol/"
ENVELOPE = {
    "_meta": {f"{META}protocolVersion": "2026-07-28", f"{META}clientInfo": CLIENT, f"{META}clientCapabilities": {}}
}
HANDSHAKE = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": CLIENT}
ERAS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "2025-11-25": ("initialize", HANDSHAKE, {}),
    "2026-07-28": ("server/discover", ENVELOPE, ENVELOPE),
}


def start(argv: list[str], home: Path, era: str) -> tuple[float, float]:
    """Return the seconds from a server's start to its answers to tools/list and to a call for an unknown job."""
    opening, first, rest = ERAS[era]
    began = time.perf_counter()
    env = {**os.environ, "GPUWARDEN_HOME": str(home)}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as p:
        assert p.stdin is not None and p.stdout is not None
        taken = []
        call = ("tools/call", {**rest, "name": "check_job", "arguments": {"job_id": "none"}})
        for number, (method, params) in enumerate([(opening, first), ("tools/list", rest), call]):
            request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            p.stdin.write(json.dumps(request).encode() + b"\n")
            p.stdin.flush()
            reply = json.loads(p.stdout.readline())
            assert reply["id"] == number and ("result" in reply or method == "tools/call"), reply
            taken.append(time.perf_counter() - began)
        p.stdin.close()
    return taken[1], taken[2]


def grown(home: Path, events: int) -> Path:
    """Return a home whose ledger has `events` events."""
    home.mkdir()
    ledger = Ledger(home / "ledger.db", SystemClock(), "bench")
    with ledger.transaction():
        for _ in range(events):
            ledger.add("approval/pin", PinWrong(by="user bench"))
    ledger.close()
    return home


def main() -> None:
    """Run every measurement and print the figures."""
    options = arguments(__doc__, {"rounds": (5, 1), "events": ("0,1000,10000", "0")})
    command = [sys.executable, "-m", "gpuwarden", "mcp"]
    with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as folder:
        bare = Path(folder, "bare.py")
        bare.write_text(BARE, "utf-8")
        homes = {n: grown(Path(folder, f"home-{n}"), n) for n in map(int, options.events.split(","))}
        for era in ERAS:
            times: dict[str, list[tuple[float, float]]] = {}
            for _ in range(options.rounds):
                times.setdefault("bare", []).append(start([sys.executable, str(bare)], Path(folder), era))
                for n, home in homes.items():
                    times.setdefault(str(n), []).append(start(command, home, era))
            for n in homes:
                for at, what in enumerate(("tools/list (aim 1.2)", "first call")):
                    ours, theirs = (min(t[at] for t in times[who]) for who in (str(n), "bare"))
                    peer = f"bare SDK {theirs * 1000:.0f} ms"
                    figure(f"{what}, {era}, {n:,} events", f"{ours * 1000:.0f} ms", peer, ours / theirs)


if __name__ == "__main__":
    main()
