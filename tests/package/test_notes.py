"""The user's notes: strict, with file and line; private, without secrets; and defaults for the user's own machines."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doors import answer, in_process
from fakes import FakeClock
from gpuwarden.core.errors import BadRequest
from gpuwarden.data import data_dir
from gpuwarden.interfaces.mcp.resources import NOTES_URI, documents
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.notes import Notes, change, load_notes, looks_secret, read_notes
from lifecycle_kit import open_house
from wording import Wording

WHOLE = """\
facts = ["the lab's box is shared on Fridays"]

[tracker]
name = "wandb"
entity = "my-team"
key = "$WANDB_API_KEY"

[usual]
gpu = "A100"
disk_gb = 100

[platforms.box]
host = "lab-box"
scratch = "/data/me/runs"
key = "~/.ssh/id_ed25519"
"""
HEX = "0123456789abcdef" * 2 + "01234567"  # the format of an old wandb key


def private(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    file.chmod(0o600)
    return file


def test_a_complete_file_is_read(tmp_path: Path) -> None:
    notes = load_notes(private(tmp_path / "notes.toml", WHOLE))
    assert notes.of("box").host == "lab-box" and notes.of("elsewhere").host is None
    assert notes.tracker is not None and notes.tracker.key == "$WANDB_API_KEY"
    assert (notes.usual.gpu, notes.usual.disk_gb, len(notes.facts)) == ("A100", 100, 1)


def test_a_missing_file_means_empty_notes(tmp_path: Path) -> None:
    assert load_notes(tmp_path / "notes.toml") == Notes()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[tracker]\nname = 'wandb'\ncolour = 'red'\n", r":3: tracker\.colour"),
        ("colour = 1\n", ":1: colour"),
        ("[tracker]\nentity = 'me'\n", r":1: tracker\.name"),
        ("[usual]\n\n# so many\ngpu_count = 0\n", r":4: usual\.gpu_count"),
        ("[usual]\ngpu_count = '2'\n", r":2: usual\.gpu_count"),
        ("[usual]\ngpu_count = 2026-11-21\n", r":2: usual\.gpu_count"),
        ("usual.gpu_count = nan\n", r":1: usual\.gpu_count"),
        ("[platforms.box]\nhost = '-oProxyCommand=x'\n", r":2: platforms\.box\.host"),
        ("[platforms.box]\nscratch = 'data'\n", r":2: platforms\.box\.scratch"),
        ("[platforms.box]\nkey = 'in my head'\n", r":2: platforms\.box\.key"),
        ("[platforms.'A B']\nhost = 'x'\n", r":1: platforms\.A B"),
        ("[platforms]\nbox.hots = 'x'\n", r":2: platforms\.box\.hots"),
        ("facts = ['fine', '']\n", r":1: facts\.1"),
        (f"facts = ['{'a' * 60_000}']\n", r":1: facts\.0"),
    ],
)
def test_every_mistake_is_reported_with_file_and_line(text: str, place: str) -> None:
    with pytest.raises(BadRequest, match="mine" + place):
        read_notes(text, "mine")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param("a = 1\nb = = 2\n", "2", id="two-signs"),
        pytest.param("[tracker\n", "1", id="open-table"),
        pytest.param(f"usual.gpu_count = {'9' * 5000}\n", "", id="long-number"),
        pytest.param(f"[a{'.a' * 20_000}]\n", "", id="deep-table"),
    ],
)
def test_invalid_toml_is_reported_with_file_and_line(text: str, line: str, wording: Wording) -> None:
    with pytest.raises(BadRequest) as caught:
        read_notes(text, "mine")
    wording(caught.value.message, f"mine:{line}")


SECRETS = [
    "hf_" + "a1B2" * 9,
    "sk-proj-" + "x9" * 15,
    HEX,
    "A1b2C3d4E5f6G7h8I9j0K1l2",
    "my password: hunter2",
    "token=abc",
    "https://me:hunter2@tracker.example.org",
    "-----BEGIN OPENSSH PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("where", ["facts = [\n'{}']\n", "[tracker]\nname = '{}'\n", "[platforms.box]\n'{}' = 1\n"])
def test_a_likely_secret_is_refused_and_not_repeated(secret: str, where: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_notes(where.format(secret), "mine")
    assert caught.value.message.startswith("mine:")
    assert secret not in str(caught.value) + in_calls(caught.value.next_steps)
    assert "$NAME" in in_calls(caught.value.next_steps), "a place may stand there"


def test_a_secret_sounding_key_is_refused_with_a_reference_hint() -> None:
    with pytest.raises(BadRequest, match="mine:2: ") as caught:
        read_notes("[platforms.box]\napi_key = 'hunter2'\n", "mine")
    assert "$NAME" in in_calls(caught.value.next_steps)
    with pytest.raises(BadRequest, match=r"mine:2: platforms\.box\.api_key"):
        read_notes("[platforms.box]\napi_key = '$BOX_KEY'\n", "mine")


@pytest.mark.parametrize(
    "text",
    [
        "the token lies in ~/.cache/huggingface/token",
        "secret: $WANDB_API_KEY",
        "use meta-llama/Llama-3.1-8B-Instruct for smoke runs",
        "internationalization",
        "NVIDIA GeForce RTX 4090",
        "run 2026-11-21-a is the baseline",
    ],
)
def test_plain_words_are_not_taken_for_secrets(text: str) -> None:
    assert not looks_secret(text)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_and_never_repeated(text: str) -> None:
    said = "mine:"
    try:
        read_notes(text, "mine")
    except BadRequest as refused:
        said = refused.message
    assert said.startswith("mine:")


@pytest.mark.skipif(os.name != "posix", reason="file modes of POSIX")
@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602, 0o610])
def test_notes_accessible_to_other_users_are_refused(tmp_path: Path, mode: int) -> None:
    file = private(tmp_path / "notes.toml", WHOLE)
    file.chmod(mode)
    with pytest.raises(BadRequest, match=f"{mode:04o}") as caught:
        load_notes(file)
    assert in_calls(caught.value.next_steps) == f"Run: chmod 600 {file}"


def test_a_folder_or_non_text_file_is_refused(tmp_path: Path, wording: Wording) -> None:
    file = tmp_path / "notes.toml"
    file.mkdir()
    with pytest.raises(BadRequest) as refused:
        load_notes(file)
    wording(refused, file, os.strerror(errno.EISDIR))
    file.rmdir()
    private(file, "").write_bytes(b"a = 1\nb = '\xff'\n")
    with pytest.raises(BadRequest) as refused:
        load_notes(file)
    wording(refused, f"{file}:2")
    private(file, "#" * 70_000)
    with pytest.raises(BadRequest) as refused:
        load_notes(file)
    wording(refused, file)
    if hasattr(os, "mkfifo"):
        file.unlink()
        os.mkfifo(file, 0o600)
        with os.fdopen(os.open(file, os.O_RDWR), "wb"), pytest.raises(BadRequest) as refused:
            load_notes(file)
        wording(refused, file)


def test_a_change_keeps_other_notes_and_file_privacy(tmp_path: Path) -> None:
    file = private(tmp_path / "notes.toml", "# mine\n" + WHOLE)
    file.rename(tmp_path / "dotfiles.toml")
    file.symlink_to(tmp_path / "dotfiles.toml")
    change(file, "usual.gpu_count", "2", lambda _: None)
    assert file.is_symlink()
    change(file, "facts", "a second fact", lambda _: None)
    change(file, "platforms.box.key", None, lambda _: None)
    notes = load_notes(file)
    assert notes.usual.gpu_count == 2 and notes.facts[1] == "a second fact" and notes.of("box").key is None
    assert file.read_text().startswith("# mine\n") and file.stat().st_mode & 0o777 == 0o600


def test_an_invalid_change_changes_nothing(tmp_path: Path) -> None:
    file = private(tmp_path / "notes.toml", WHOLE)

    def refuse(_: Notes) -> None:
        raise BadRequest("not so", "Do not.")

    for key, value in [("facts", HEX), ("tracker.name", None), ("nope.x", None), ("a b", "c"), ("facts.x", "y")]:
        with pytest.raises(BadRequest):
            change(file, key, value, lambda _: None)
    with pytest.raises(BadRequest, match="not so"):
        change(file, "usual.gpu", "H100", refuse)
    assert file.read_text() == WHOLE and [p.name for p in tmp_path.iterdir()] == ["notes.toml"]


# ------------------------------------------------------------------------------------------------------- defaults


def own_profile(folder: Path) -> Path:
    """Add a profile for the user's own machine `box` behind SSH."""
    folder.mkdir(parents=True, exist_ok=True)
    text = (data_dir("profiles") / "local.md").read_text("utf-8")
    (folder / "box.md").write_text(text.replace("id: local", "id: box").replace("backend: local", "backend: ssh"))
    return folder


def test_noted_host_and_scratch_become_the_place_of_an_owned_machine(tmp_path: Path) -> None:
    ctx = open_house(tmp_path / "home", FakeClock())
    ctx.own_profiles = own_profile(tmp_path / "profiles")
    before = ctx.owned_place("box")
    del ctx.notes
    ctx.notes_file = private(tmp_path / "notes.toml", WHOLE)
    place = ctx.owned_place("box")
    assert (place.host, place.run_root) == ("lab-box", "/data/me/runs")
    assert (before.host, before.run_root) == (None, ctx.profile("box").run_root)


def test_an_ssh_machine_uses_its_own_or_the_shared_notes(tmp_path: Path) -> None:
    ctx = open_house(tmp_path / "home", FakeClock())
    ctx.notes_file = private(
        tmp_path / "notes.toml",
        "[platforms.ssh]\nscratch = '/scratch'\n[platforms.'ssh/lab']\nscratch = '/data/runs'\n",
    )
    assert [(p.host, p.run_root) for p in map(ctx.owned_place, ("ssh/lab", "ssh/other"))] == [
        ("lab", "/data/runs"),
        ("other", "/scratch"),
    ]


def test_a_scratch_folder_with_parent_steps_is_refused(tmp_path: Path) -> None:
    ctx = open_house(tmp_path / "home", FakeClock())
    ctx.notes_file = private(tmp_path / "notes.toml", "[platforms.local]\nscratch = '/data/../etc'\n")
    with pytest.raises(BadRequest, match=r"notes\.toml: platforms\.local\.scratch"):
        ctx.owned_place("local")


def test_broken_notes_do_not_move_a_job_to_the_default_place(tmp_path: Path) -> None:
    ctx = open_house(tmp_path / "home", FakeClock())
    ctx.notes_file = private(tmp_path / "notes.toml", "[platforms.local]\nscratsh = '/data'\n")
    with pytest.raises(BadRequest, match=r"notes\.toml:2: platforms\.local\.scratsh"):
        ctx.owned_place("local")


def test_clients_can_read_only_valid_notes(tmp_path: Path) -> None:
    file = private(tmp_path / "notes.toml", WHOLE)
    body = json.loads(documents(None, file)[NOTES_URI].text)
    assert body["platforms"]["box"]["host"] == "lab-box" and "gpu_count" not in body["usual"]
    for text in ("", "[tracker\n", f"facts = ['{HEX}']\n"):
        assert NOTES_URI not in documents(None, private(file, text))


# ------------------------------------------------------------------------------------------------- the command line


def test_notes_are_managed_on_the_command_line(tmp_path: Path, wording: Wording) -> None:
    home, policy = tmp_path / "home", tmp_path / "cfg" / "policy.toml"
    policy.parent.mkdir()
    policy.touch()
    env = {"GPUWARDEN_POLICY": str(policy)}

    def run(*words: str) -> dict[str, object]:
        return answer(in_process(home, *words, "--json", **env))

    assert run("notes")["notes"] == {}
    assert run("notes", "set", "tracker.name", "wandb")["ok"] is True
    assert run("notes", "set", "tracker.key", HEX)["code"] == "bad_request"
    assert HEX not in (policy.parent / "notes.toml").read_text()
    wording(str(run("notes", "set", "platforms.runpod.host", "x")["message"]), "platforms.runpod")
    wording(str(run("notes", "set", "platforms.rumpod.note", "x")["message"]), "platforms.rumpod")
    for name in ("local", "ssh", "ssh/lab"):
        wording(str(run("notes", "set", f"platforms.{name}.host", "x")["message"]), f"platforms.{name}:")
    assert run("notes", "set", "platforms.ssh/lab.scratch", "/data")["ok"] is True
    assert run("notes", "unset", "platforms.ssh/lab.scratch")["ok"] is True
    far = "ray/Head.example.org"
    assert run("notes", "set", f"platforms.{far}.scratch", "/mnt/runs")["ok"] is True
    assert load_notes(policy.parent / "notes.toml").of(far).scratch == "/mnt/runs"
    assert run("notes", "unset", f"platforms.{far}.scratch")["ok"] is True
    assert run("notes", "set", "platforms.runpod.key", "$RUNPOD_API_KEY")["ok"] is True
    assert run("profiles", "runpod")["notes"] == {"key": "$RUNPOD_API_KEY"}
    assert run("notes", "unset", "tracker.name")["notes"] == {"platforms": {"runpod": {"key": "$RUNPOD_API_KEY"}}}
    assert in_process(home, "notes", "path", **env).stdout.strip() == str(policy.parent / "notes.toml")


def test_the_doctor_reports_mistakes_in_notes(tmp_path: Path) -> None:
    policy = tmp_path / "cfg" / "policy.toml"
    private(policy, "")
    found = {}
    for text in ("[tracker]\nname = 'wandb'\n", "[tracker]\n", "[platforms.rumpod]\nnote = 'x'\n"):
        private(policy.with_name("notes.toml"), text)
        body = answer(in_process(tmp_path / "home", "doctor", "--json", GPUWARDEN_POLICY=str(policy)))
        [found[text]] = [c for c in body["checks"] if c["what"] == "notes"]
    assert [c["ok"] for c in found.values()] == [True, False, False]
    assert "notes.toml:1: tracker.name" in found["[tracker]\n"]["found"]
