"""The signing proxy, addressed directly: calls that pass, are refused, or can't pass unsigned.

The server behind it echoes its input, so that everything that passes is visible.
"""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evals.harness.proxy import Door
from evals.harness.recorder import Recorder, SceneDied
from evals.transcripts.seals import Chain, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ECHO = """
import json, sys
for line in sys.stdin:
    heard = json.loads(line)
    if "id" in heard:
        result = {"heard": heard, "capabilities": {"tools": {}, "resources": {}, "prompts": {}, "extensions": {}}}
        result["tools"] = [{"name": "list_instances", "outputSchema": {"type": "object"}}]
        print(json.dumps({"jsonrpc": "2.0", "method": "elicitation/create", "id": "q1", "params": {}}), flush=True)
        print(json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}), flush=True)
        print(json.dumps({"jsonrpc": "2.0", "id": heard["id"], "result": result}), flush=True)
"""


class Scene:
    """A scene that answers calls itself and starts the echo as its server."""

    facts: dict[str, Any] = {}

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.dead = False

    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        if self.dead:
            raise OSError("gone")
        self.calls.append((tool, args))
        return {"ok": tool != "bad", "n": len(self.calls), "words": "训练 \u2028 </x>"}

    def server(self) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-I", "-S", "-c", ECHO], {}

    def end(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class Raw:
    """A connection to the proxy that can send anything."""

    def __init__(self, command: list[str], word: bytes | None = None) -> None:
        known = json.loads(Path(command[-1]).read_text())
        self.socket = socket.create_connection(("127.0.0.1", known["port"]), timeout=300)
        self.socket.sendall((known["word"].encode() if word is None else word) + b"\n")
        self.lines = self.socket.makefile("rb")

    def send(self, *messages: Any) -> None:
        for message in messages:
            data = message if isinstance(message, bytes) else json.dumps(message).encode()
            self.socket.sendall(data + b"\n")

    def hear(self) -> dict[str, Any]:
        """Return the next message that isn't a notification."""
        while True:
            message: dict[str, Any] = json.loads(self.lines.readline())
            if "method" not in message or "id" in message:
                return message

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


def request(id: Any, method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


def call(id: Any, tool: str = "list_instances", args: Any = None) -> dict[str, Any]:
    return request(id, "tools/call", name=tool, arguments=args or {})


class Bench:
    def __init__(self, folder: Path, *, bare: bool = False, limit: int = 5) -> None:
        self.scene = Scene()
        self.recorder = Recorder(self.scene, "go", b"k" * 32, limit)
        self.door = Door(self.recorder, folder, bare=bare)

    def chain(self) -> Chain:
        return Chain(b"k" * 32, self.recorder.sealer.n, self.recorder.sealer.last)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def raw(bench: Bench) -> Iterator[Raw]:
    with bench.door as command:
        connection = Raw(command)
        yield connection
        connection.close()


def test_a_call_is_sealed_only_in_its_text(bench: Bench, raw: Raw, tmp_path: Path) -> None:
    raw.send(call(1), call("1", "bad"))
    first, second = raw.hear(), raw.hear()
    assert (first["id"], second["id"]) == (1, "1")
    assert first["result"].keys() == {"content", "isError"}
    body = json.loads(first["result"]["content"][0]["text"])
    assert body["seal"]["n"] == 1 and body["words"] == "训练 \u2028 </x>"
    assert (first["result"]["isError"], second["result"]["isError"]) == (False, True)
    bench.recorder.write(tmp_path / "t.jsonl", "completed")
    from evals.transcripts.loaders import read

    (found,) = read(tmp_path / "t.jsonl")
    assert check(found.calls, bench.chain()) == []
    assert check(found.calls[:1], bench.chain()) != []


@pytest.mark.parametrize(
    "message",
    [
        b"{",
        b"\xff\xfe",
        b"[1, 2]",
        b'"tools/call"',
        b"[" * 100_000,
        [call(1)],
        {"jsonrpc": "2.0", "id": 3, "result": {}},
        {"jsonrpc": "2.0", "id": 3, "method": ["tools/call"], "params": {"name": "x"}},
        request(4, "tools/call", name=["x"]),
        request(4, "tools/call", name="x", arguments=[1]),
        {"jsonrpc": "2.0", "id": 4, "method": "tools/call", "params": [1]},
    ],
)
def test_what_is_not_understood_is_refused(message: Any, bench: Bench, raw: Raw) -> None:
    raw.send(message)
    assert raw.hear()["error"]["code"] == -32600
    assert bench.scene.calls == []
    raw.send(call(9))
    assert raw.hear()["id"] == 9, "the line lives on"


def test_a_call_without_an_id_is_not_made(bench: Bench, raw: Raw) -> None:
    silent = {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "list_instances", "arguments": {}}}
    raw.send(silent, request(1, "ping"))
    heard = raw.hear()
    assert heard["result"]["heard"]["method"] == "ping", "and the server never saw it"
    assert bench.scene.calls == []


def test_a_call_with_a_null_id_is_sealed(bench: Bench, raw: Raw) -> None:
    raw.send(call(None))
    assert "seal" in raw.hear()["result"]["content"][0]["text"]
    assert bench.recorder.sealer.n == len(bench.scene.calls) == 1


def test_the_call_limit_spans_all_connections(bench: Bench, tmp_path: Path) -> None:
    with bench.door as command:
        lines = [Raw(command), Raw(command)]
        for n in range(4):
            for line in lines:
                line.send(call(n))
                line.hear()
        for line in lines:
            line.close()
    assert len(bench.scene.calls) == 5


def test_elicitation_is_removed_from_the_harness_capabilities(raw: Raw) -> None:
    asks = {"elicitation": {"form": {}}, "roots": {}}
    meta = {"io.modelcontextprotocol/clientCapabilities": {"elicitation": {}, "sampling": {}}}
    raw.send(request(1, "initialize", capabilities=asks, _meta=meta))
    heard = raw.hear()["result"]["heard"]["params"]
    assert heard["capabilities"] == {"roots": {}}
    assert heard["_meta"] == {"io.modelcontextprotocol/clientCapabilities": {"sampling": {}}}


@pytest.mark.parametrize("bare", [False, True])
def test_the_servers_own_pack_is_shown_or_hidden(bare: bool, tmp_path: Path) -> None:
    with Bench(tmp_path, bare=bare).door as command:
        raw = Raw(command)
        raw.send(request(1, "initialize"), request(2, "tools/list"), request(3, "resources/list"))
        greeting, tools, resources = raw.hear(), raw.hear(), raw.hear()
        if "error" in greeting:  # a refusal can arrive before the server's replies
            greeting, tools, resources = tools, resources, greeting
        kept = {"tools"} if bare else {"tools", "resources", "prompts", "extensions"}
        assert set(greeting["result"]["capabilities"]) == kept
        assert tools["result"]["tools"] == [{"name": "list_instances"}], "replies have no structured content"
        assert ("error" in resources) is bare
        raw.close()


def test_the_door_refuses_a_wrong_secret(bench: Bench) -> None:
    with bench.door as command:
        assert stat.S_IMODE(Path(command[-1]).stat().st_mode) == 0o600 or sys.platform == "win32"
        for word in (b"", b"wrong", b"x" * 5_000):
            stranger = Raw(command, word)
            try:
                assert stranger.lines.readline() == b""
            except ConnectionResetError:
                pass
            stranger.close()
    assert bench.scene.calls == []


def test_a_closed_door_refuses_connections(bench: Bench) -> None:
    with bench.door as command:
        pass
    with pytest.raises(ConnectionRefusedError):
        Raw(command)


def test_closing_the_door_raises_if_the_scene_died(bench: Bench) -> None:
    bench.scene.dead = True
    with pytest.raises(SceneDied, match="gone"), bench.door as command:
        raw = Raw(command)
        raw.send(call(1))
        assert raw.hear()["error"]["code"] == -32000
        raw.close()


def test_the_relay_forwards_calls_and_exits(bench: Bench) -> None:
    with bench.door as command:
        words = b"".join(json.dumps(m).encode() + b"\n" for m in (call(1), call(2)))
        done = subprocess.run(command, input=words, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [1, 2]


PARAMS = st.dictionaries(st.sampled_from(["name", "arguments", "_meta"]), st.sampled_from(["bad", {}, 3, None]))
WORDS = st.sampled_from(["tools/call", "ping", "notifications/x", "x"])
MESSAGES = st.dictionaries(
    st.sampled_from(["id", "method", "params", "result", "jsonrpc"]), st.none() | st.integers(0, 3) | WORDS | PARAMS
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(MESSAGES, max_size=6))
def test_every_call_is_sealed_whatever_messages_are_sent(messages: list[Any], tmp_path: Path) -> None:
    bench = Bench(tmp_path, limit=100)
    with bench.door as command:
        raw = Raw(command)
        raw.send(*messages, call("last"))
        while raw.hear().get("id") != "last":
            pass
        raw.close()
    assert bench.recorder.sealer.n == len(bench.scene.calls) >= 1
