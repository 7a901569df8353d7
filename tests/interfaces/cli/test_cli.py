"""The command line: one JSON object in every case, exit codes, and the output for users."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from rich.console import Console

from cli_kit import OPTIONS, Cli, ended, launched, metering
from doors import PLATFORM, environment
from gpuwarden.interfaces import results
from gpuwarden.interfaces.cli import console, main
from gpuwarden.lifecycle.context import Context
from wording import Wording


@pytest.mark.prove
def test_job_lifecycle_works_with_json_alone(run: Cli, train: Path, home: Path, ctx: Context, wording: Wording) -> None:
    job_id = launched(run, train)
    assert ended(run, job_id)["meter"]["billing"] is True
    assert run("teardown", job_id)[0] == 1, "nothing was pulled"
    code, body = run("verify", job_id)
    assert (code, body["code"]) == (0, "claimed"), "the machine's own word, and no more"
    code, body = run("verify", job_id, "--where", "instance", "--level", "load", "--against", "out/model.safetensors")
    assert (code, body["verdict"]) == (1, "refuted")
    wording("\n".join(body["problems"]))
    assert run("teardown", job_id)[0] == 1, "it counts as no copy"
    code, body = run("verify", job_id, "--where", "here")
    assert (code, body["code"]) == (2, "conflict")
    assert run("pull", job_id)[1]["files"] == 1
    copy = home / "artifacts" / job_id / "out/model.safetensors"
    whole = copy.read_bytes()
    copy.write_bytes(whole[:-1] + b"\xff")
    code, body = run("verify", job_id)
    assert (code, body["verdict"]) == (1, "refuted")
    assert run("verify", str(home / "nothing"))[1]["code"] == "not_found"
    copy.write_bytes(whole)
    code, body = run("verify", str(copy), "--level", "structure")
    assert (code, body["verdict"]) == (0, "proven")
    assert run("verify", job_id)[0] == 0
    code, body = run("teardown", job_id)
    assert (code, body["code"]) == (0, "approval_required")
    assert run("approve", body["ticket"])[1]["code"] == "refused", "there is no terminal here"
    assert run("teardown", job_id, "--withdraw")[1]["code"] == "withdrawn"
    assert len(run("instances")[1]["instances"]) == 1
    assert run("cancel", job_id)[1]["state"] == "succeeded"
    events = run("history", job_id)[1]["events"]
    assert {"job.accepted", "artifacts.pulled", "teardown.withdrawn"} <= {e["kind"] for e in events}
    assert metering(ctx)


@pytest.mark.parametrize(
    ("words", "exit_code", "code", "told"),
    [
        (["nonsense"], 2, "bad_request", "nonsense"),
        (["check"], 2, "bad_request", "JOB_ID"),
        (["check", "j1", "--colour"], 2, "bad_request", "--colour"),
        (["check", "j1", "--log-bytes", "much"], 2, "bad_request", "much"),
        (["check", "j1"], 1, "not_found", "j1"),
        (["cancel", "j1"], 1, "not_found", "j1"),
        (["pull", "j1"], 1, "not_found", "j1"),
        (["teardown", "j1"], 1, "not_found", "j1"),
        (["submit", "--platform", PLATFORM, "none.py"], 2, "bad_request", "none.py"),
        (["submit", "--platform", PLATFORM, "/"], 1, "refused", "PF-TIME-001"),
        (["submit", "--platform", PLATFORM, "--env", "A", "true"], 2, "bad_request", "NAME=VALUE"),
        (["submit", "--platform", "x y", "true"], 2, "bad_request", "--platform"),
        (["submit", "--platform", "runpd", "true"], 1, "refused", "runpod"),
        (["submit", "--platform", PLATFORM, "--name", "a b", "true"], 2, "bad_request", "name"),
        (["history", "j1"], 1, "not_found", "j1"),
        (["check", "j1", "j2"], 2, "bad_request", "j2"),
        (["hooks"], 2, "bad_request", "uninstall"),
        (["submit", "--platform", "moonbase", "true"], 1, "refused", "PF-PLT-001"),
        (["submit", "--platform", PLATFORM, "--max-cost", "nan", "true"], 2, "bad_request", "--max-cost"),
        (["submit", "--platform", PLATFORM, "--output", "../x", "true"], 2, "bad_request", "../x"),
        (["rules", "PF-NONE-001"], 1, "not_found", "PF-NONE-001"),
        (["profiles", "moonbase"], 1, "not_found", "moonbase"),
        (["profiles", "../../etc/passwd"], 1, "not_found", "passwd"),
        (["verify", "no/such/file"], 2, "not_found", "no/such/file"),
    ],
)
def test_every_error_is_one_object_with_its_exit_code(
    run: Cli, words: list[str], exit_code: int, code: str, told: str
) -> None:
    found, body = run(*words)
    assert (found, body["code"]) == (exit_code, code), body
    assert told in json.dumps(body)


def test_invalid_argument_error_names_the_problem(run: Cli, wording: Wording) -> None:
    for words, value in (
        (["--platform", "x y"], "--platform"),
        (["--platform", "runpd"], "runpod"),
        (["--platform", PLATFORM, "--name", "a b"], "name"),
        (["--platform", PLATFORM, "--output", "../x"], "../x"),
    ):
        code, body = run("submit", *words, "true")
        assert code
        unknown = [f["message"].partition(";")[0] for f in body.get("findings", ()) if f["rule"] == "PF-PLT-001"]
        wording("\n".join(unknown) or f"{body['message']}\n{body['hint']}", value)


@pytest.mark.parametrize(
    "words",
    [
        ["rules"],
        ["rules", "pf-hub-001"],
        ["profiles"],
        ["profiles", "vastai"],
        ["profiles", "ssh"],
        ["profiles", "ssh/box"],
        ["doctor"],
        ["history"],
        ["instances"],
        [],
        ["status"],
        ["status", "--offline"],
        ["jobs"],
        ["costs"],
        ["approve"],
    ],
)
def test_read_only_commands_succeed(run: Cli, words: list[str]) -> None:
    assert run(*words)[0] == 0
    code, text = run.shown(*words)
    assert code == 0 and "Traceback" not in text


def test_bare_command_group_shows_its_help(run: Cli) -> None:
    for words in (["--help"], ["knowledge"]):
        code, text = run.shown(*words)
        assert code == 0 and text.startswith("Usage: gpuwarden") and "bad_request" not in text


def test_invalid_scripts_are_refused(run: Cli, tmp_path: Path) -> None:
    for name, content, told in (
        ("empty.py", b"", "script"),
        ("big.py", b"#" * 50_000_000, "big.py"),
        ("latin.py", b"x = '\xff'", "UTF-8"),
        ("broken.py", b"def f(:", "PF-SRC-001"),
    ):
        (tmp_path / name).write_bytes(content)
        code, body = run("submit", *OPTIONS, str(tmp_path / name))
        assert code and told in json.dumps(body), name
    (tmp_path / "folder.py").mkdir()
    assert "folder.py" in run("submit", *OPTIONS, str(tmp_path / "folder.py"))[1]["message"]


def test_check_with_a_script_points_to_the_dry_run(run: Cli, train: Path) -> None:
    code, body = run("check", str(train))
    assert (code, body["code"]) == (2, "bad_request")
    assert f"gpuwarden submit --dry-run {train}" in json.dumps(body["next"])


@pytest.mark.parametrize(
    "words", [("instances",), ("notes",), ("notes", "set", "tracker.name", "c"), ("template", "list")]
)
def test_json_option_may_precede_the_command_name(
    run: Cli, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    for place in range(len(words) + 1):
        if place == len(words) or words[:place] in {(), ("notes",)}:  # a group that is also a command accepts it, too
            main.run([*words[:place], "--json", *words[place:]])
            assert json.loads(capsys.readouterr().out)["ok"] is True


def test_json_after_two_dashes_belongs_to_the_job(run: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["submit", "--platform", "moonbase", "--", "true", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "PF-PLT-001" in err


@pytest.mark.slow
def test_follow_with_json_prints_only_the_final_state(run: Cli, train: Path) -> None:
    job_id = launched(run, train)
    assert run("check", job_id, "--follow")[1]["state"] == "succeeded"


# ------------------------------------------------------------------------------------------------- internal errors


def test_internal_error_hides_its_details_without_debug(
    run: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("secret inside")

    monkeypatch.setattr("gpuwarden.app.open_context", explode)
    code, body = run("instances")
    assert (code, body["code"]) == (1, "internal") and "secret inside" not in json.dumps(body)
    code, text = run.shown("instances")
    assert code == 1 and "internal" in text and "Traceback" not in text
    monkeypatch.setenv("GPUWARDEN_DEBUG", "1")
    assert main.run(["instances", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["code"] == "internal" and "secret inside" in err


def test_interruption_gets_a_plain_message(
    run: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    for error in (KeyboardInterrupt(), click.exceptions.Abort()):

        def stop(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("gpuwarden.app.open_context", stop)
        assert main.run(["instances", "--json"]) == 2
        wording(json.loads(capsys.readouterr().out)["message"])


@pytest.mark.slow
def test_closed_pipe_does_not_crash(home: Path, ctx: Context) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuwarden", "rules"],
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as stderr:
        said = stderr.read()
    assert process.wait(30) == 1 and said == b"", said.decode()


# ------------------------------------------------------------------------------------------------------------ output


def test_tables_fit_80_columns_and_break_no_id(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "out", Console(width=80, highlight=False))
    machine = {
        "platform": "rehearsal/prime_intellect", "instance_id": "r23243ea3-17", "ours": True, "state": "terminating",
        "billing": None, "price_usd_per_hour": 28.8, "cost_usd": 1234.5678, "since": 1.8e9, "job_id": "j0123456789",
        "job_state": "provisioning", "note": "unverified: counts as billed; the job is failed and the meter runs",
    }  # fmt: skip
    console.listed(results.InstancesReply(instances=[results.InstanceReply.model_validate(machine)]))
    event = {"seq": 1, "at": 1.8e9, "subject": "receipt/r0123456789abcdef", "kind": "lease.created"}
    console.history([{**event, "state": "metering", "body": {"why": "seen \x1b[2J " + "gone " * 40}}])
    shown = capsys.readouterr().out
    assert all(len(text) <= 80 for text in shown.splitlines())
    for whole in ("rehearsal/prime_intellect", "r23243ea3-17", "$1,234.57", "$28.80/h", "j0123456789", "unknown"):
        assert whole in shown
    assert "receipt/r0123456789abcdef" in shown and "lease.created -> metering" in shown and "\x1b" not in shown


@pytest.mark.slow
def test_check_shows_commands_and_the_log_without_a_fence(run: Cli, train: Path) -> None:
    job_id = launched(run, train)
    ended(run, job_id)
    _, shown = run.shown("check", job_id)
    assert f"`gpuwarden pull {job_id}`" in shown and "pull_artifacts" not in shown
    assert f"`gpuwarden pull {job_id}`" in run("check", job_id)[1]["hint"]
    assert "step 1 loss 0.5" in shown and "<<<DATA" not in shown


# ----------------------------------------------------------------------------------------------------- fast starts

HEAVY = {"mcp", "numpy", "paramiko", "huggingface_hub", "torch", "safetensors"}


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["check", "j1"], ["rules"], ["instances"]])
def test_commands_import_no_heavy_library(home: Path, words: list[str]) -> None:
    code = (
        "import sys; from gpuwarden.interfaces.cli.main import run; run(sys.argv[1:]); print('MODULES', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in re.search(r"MODULES (.*)", done.stdout)[1].split()}  # type: ignore[index]
    assert not loaded & HEAVY
    if words[0].startswith("--"):
        assert not loaded & {"pydantic", "rich", "anyio", "yaml"}
