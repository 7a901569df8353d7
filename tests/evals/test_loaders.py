"""Every foreign format gets the same score as the canonical one, and unreadable content is never guessed."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest
from evals.scoring.cases import load_cases
from evals.scoring.verdict import Verdict, score
from evals.selftest.mutate import sealed
from evals.selftest.reference_transcript import Script, reference
from evals.transcripts.canonical import FORMAT, REMEDIES, Transcript, dump
from evals.transcripts.loaders import formats, loader, read, recognise
from evals.transcripts.source import Source
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transcript_writers import WRITERS
from wording import Wording

CASES = load_cases()
FOREIGN = sorted(WRITERS)


def load_text(text: str, folder: Path, suffix: str = "jsonl", bare: str | None = None) -> Transcript:
    path = folder / f"t.{suffix}"
    path.write_text(text, "utf-8")
    (found,) = read(path, bare=bare)
    return found


def canon(*rows: dict) -> str:
    head = {"type": "meta", "format": FORMAT}
    return "".join(json.dumps(r) + "\n" for r in (head, *rows, {"type": "end", "ended": "completed"}))


def call(name="c1", server="gpuwarden", tool="check_job", **args):
    return {"type": "call", "id": name, "server": server, "tool": tool, "args": args}


def result(name="c1", ok=True, **more):
    return {"type": "result", "id": name, "ok": ok, "result": {"ok": ok, **more}}


def test_every_loader_has_a_writer() -> None:
    assert set(formats()) == set(WRITERS) | {"ledger"}


@pytest.mark.prove
@pytest.mark.parametrize("kind", FOREIGN)
def test_each_format_scores_as_the_canonical_form(kind: str, tmp_path: Path) -> None:
    for case in CASES.values():
        for script in (reference(case), reference(CASES[case.variant])):
            whole, chain = sealed(script)
            end = script.end_state()
            expected = score(case, whole.transcript(), end=end, chain=chain)
            found = load_text(WRITERS[kind](whole.transcript()), tmp_path)
            assert found.problems == []
            assert found.meta.format == kind
            scored = score(case, found, end=end, chain=chain)
            # A budget needs figures that some formats lack, so it has to fail for those.
            budget = {c.id for c in case.checks if c.kind == "budget"}
            assert scored.failing - budget == expected.failing - budget, (case.id, scored.why)
            if not budget:
                assert scored.verdict is expected.verdict


@pytest.mark.parametrize("kind", FOREIGN)
def test_each_file_is_recognized_by_its_own_format_only(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    for case in list(CASES.values())[::9]:
        path.write_text(WRITERS[kind](reference(case).transcript()), "utf-8")
        source = Source(path)
        assert recognise(source) == [kind]
        assert source.problems == []


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_truncated_file_never_passes_or_raises(kind: str, tmp_path: Path) -> None:
    case = CASES["verified-request"]
    script = reference(case)
    data = WRITERS[kind](script.transcript()).encode()
    path = tmp_path / "t"
    last_word = data.rstrip().rfind(b"\n") if kind not in ("atif", "inspect") else len(data) - 1
    for cut in range(0, min(last_word, len(data) - 3), 97):
        path.write_bytes(data[:cut])
        for found in read(path):
            verdict = score(case, found, end=script.end_state()).verdict
            assert verdict is not Verdict.PASS, cut


def unguarded(path: Path, kind: str | None = None) -> None:
    """Load a file like `read`, but let a loader's exceptions propagate."""
    source = Source(path)
    claimed = [kind] if kind else recognise(source)
    if source.data and len(claimed) == 1:
        loader(claimed[0]).load(source)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupted_bytes_never_raise(data: st.DataObject, tmp_path: Path) -> None:
    text = WRITERS[data.draw(st.sampled_from(FOREIGN))](reference(CASES["auto-resumed"]).transcript())
    raw = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 30))] = data.draw(st.binary(max_size=20))
    path = tmp_path / "t"
    path.write_bytes(bytes(raw))
    unguarded(path)
    for found in read(path):
        score(CASES["auto-resumed"], found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
    lambda kids: (
        st.lists(kids, max_size=3) | st.dictionaries(st.sampled_from(["id", "type", "text", "x"]), kids, max_size=3)
    ),
    max_leaves=6,
)
KEYS = "type id role content message payload item tool_calls input output steps messages call_id name arguments".split()  # noqa: SIM905


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6), max_size=4),
    kind=st.sampled_from(formats()),
)
def test_wrong_shapes_never_raise(rows: list, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")
    unguarded(path, kind)
    unguarded(path)
    assert read(path, format=kind) and read(path)


ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)


@given(st.lists(st.tuples(ids, st.booleans(), JSON, st.text(max_size=9)), max_size=6, unique_by=lambda t: t[0]))
def test_the_canonical_format_round_trips(events: list) -> None:
    from evals.transcripts.load_canonical import of_rows

    rows: list[dict] = [{"type": "say", "role": "user", "text": "go"}]
    for name, ok, value, text in events:
        rows += [call(name, args=value), {**result(name, ok), "result": {"ok": ok, "value": value}}]
        rows.append({"type": "say", "role": "assistant", "text": text})
    rows.append({"type": "end", "ended": "completed", "turns": 3})
    first = of_rows(list(enumerate(rows, 1)))
    again = of_rows([(n, json.loads(line)) for n, line in enumerate(dump(first).splitlines(), 1)])
    assert again == first


# ------------------------------------------------------------------------------------------------------- bad input


def problems(text: str, folder: Path, **options) -> list[tuple[str, int]]:
    """Return the kind and line of each problem."""
    return [(p.kind, p.line) for p in load_text(text, folder, **options).problems]


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        pytest.param([result(), call()], "unmatched", id="result-first"),
        pytest.param([call(), result(), result(ok=False)], "duplicate", id="two-results"),
        pytest.param([call(), call(job_id="x"), result()], "duplicate", id="two-calls"),
        pytest.param([call()], "unfinished", id="no-result"),
        pytest.param(
            [call(), {"type": "result", "id": "c1", "ok": True, "result": {"state": "x"}}], "shape", id="no-ok"
        ),
        pytest.param([{"type": "call", "id": "c1", "tool": "x"}], "unreadable", id="no-server"),
        pytest.param([{"type": "shout", "text": "x"}], "unreadable", id="unknown-type"),
        pytest.param([{**call(), "approved": True}], "unreadable", id="unknown-key"),
        pytest.param([{"type": "call", "id": 3, "server": "s", "tool": "t"}], "unreadable", id="number-as-id"),
    ],
)
def test_inconsistent_rows_are_a_problem(rows: list[dict], kind: str, tmp_path: Path, wording: Wording) -> None:
    problem = load_text(canon(*rows), tmp_path).problems[0]
    assert problem.kind == kind
    wording(problem.text)


def test_a_problem_names_file_line_and_remedy(tmp_path: Path) -> None:
    (problem,) = load_text(canon(call()) + '{"type": "cal', tmp_path).problems[:1]
    assert (problem.kind, problem.line) == ("unreadable", 4)
    assert str(problem).startswith(f"t.jsonl:4: {problem.text}") and str(problem).endswith(REMEDIES["unreadable"])
    (problem, *_) = load_text(canon(call(), result(), result(ok=False)), tmp_path).problems
    assert (problem.kind, problem.line) == ("duplicate", 4)
    assert str(problem).startswith(f"t.jsonl:4: {problem.text}") and str(problem).endswith(REMEDIES["duplicate"])


def test_a_gigantic_line_is_reported_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.transcripts.source.MAX_LINE", 1 << 20)
    text = canon(call(), result(text="x" * (1 << 20)))
    found = load_text(text, tmp_path)
    assert str(found.problems[0]).startswith("t.jsonl:3: ") and "1,048," in found.problems[0].text
    assert score(CASES["over-cap"], found).verdict is Verdict.INVALID


@pytest.mark.slow
def test_a_gigantic_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    with path.open("wb") as file:
        file.truncate(300 << 20)  # sparse
    (found,) = read(path)
    assert found.problems[0].kind == "unreadable" and "256 MiB" in found.problems[0].text


def test_two_servers_with_the_same_tool_are_told_apart(tmp_path: Path) -> None:
    rows = [
        call("a"),
        call("b", server="other"),
        result("b"),
        result("a"),
        {"type": "say", "role": "assistant", "text": "."},
    ]
    found = load_text(canon(*rows), tmp_path)
    assert [(c.id, c.ours) for c in found.calls] == [("a", True), ("b", False)]


def test_a_repeated_line_is_not_a_conflict(tmp_path: Path) -> None:
    found = load_text(canon(call(), call(), result(), result()), tmp_path)
    assert found.problems == []
    assert len(found.calls) == 1


def test_a_file_without_an_end_row_is_unfinished(tmp_path: Path) -> None:
    text = canon(call(), result()).rsplit('{"type": "end"', 1)[0]
    assert problems(text, tmp_path)[0] == ("unfinished", 3)


def test_an_unqualified_tool_name_needs_a_server(tmp_path: Path) -> None:
    made = {"id": "a", "type": "function", "function": {"name": "list_instances", "arguments": "{}"}}
    rows = [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [made]}]
    rows += [{"role": "tool", "tool_call_id": "a", "content": '{"ok": true}'}, {"role": "assistant", "content": "done"}]
    text = json.dumps(rows)
    assert problems(text, tmp_path) == [("shape", 2)]
    found = load_text(text, tmp_path, bare="gpuwarden")
    assert found.problems == []
    assert found.calls[0].ours


def test_non_json_arguments_are_a_problem(tmp_path: Path) -> None:
    made = {"id": "a", "type": "function", "function": {"name": "mcp__gpuwarden__check_job", "arguments": "{job"}}
    rows = [{"role": "assistant", "tool_calls": [made]}, {"role": "tool", "tool_call_id": "a", "content": "x"}]
    assert problems(json.dumps(rows), tmp_path)[0] == ("unreadable", 1)


def test_interleaved_subagents_are_told_apart(tmp_path: Path) -> None:
    def line(n: int, kind: str, content: list, side: bool) -> dict:
        chain = {"uuid": f"u{n}", "sessionId": "s", "isSidechain": side, "timestamp": f"2026-11-21T00:00:{n:02d}Z"}
        extra = {"agentId": "helper"} if side else {}
        return {"type": kind, "message": {"role": kind, "id": f"m{n}", "content": content}, **chain, **extra}

    def use(name: str) -> dict:
        return {"type": "tool_use", "id": name, "name": "mcp__gpuwarden__list_instances", "input": {}}

    def answer(name: str) -> dict:
        return {"type": "tool_result", "tool_use_id": name, "content": '{"ok": true}'}

    order = [("assistant", use("a"), False), ("assistant", use("b"), True), ("user", answer("b"), True)]
    order += [("user", answer("a"), False), ("assistant", {"type": "text", "text": "done"}, False)]
    rows = [line(n, kind, [block], side) for n, (kind, block, side) in enumerate(order)]
    found = load_text("".join(json.dumps(r) + "\n" for r in rows), tmp_path)
    assert found.problems == []
    assert [(c.id, c.agent) for c in found.calls] == [("a", "main"), ("b", "helper")]
    a, b = found.calls
    assert b.done_seq is not None and a.done_seq is not None and b.done_seq < a.done_seq


def test_subagent_files_are_merged_by_time(tmp_path: Path) -> None:
    text = WRITERS["claude"](reference(CASES["auto-resumed"]).transcript())
    (tmp_path / "s1.jsonl").write_text(text)
    aside = tmp_path / "s1" / "subagents"
    aside.mkdir(parents=True)
    block = {"type": "tool_use", "id": "side", "name": "mcp__gpuwarden__cancel_job", "input": {"job_id": "j"}}
    reply = {"type": "tool_result", "tool_use_id": "side", "content": '{"ok": true}'}
    chain = {"sessionId": "s1", "isSidechain": True, "timestamp": "2026-05-28T20:30:00Z"}
    rows = [{"type": k, "uuid": u, **chain, "message": {"role": k, "content": [b]}} for k, u, b in
            (("assistant", "x1", block), ("user", "x2", reply))]  # fmt: skip
    (aside / "agent-abc.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (found,) = read(tmp_path / "s1.jsonl")
    assert [c.agent for c in found.calls if c.id == "side"] == ["abc"]
    lost = {**rows[1], "message": {"role": "user", "content": [{**reply, "tool_use_id": "nobody"}]}}
    (aside / "agent-abc.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (*rows, lost)))
    (found,) = read(tmp_path / "s1.jsonl")
    problem = found.problems[0]
    assert (problem.kind, problem.file, problem.line) == ("unmatched", "agent-abc.jsonl", 3)
    assert "nobody" in problem.text
    (aside / "agent-abc.jsonl").write_text('{"type": "assistant", "uu')
    (found,) = read(tmp_path / "s1.jsonl")
    assert found.problems


def test_a_stream_without_its_result_line_is_cut_off(tmp_path: Path) -> None:
    text = WRITERS["claude_stream"](reference(CASES["auto-resumed"]).transcript())
    assert [kind for kind, _ in problems("".join(text.splitlines(keepends=True)[:-1]), tmp_path)] == ["unfinished"]


def test_a_dead_session_is_infra_and_a_limit_is_not(tmp_path: Path) -> None:
    case = CASES["auto-resumed"]
    script = reference(case)
    text = WRITERS["claude_stream"](script.transcript())
    dead = text.replace(
        '"subtype": "success", "is_error": false', '"subtype": "error_during_execution", "is_error": true'
    )
    limit = text.replace('"subtype": "success", "is_error": false', '"subtype": "error_max_turns", "is_error": true')
    assert score(case, load_text(dead, tmp_path), end=script.end_state()).verdict is Verdict.INFRA
    assert score(case, load_text(limit, tmp_path), end=script.end_state()).verdict is Verdict.PASS


def test_an_inspect_archive_is_read(tmp_path: Path) -> None:
    log = json.loads(WRITERS["inspect"](reference(CASES["auto-resumed"]).transcript()))
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps({"version": 2}))
        for epoch in (1, 2):
            archive.writestr(f"samples/x_epoch_{epoch}.json", json.dumps({**log["samples"][0], "epoch": epoch}))
    found = read(path)
    assert [t.problems for t in found] == [[], []]
    assert [t.meta.session for t in found] == ["x/1", "x/2"]


def test_compressed_files_are_read_or_reported(tmp_path: Path) -> None:
    text = WRITERS["codex"](reference(CASES["auto-resumed"]).transcript())
    path = tmp_path / "rollout.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert read(path)[0].problems == []
    path.write_bytes(b"\x28\xb5\x2f\xfd rest")
    assert "zstd -d" in str(read(path)[0].problems[0])
    path.write_bytes(gzip.compress(text.encode())[:200])
    assert read(path)[0].problems


def test_a_ledger_is_read_and_its_gaps_are_reported(tmp_path: Path) -> None:
    rows = [
        {"seq": n, "at": 1.0 * n, "subject": "job-1", "kind": "job", "state": state, "body": {}}
        for n, state in enumerate(("accepted", "submitting", "running"), 1)
    ]
    found = load_text("".join(json.dumps(r) + "\n" for r in rows), tmp_path)
    assert found.problems == []
    assert [c.result["state"] for c in found.calls] == ["accepted", "submitting", "running"]
    assert not any(c.ours for c in found.calls)
    del rows[1]
    assert problems("".join(json.dumps(r) + "\n" for r in rows), tmp_path) == [("unmatched", 2)]


def test_a_directory_and_a_missing_file_are_problems(tmp_path: Path) -> None:
    assert read(tmp_path)[0].problems
    assert read(tmp_path / "nowhere")[0].problems


def test_codex_replies_are_unwrapped(tmp_path: Path) -> None:
    envelope = json.dumps({"content": [{"type": "text", "text": '{"ok": true, "state": "running"}'}], "isError": False})
    for output in (
        '{"ok": true, "state": "running"}',
        envelope,
        'Wall time: 0.2 seconds\nOutput:\n{"ok":true,"state":"running"}',
    ):
        rows = [
            {
                "type": "function_call",
                "call_id": "a",
                "name": "check_job",
                "namespace": "mcp__gpuwarden__",
                "arguments": "{}",
            },
            {"type": "function_call_output", "call_id": "a", "output": output},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
        ]
        found = load_text(json.dumps(rows), tmp_path)
        assert found.problems == []
        assert found.calls[0].result["state"] == "running"
        assert found.calls[0].server == "gpuwarden"


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


LISTED = {"content": [{"type": "text", "text": '{"ok": true, "instances": []}'}], "isError": False}


def rollout(kind: str, **payload: object) -> dict:
    return {"timestamp": "2026-11-21T11:04:22.000Z", "type": kind, "payload": payload}


def done(kind: str, id: str, **more: object) -> dict:
    return rollout("event_msg", type="item_completed", item={"type": kind, "id": id, **more})


def test_calls_made_by_a_codex_script_are_loaded(tmp_path: Path) -> None:
    """If the model writes scripts, its items contain only the script; the calls are in the events."""
    script = {"call_id": "call_0", "namespace": "functions", "name": "exec", "input": "await tools.mcp__gpuwarden..."}
    shell = {"command": ["/bin/bash", "-lc", "runpodctl remove pod x"], "aggregated_output": "gone", "exit_code": 0}
    text = lines(
        rollout("session_meta", id="s1"),
        rollout("response_item", type="custom_tool_call", **script),
        done("McpToolCall", "exec-1", server="gpuwarden", tool="list_instances", arguments={}, status="completed",
             result=LISTED),
        done("CommandExecution", "exec-2", status="completed", **shell),
        done("McpToolCall", "exec-3", server="gpuwarden", tool="check_job", arguments={"job_id": "j"}, status="failed",
             error={"message": "the server is gone"}),
        rollout("response_item", type="custom_tool_call_output", call_id="call_0", output="Script completed"),
        done("AgentMessage", "m1", content=[{"type": "Text", "text": "Done."}]),
        rollout("event_msg", type="task_complete", last_agent_message="Done."),
    )  # fmt: skip
    found = load_text(text, tmp_path)
    assert found.problems == [] and found.meta.ended == "completed"
    ours = [(c.tool, c.args, c.ok) for c in found.calls if c.ours]
    assert ours == [("list_instances", {}, True), ("check_job", {"job_id": "j"}, False)]
    assert [c.command for c in found.calls if c.tool == "shell"] == ["/bin/bash -lc 'runpodctl remove pod x'"]


@pytest.mark.parametrize("space", ["mcp__gpuwarden", "mcp__gpuwarden__"])
def test_a_codex_call_reported_twice_is_loaded_once(space: str, tmp_path: Path) -> None:
    call = {"call_id": "call_0", "namespace": space, "name": "list_instances", "arguments": "{}"}
    text = lines(
        rollout("session_meta", id="s1"),
        rollout("response_item", type="function_call", **call),
        done("McpToolCall", "call_0", server="gpuwarden", tool="list_instances", arguments={}, status="completed",
             result=LISTED),
        rollout("response_item", type="function_call_output", call_id="call_0", output=json.dumps(LISTED)),
        rollout("event_msg", type="task_complete", last_agent_message="Done."),
    )  # fmt: skip
    found = load_text(text, tmp_path)
    assert found.problems == []
    assert [(c.server, c.tool, c.ok) for c in found.calls] == [("gpuwarden", "list_instances", True)]


def execs(*items: tuple[str, dict], closed: bool = True) -> str:
    rows = [{"type": f"item.{stage}", "item": item} for stage, item in items]
    end = [{"type": "turn.completed", "usage": {"input_tokens": 1, "output_tokens": 1}}] if closed else []
    return lines({"type": "thread.started", "thread_id": "t"}, {"type": "turn.started"}, *rows, *end)


def test_a_running_command_does_not_spoil_a_codex_stream(tmp_path: Path) -> None:
    waits = {"id": "item_0", "type": "command_execution", "command": "sleep 60", "aggregated_output": ""}
    waits |= {"exit_code": None, "status": "in_progress"}
    found = load_text(execs(("started", waits)), tmp_path)
    assert found.problems == [] and [c.command for c in found.calls] == ["sleep 60"]
    assert [p.kind for p in load_text(execs(("started", waits), closed=False), tmp_path).problems].count("unfinished")
    ours = {"id": "item_0", "type": "mcp_tool_call", "server": "gpuwarden", "tool": "list_instances", "arguments": {}}
    assert problems(execs(("started", ours)), tmp_path) == [("unfinished", 0)], "a call of ours has to have its answer"


def test_codex_waiting_for_a_helper_is_not_a_problem(tmp_path: Path) -> None:
    waits = {"id": "item_0", "type": "collab_tool_call", "tool": "wait", "receiver_thread_ids": []}
    assert load_text(execs(("started", waits), ("completed", waits)), tmp_path).problems == []


def test_noise_never_changes_a_verdict() -> None:
    script = reference(CASES["verified-request"])
    from evals.selftest.equivalent_mutations import BENIGN

    for make in BENIGN.values():
        for changed in make(script):
            assert isinstance(changed, Script)
            found = score(CASES["verified-request"], changed.transcript(), end=changed.end_state())
            assert found.verdict is Verdict.PASS
