"""The real server over stdio: every line gets its answer, and the first answers are those of the real server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doors import JOB, POLICY, environment, policy_file, quick_warden
from gpuwarden.interfaces.mcp.first_answers import (
    FILE,
    LISTS,
    META,
    MODERN,
    REPLAYED,
    FirstAnswers,
    dump_answers,
    load_answers,
)
from gpuwarden.interfaces.mcp.malformed import fault_of, id_in
from gpuwarden.interfaces.mcp.server import make_server
from gpuwarden.interfaces.mcp.stdio import record_answers, serve_lines
from gpuwarden.interfaces.mcp.stdio_lines import KEPT, MAX_LINE, Line, read_lines
from gpuwarden.lifecycle.context import Context

PARSE, INVALID, PARAMS = -32700, -32600, -32602
CLIENT = {"name": "test", "version": "1"}
ENVELOPE: dict[str, Any] = {
    "_meta": {f"{META}protocolVersion": MODERN, f"{META}clientInfo": CLIENT, f"{META}clientCapabilities": {}}
}


def request(number: Any, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, **({} if params is None else {"params": params})}


def handshake(version: str = "2025-11-25", **more: Any) -> dict[str, Any]:
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": CLIENT, **more}
    return request("open", "initialize", params)


OPENINGS = {"legacy": handshake(), "modern": request("open", "server/discover", ENVELOPE)}


class Process:
    """The real server in a process of its own, spoken to by lines."""

    def __init__(self, home: Path, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpuwarden", "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=environment(home, **env),
        )  # fmt: skip

    def send(self, line: bytes | dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read().decode() if self.process.stderr else ""
        heard = json.loads(line)
        assert isinstance(heard, dict)
        return heard

    def ask(self, line: bytes | dict[str, Any]) -> dict[str, Any]:
        self.send(line)
        return self.hear()

    def leave(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=300)
        return self.process.returncode, errors.decode()


@contextmanager
def serving(home: Path, **env: str) -> Iterator[Process]:
    """Start a server; one that does not answer is stopped in the end, which fails the test."""
    server = Process(home, **env)
    watchdog = threading.Timer(120, server.process.kill)
    watchdog.start()
    try:
        yield server
    finally:
        watchdog.cancel()
        server.process.kill()
        server.process.communicate()


# ------------------------------------------------------------------------------------------------- half a request

CALL = b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"search_references","arguments":{"query":%s}}}'
LAST = b'{"method":"tools/call","params":{"name":"search_references","arguments":{"query":%s}},"jsonrpc":"2.0","id":7}'

BROKEN: dict[str, tuple[bytes, int, Any]] = {
    "half a character": (CALL % rb'"\ud800"', PARAMS, 7),
    "half a character, id last": (LAST % rb'"\ud800"', PARAMS, 7),
    "half a character as a key": (CALL % rb'{"\udfff":1}', PARAMS, 7),
    "half a character as the method": (rb'{"jsonrpc":"2.0","id":7,"method":"\ud800"}', PARAMS, 7),
    "half a character as the id": (rb'{"jsonrpc":"2.0","id":"\ud800","method":"ping"}', INVALID, None),
    "cut off": ((CALL % b'"x"')[:-3], PARSE, 7),
    "cut off inside a string": ((CALL % b'"x"')[:-7], PARSE, 7),
    "cut off before its id": (b'{"jsonrpc":"2.0","method":"ping","id":', PARSE, None),
    "no JSON": (b"GET / HTTP/1.1", PARSE, None),
    "a comma too many": (b'{"jsonrpc":"2.0","id":"seven","method":"ping",}', PARSE, "seven"),
    "single quotes": (b"{'jsonrpc':'2.0','id':7,'method':'ping'}", PARSE, None),
    "an id that is only in a string": (b'{"a":"\\"id\\":9","b"', PARSE, None),
    "an id that is not the message's": (b'{"params":{"id":9},"b"', PARSE, None),
    "5,000 digits": (CALL % (b"1" * 5_000), PARAMS, 7),
    "5,000 digits, id last": (LAST % (b"1" * 5_000), PARAMS, 7),
    "5,000 digits as the id": (b'{"jsonrpc":"2.0","id":%s,"method":"ping"}' % (b"1" * 5_000), INVALID, None),
    "5,000 brackets": (CALL % (b"[" * 5_000 + b"]" * 5_000), PARAMS, 7),
    "5,000 brackets, id last": (LAST % (b"[" * 5_000 + b"]" * 5_000), PARAMS, 7),
    "5,000 braces": (CALL % (b'{"a":' * 5_000 + b"1" + b"}" * 5_000), PARAMS, 7),
    "300 brackets": (CALL % (b"[" * 300 + b"]" * 300), PARAMS, 7),
    "only brackets": (b"[" * 5_000 + b"]" * 5_000, INVALID, None),
    "a NUL byte in a string": (CALL % b'"a\x00b"', PARSE, 7),
    "a NUL byte between": (b'{"jsonrpc":"2.0",\x00"id":7,"method":"ping"}', PARSE, 7),
    "no UTF-8": (CALL % b'"\xff\xfe"', PARSE, 7),
    "no UTF-8, id last": (LAST % b'"\xc3"', PARSE, 7),
    "a half of UTF-8's own": (CALL % b'"\xed\xa0\x80"', PARSE, 7),
    "20 MB": (CALL % (b'"%s"' % (b"x" * 20_000_000)), INVALID, 7),
    "20 MB, id last": (LAST % (b'"%s"' % (b"x" * 20_000_000)), INVALID, 7),
    "20 MB of nothing": (b"x" * 20_000_000, INVALID, None),
    "a batch": (b'[{"jsonrpc":"2.0","id":7,"method":"ping"},{"jsonrpc":"2.0","id":8,"method":"ping"}]', INVALID, None),
    "an empty batch": (b"[]", INVALID, None),
    "a number": (b"5", INVALID, None),
    "null": (b"null", INVALID, None),
    "an id of null": (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', INVALID, None),
    "an id of true": (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', INVALID, None),
    "an id with a fraction": (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', INVALID, None),
    "an id that is a list": (b'{"jsonrpc":"2.0","id":[7],"method":"ping"}', INVALID, None),
    "an id that is an object": (b'{"jsonrpc":"2.0","id":{"a":7},"method":"ping"}', INVALID, None),
    "no method": (b'{"jsonrpc":"2.0","id":7}', INVALID, 7),
    "a method of 5": (b'{"jsonrpc":"2.0","id":7,"method":5}', INVALID, 7),
    "JSON-RPC 1.0": (b'{"jsonrpc":"1.0","id":7,"method":"ping"}', INVALID, 7),
    "parameters in a list": (b'{"jsonrpc":"2.0","id":7,"method":"ping","params":[1]}', PARAMS, 7),
    "an empty object": (b"{}", INVALID, None),
}


@pytest.mark.prove
@pytest.mark.parametrize("era", OPENINGS)
@pytest.mark.parametrize("early", [True, False], ids=["at once", "when the server is up"])
def test_every_broken_line_is_answered_and_the_next_request_too(tmp_path: Path, era: str, early: bool) -> None:
    params = ENVELOPE if era == "modern" else {}
    with serving(tmp_path / "home") as server:
        assert "result" in server.ask(OPENINGS[era])
        if not early:
            assert "result" in server.ask(request("up", "resources/list", params))
        for name, (line, code, number) in BROKEN.items():
            heard = server.ask(line)
            assert (heard["id"], heard["error"]["code"]) == (number, code), name
            assert heard["error"]["message"] and len(json.dumps(heard)) < 500, name
            again = server.ask(request(name, "tools/list", params))
            assert again["id"] == name and len(again["result"]["tools"]) == 10
        arguments = {"name": "search_references", "arguments": {"query": "CUDA out of memory"}}
        assert server.ask(request("call", "tools/call", {**params, **arguments}))["result"]["isError"] is False


@pytest.mark.slow
def test_broken_lines_ahead_of_the_opening_are_answered(tmp_path: Path) -> None:
    with serving(tmp_path / "home") as server:
        for line, code, number in BROKEN.values():
            heard = server.ask(line)
            assert (heard["id"], heard["error"]["code"]) == (number, code)
        assert server.ask(handshake())["result"]["protocolVersion"] == "2025-11-25"
        assert len(server.ask(request(2, "tools/list"))["result"]["tools"]) == 10


@pytest.mark.parametrize(
    "line",
    [
        rb'{"jsonrpc":"2.0","method":"notifications/progress","params":{"a":"\ud800"}}',
        rb'{"jsonrpc":"2.0","id":3,"result":{"a":"\ud800"}}',
        b"   ",
        b"\r",
    ],
)
def test_what_is_no_request_is_not_answered(tmp_path: Path, line: bytes) -> None:
    fault = fault_of(Line(line)) if line.strip() else None
    assert fault is None or fault.response
    assert [found.content for found in read_lines(iter([b"a\n" + line + b"\nb", b""]).__next__)][-1] == b"b"


async def answers_of(ctx: Context, *lines: bytes) -> list[dict[str, Any]]:
    """What the real server answers to lines, one after the other."""
    heard: list[dict[str, Any]] = []

    async def arriving() -> AsyncIterator[Line]:
        for number, line in enumerate(lines):
            yield Line(line)
            while len(heard) <= number:
                await anyio.lowlevel.checkpoint()

    async def write(line: bytes) -> None:
        heard.append(json.loads(line))

    await serve_lines(make_server(ctx), arriving(), write)
    return heard


@pytest.mark.anyio
async def test_a_clients_answer_that_cant_be_read_is_an_error_to_whoever_asked() -> None:
    from gpuwarden.interfaces.mcp.stdio import read

    read_as = read(Line(rb'{"jsonrpc":"2.0","id":3,"result":{"action":"accept","content":{"approve":"\ud800"}}}'))
    assert read_as is not None and read_as.message.id == 3 and read_as.message.error.code == PARAMS  # type: ignore[union-attr]


@given(st.binary(max_size=400) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace")))
def test_any_bytes_are_judged(content: bytes) -> None:
    fault = fault_of(Line(content))
    if fault is not None and not fault.response:
        reply = json.loads(fault.reply)
        assert reply["error"]["code"] in {PARSE, INVALID, PARAMS} and len(fault.reply) < 2_000


ids = st.integers(-(10**18), 10**18) | st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(ids, st.dictionaries(st.text(max_size=4).filter(lambda k: k != "id"), JSON, max_size=4), st.booleans())
def test_the_id_is_found_wherever_it_is(number: Any, rest: dict[str, Any], first: bool) -> None:
    message = {"id": number, **rest} if first else {**rest, "id": number}
    for ascii_only in (True, False):
        text = json.dumps(message, ensure_ascii=ascii_only)
        assert id_in(text) == number
        assert id_in(text[:-1]) == number or not first


@given(st.lists(st.binary(max_size=30), max_size=20), st.integers(1, 7))
def test_lines_are_the_same_however_they_arrive(parts: list[bytes], size: int) -> None:
    stream = b"\n".join(parts)
    pieces = iter([stream[at : at + size] for at in range(0, len(stream), size)] + [b""])
    expected = [part for part in stream.split(b"\n") if part.strip()]
    assert [line.content for line in read_lines(pieces.__next__)] == expected


def test_of_a_line_that_is_too_long_both_ends_are_kept() -> None:
    pieces = iter([b"head" + b"x" * MAX_LINE, b"y" * 100_000, b"tail\nnext\n", b""])
    long, following = read_lines(pieces.__next__)
    assert not long.whole and long.content.startswith(b"head") and long.content.endswith(b"tail")
    assert len(long.content) == 2 * KEPT and following == Line(b"next")


# ------------------------------------------------------------------------------------------------- the first answers


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return quick_warden(tmp_path / "home")


@pytest.mark.slow
@pytest.mark.anyio
async def test_the_stored_answers_are_the_real_servers(ctx: Context) -> None:
    from importlib.metadata import version

    text = dump_answers(await record_answers(ctx), version("mcp"))
    assert FILE.read_text("utf-8") == text, "run: gpuwarden mcp --write-answers"


def test_answers_of_another_sdk_are_not_used(tmp_path: Path) -> None:
    assert set(load_answers()) == {"2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", MODERN}
    other = tmp_path / "answers.json"
    other.write_text(dump_answers(load_answers(), "2.2.99"), "utf-8")
    assert load_answers(other) == {} == load_answers(tmp_path / "none.json")
    assert FirstAnswers({})(json.dumps(handshake()).encode()) == (None, json.dumps(handshake()).encode())


info = st.sampled_from([CLIENT, "x", None, [], [1], {"name": 5, "version": "1"}]) | st.fixed_dictionaries(
    {"name": st.text(max_size=3), "version": st.text(max_size=3)},
    optional={"title": st.text(max_size=3) | st.none(), "websiteUrl": st.text(max_size=3), "icons": st.just([])},
)
leaf = st.sampled_from([
    {}, True, None, 1, "x", [], {"listChanged": True}, {"form": {}}, {"form": {"applyDefaults": True}}, {"url": {}},
    {"form": {"a": 1}}, {"a/b": {"c": [1]}}, {"list": {}, "requests": {"elicitation": {"create": {}}}},
])  # fmt: skip
usual = st.fixed_dictionaries(
    {},
    optional={
        "roots": st.sampled_from([{}, {"listChanged": True}]),
        "sampling": st.sampled_from([{}, {"tools": {}, "context": {}}]),
        "elicitation": st.sampled_from([{}, {"form": {}, "url": {}}, {"form": {"applyDefaults": False}}]),
        "experimental": st.sampled_from([{}, {"a/b": {"c": [1]}}]),
        "extensions": st.sampled_from(
            [
                {},
                {"a/b": {"mimeTypes": ["text/html"]}},
                {f"{META}ui": {"mimeTypes": ["text/html;profile=mcp-app"]}},
                {f"{META}ui": {}},
            ]
        ),
        "tasks": st.sampled_from([{}, {"list": {}, "cancel": {}, "requests": {"sampling": {"createMessage": {}}}}]),
    },
)
capabilities = usual | st.dictionaries(
    st.sampled_from(["roots", "sampling", "elicitation", "experimental", "extensions", "tasks", "odd"]),
    leaf,
    max_size=3,
)
versions = st.sampled_from(["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", MODERN, "1999-01-01", "", 5])
meta = st.just({}) | st.fixed_dictionaries({"progressToken": st.sampled_from([1, "x", 1.5, True, None, []])})
initializes = st.fixed_dictionaries(
    {"protocolVersion": versions, "capabilities": usual | capabilities, "clientInfo": st.just(CLIENT) | info},
    optional={"_meta": meta, "x": leaf},
)
envelopes = st.builds(
    lambda version, client, can, more: {
        "_meta": {**ENVELOPE["_meta"], f"{META}protocolVersion": version, f"{META}clientInfo": client, **more}
        | {f"{META}clientCapabilities": can}
    },
    st.just(MODERN) | versions, st.just(CLIENT) | info, usual | capabilities, meta,
)  # fmt: skip
lists = st.sampled_from([*LISTS, "server/discover"])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return quick_warden(tmp_path_factory.mktemp("one") / "home")


def agree(ctx: Context, opening: dict[str, Any], *then: dict[str, Any]) -> int:
    """Compare every early answer with the real server's; returns how many there were."""
    sent = [json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") for message in (opening, *then)]
    first = FirstAnswers(load_answers())
    early = [first(line)[0] for line in sent]
    if not any(early):
        return 0
    real = anyio.run(answers_of, ctx, *sent)
    for reply, truth in zip(early, real, strict=True):
        assert reply is None or json.loads(reply) == truth
    return len([reply for reply in early if reply])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(initializes, meta.map(lambda m: {"_meta": m}) | st.just({}) | st.just({"cursor": "x"}), lists)
def test_an_early_answer_to_a_handshake_is_the_servers(one: Context, opening: Any, params: Any, method: str) -> None:
    agree(one, request(1, "initialize", opening), request("b", method, params))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(envelopes, envelopes, lists, lists)
def test_an_early_answer_to_an_envelope_is_the_servers(one: Context, a: Any, b: Any, first: str, second: str) -> None:
    agree(one, request(1, first, a), request("b", second, b))


CLIENTS = {
    "Claude Code": handshake(capabilities={"roots": {}, "elicitation": {}}, clientInfo=CLIENT | {"title": "Claude"}),
    "Codex": handshake("2025-06-18", capabilities={"elicitation": {"form": {}, "url": {}}}),
    "Cursor": handshake("2025-06-18", capabilities={"roots": {"listChanged": False}, "elicitation": {"form": {}}}),
    "the SDK": handshake(capabilities={"roots": {"listChanged": True}, "sampling": {}, "elicitation": {"form": {}}}),
    "the newest SDK": request(0, "server/discover", ENVELOPE),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_what_clients_really_send_is_answered_early(one: Context, client: str) -> None:
    opening = CLIENTS[client]
    params = ENVELOPE if opening["method"] == "server/discover" else {}
    assert agree(one, opening, request(2, "tools/list", params), request(3, "prompts/list", params)) == 3


def test_the_opening_is_replayed_under_another_id_and_the_lists_are_not() -> None:
    first = FirstAnswers(load_answers())
    _, rest = first(json.dumps(handshake()).encode())
    assert rest is not None and json.loads(rest) == {**handshake(), "id": REPLAYED}
    initialized = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
    assert first(initialized) == (None, initialized)
    reply, rest = first(json.dumps(request(2, "tools/list")).encode())
    assert reply is not None and rest is None
    call = json.dumps(request(3, "tools/call", {"name": "list_instances"})).encode()
    assert first(call) == (None, call)
    for other in (handshake(), request(4, "tools/list", ENVELOPE), request(REPLAYED, "tools/list")):
        assert first(json.dumps(other).encode()) == (None, json.dumps(other).encode())


def test_a_server_that_cant_start_says_why_to_whoever_asks(tmp_path: Path) -> None:
    home = tmp_path / "home"
    policy_file(home).write_text("caps.per_job_usd = 'much'", "utf-8")
    with serving(home) as server:
        assert "result" in server.ask(handshake())
        assert len(server.ask(request(2, "tools/list"))["result"]["tools"]) == 10
        told = server.ask(request(3, "tools/call", {"name": "list_instances", "arguments": {}}))
        assert told["id"] == 3 and "per_job_usd" in told["error"]["message"] and "policy" in told["error"]["message"]
        assert server.ask(b"{")["error"]["code"] == PARSE
        code, shown = server.leave()
    assert code == 2 and "per_job_usd" in shown


def called(number: int, tool: str, **arguments: object) -> dict[str, Any]:
    return request(number, "tools/call", {"name": tool, "arguments": arguments})


@pytest.mark.slow
@pytest.mark.parametrize("era", OPENINGS)
def test_a_server_that_could_not_start_does_so_at_the_next_call(tmp_path: Path, era: str) -> None:
    home, envelope = tmp_path / "home", ENVELOPE if era == "modern" else {}
    file = policy_file(home)
    file.write_text("caps.per_job_usd = 'much'", "utf-8")
    call = called(3, "list_instances")
    call["params"] |= envelope
    with serving(home) as server:
        assert "result" in server.ask(OPENINGS[era])
        if era == "legacy":
            server.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        for wrong in ("per_job_usd", "per_day_usd"):
            file.write_text(f"caps.{wrong} = 'much'", "utf-8")
            assert wrong in server.ask(call)["error"]["message"]
        file.write_text(POLICY, "utf-8")
        assert server.ask(call)["result"]["structuredContent"]["ok"] is True
        listed = server.ask(request(4, "tools/list", envelope or None))
        assert len(listed["result"]["tools"]) == 10
        code, _ = server.leave()
    assert code == 0


@pytest.mark.slow
def test_a_running_server_obeys_the_policy_of_now(tmp_path: Path) -> None:
    home = tmp_path / "home"
    file = policy_file(home)
    quick_warden(home)
    asks = POLICY + "[rehearsal_caps]\nper_job_usd = 0\n"
    with serving(home) as server:
        server.ask(handshake())
        server.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

        def submits(**more: object) -> dict[str, Any]:
            body = server.ask(called(5, "submit_job", **JOB, **more))["result"]["structuredContent"]
            assert isinstance(body, dict)
            return body

        checked = submits()
        assert checked["code"] == "checked"
        file.write_text(asks, "utf-8")
        assert submits(receipt=checked["receipt"])["code"] == "conflict", "it was checked under another policy"
        asked = submits()
        assert asked["code"] == submits(receipt=asked["receipt"])["code"] == "approval_required"
        file.write_text('platforms = ["local"]\n' + POLICY, "utf-8")
        assert "PF-PLT-002" in {f["rule"] for f in submits()["findings"]}
        file.write_text("caps =", "utf-8")
        broken = submits()
        assert broken["code"] == "bad_request" and "TOML" in broken["message"]
        file.write_text(POLICY, "utf-8")
        assert submits(receipt=submits()["receipt"])["code"] == "accepted"


def test_a_server_that_cant_start_leaves_a_client_that_it_never_answered(tmp_path: Path) -> None:
    home = tmp_path / "home"
    policy_file(home).write_text("caps.per_job_usd = 'much'", "utf-8")
    with serving(home) as server:
        server.send(request(1, "ping"))
        assert "per_job_usd" in server.hear()["error"]["message"]
        assert server.process.wait(60) == 2


def test_what_is_printed_beside_the_server_never_reaches_the_client() -> None:
    code = "import os, subprocess, sys\nfrom gpuwarden.interfaces.mcp.stdio_lines import StdioLines\n"
    code += "lines = StdioLines()\n"
    code += "print('noise', flush=True)\nos.write(1, b'noise')\n"
    code += "subprocess.run([sys.executable, '-c', 'print(\"noise\")'], check=True)\n"
    code += "assert os.read(0, 9) == b''\nlines.write(b'{}')\nassert lines.next().content == b'mine'"
    done = subprocess.run([sys.executable, "-c", code], input=b"mine\n", capture_output=True, timeout=300, check=True)
    assert done.stdout == b"{}\n" and done.stderr.count(b"noise") == 3
