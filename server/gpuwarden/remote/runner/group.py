"""Check all nodes in an allocation before the command runs, because one bad node makes the others hang.

The engine starts the run folder's `node_agent.py` once on each node. The replies and problems are written to
`nodes.json`. Only observed problems count: if the engine could not start the check, or the check timed out before all
nodes answered, the command still runs.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Dict, List, Mapping, Sequence

from gpuwarden.remote.runner.files import write_atomic
from gpuwarden.remote.runner.protocol import Json

NODES_LOOK_S = 90.0
CLOCK_S = 2.0
"""The tolerated clock difference in seconds. Above it, logs are out of order and short-lived tokens may be rejected."""
NOWHERE = ("loopback", "bridge")
MAX_OUT = 16 << 20
Problems = List[Dict[str, Any]]  # noqa: UP006


def check_nodes(folder: str, start: Sequence[str], count: int, env: Mapping[str, str]) -> Problems:
    """Query `count` nodes and return their problems. `start` is the engine command that runs a program on each node."""
    import subprocess

    command = [*start, sys.executable, "-I", "-S", folder + "/node_agent.py"]
    asked_at, cut_off = time.time(), False
    try:
        done = subprocess.run(
            command, input=b'{"verb": "facts"}\n', capture_output=True, timeout=NODES_LOOK_S, check=False
        )
        out, errors = done.stdout[:MAX_OUT], done.stderr[-2000:]
    except subprocess.TimeoutExpired as error:
        out, errors, cut_off = (error.stdout or b"")[:MAX_OUT], b"the check of the nodes timed out", True
    except OSError as error:
        out, errors = b"", str(error).encode()
    nodes = []
    for row in out.splitlines():
        try:
            answer = json.loads(row)
        except (ValueError, RecursionError):
            continue
        if _of_a_node(answer):
            nodes.append(answer)
    # After a timeout, a node that has not replied may just be slow.
    found = problems(nodes, 0 if cut_off else count, env, asked_at, time.time())
    seen = {"asked": count, "problems": found, "nodes": nodes, "said": errors.decode("utf-8", "replace")}
    try:
        write_atomic(folder + "/nodes.json", json.dumps(seen).encode())
    except OSError:  # the problems are still returned
        pass
    return found


def _of_a_node(answer: object) -> bool:
    """Return whether a row is a reply from `node_agent.py`. A login script may print other rows."""
    if not isinstance(answer, dict) or answer.get("ok") is not True:
        return False
    interfaces = answer.get("interfaces") or []
    return all(isinstance(answer.get(key) or {}, dict) for key in ("fabric", "torch", "env")) and (
        isinstance(interfaces, list) and all(isinstance(one, dict) for one in interfaces)
    )


def problems(nodes: Sequence[Json], count: int, env: Mapping[str, str], since: float, until: float) -> Problems:
    """Return the reasons why these nodes can't work together, with codes and descriptions.

    The nodes read their clocks between `since` and `until`, which are times on the first node's clock.
    """
    found: Problems = []

    def add(code: str, node: str, text: str) -> None:
        found.append({"code": code, "node": node, "text": (f"{node}: " if node else "") + text})

    named = {str(node.get("node") or node.get("hostname")): node for node in nodes}
    if named and len(named) < count:
        add("silent", "", f"only {len(named)} of {count} nodes answered: {', '.join(named)}")
    for name, node in named.items():
        now = node.get("now")
        if isinstance(now, (int, float)) and not since - CLOCK_S <= now <= until + CLOCK_S:
            add("clock_off", name, f"its clock is at least {min(abs(now - since), abs(now - until)):.0f} s off")
        fabric = node.get("fabric") or {}
        if fabric.get("switches") and fabric.get("service") in ("inactive", "failed"):
            add("fabric_down", name, f"it has NVSwitches, but its fabric manager is {fabric['service']}")
        own = {**(node.get("env") or {}), **env}
        there = {str(i.get("name")): str(i.get("kind") or "") for i in node.get("interfaces") or () if i.get("up")}
        for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            value = str(own.get(variable) or "")
            words = value.split(",") if variable[0] == "G" else selected(value, list(there))
            taken = [word for word in words if word in there]
            if value and node.get("interfaces") is not None and not any(there[word] not in NOWHERE for word in taken):
                leads = f"selects {', '.join(taken)}, with no path to other nodes" if taken else "matches no interface"
                add("interface_wrong", name, f"{variable} is {value}, which {leads}")
    for what, key in (("PyTorch", "torch"), ("NCCL", "nccl")):
        versions = {name: (node.get("torch") or {}).get(key) for name, node in named.items()}
        have = {name: version for name, version in versions.items() if version}
        first = next(iter(have), "")
        for name, version in have.items():
            if version != have[first]:
                add(f"{key}_differs", name, f"it has {what} {version}, but {first} has {have[first]}")
    return found


def selected(value: str, names: Sequence[str]) -> list[str]:
    """Return the interfaces that an NCCL_SOCKET_IFNAME value selects."""
    without, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    words = [word for word in value.lstrip("^").lstrip("=").split(",") if word]
    hit = [n for n in names if any(n == word.partition(":")[0] if exact else n.startswith(word) for word in words)]
    return [n for n in names if n not in hit] if without else hit
