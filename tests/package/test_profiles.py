"""Profiles: the strict format, which storage survives which event on the five platforms, and tables in the prose."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from clouds.platform import platforms
from gpuwarden.core.errors import BadRequest, NotFound
from gpuwarden.core.profile import Event, Profile, UnknownFact
from gpuwarden.interfaces.cli.main import run
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.profiles import BLOCKS, BY_HAND, load_profile, load_text, profile_names, render_blocks
from gpuwarden.providers.base import provider_names
from paths import ROOT
from wording import Wording

FILES = sorted((ROOT / "profiles").glob("*.md"))
EVENTS: tuple[Event, ...] = ("stop", "terminate", "preemption", "job_end")


def front(**changes: Any) -> dict[str, Any]:
    """Return the front matter of a small rented platform; the value `...` removes a key."""
    sourced = {"verified": "2026-08", "source": "https://example.org/docs"}
    lives = {"stop": True, "terminate": False, "preemption": True, "job_end": True}
    bills = {"bills_when_stopped": False, "bills_when_terminated": False}
    base: dict[str, Any] = {
        "id": "small",
        "title": "Small",
        "kind": "rented",
        "backend": "ssh",
        "provider": "small",
        "run_root": "/data/runs",
        "storage": [{"tier": "disk", "path": "/data", "survives": lives, **bills, **sourced}],
        "meter": {"metered": True, "stops_on": ["terminate"], **sourced},
        "verbs": {"stop": "stop", "terminate": "terminate", **sourced},
        "spot": {"offered": False, **sourced},
        "limits": {"boot_timeout_s": 60, **sourced},
    }
    for path, value in changes.items():
        *way, last = path.split("__")
        at: Any = base
        for step in way:
            at = at[int(step) if step.isdigit() else step]
        if value is ...:
            del at[last]
        else:
            at[last] = value
    return base


def text_of(data: dict[str, Any], body: str = "") -> str:
    unshared = json.loads(json.dumps(data))  # otherwise PyYAML writes aliases for repeated objects
    written = yaml.dump(unshared, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False)
    return f"---\n{written}---\n{body}"


def profile(**changes: Any) -> Profile:
    return load_text(text_of(front(**changes)), "small.md")


def tier(**changes: Any) -> dict[str, Any]:
    return {**front()["storage"][0], **changes}


# ------------------------------------------------------------------------------------------------------ strictness


def test_the_small_profile_is_good():
    assert profile().id == "small"


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"colour": "red"}, "colour"),
        ({"storage__0__colour": "red"}, r"storage\.0\.colour"),
        ({"meter__verified": ...}, r"meter\.verified"),
        ({"storage__0__source": ...}, r"storage\.0\.source"),
        ({"storage__0__survives__preemption": ...}, r"survives\.preemption"),
        ({"storage__0__bills_when_stopped": ...}, "bills_when_stopped"),
        ({"storage__0__survives__stop": {"unknown": "no"}}, r"survives\.stop\.UnknownFact\.unknown"),
        ({"storage__0__survives__stop": {}}, r"survives\.stop\.UnknownFact\.unknown"),
        ({"storage__0__survives__stop": "unknown"}, r"survives\.stop\S*"),
        ({"storage__0__survives__stop": "yes"}, r"survives\.stop\.bool"),
        ({"storage__0__survives__stop": 1}, r"survives\.stop\.bool"),
        ({"storage__0__survives__stop": None}, r"survives\.stop\S*"),
        ({"meter__verified": "2026-13"}, r"meter\.verified"),
        ({"meter__verified": "2026-8"}, r"meter\.verified"),
        ({"meter__verified": "2026-08-20"}, r"meter\.verified"),
        ({"meter__verified": "August 2026"}, r"meter\.verified"),
        ({"meter__source": "docs"}, r"meter\.source"),
        ({"run_root": "relative"}, "run_root"),
        ({"storage": []}, "storage"),
        ({"meter__stops_on": ["hibernate"]}, r"meter\.stops_on\.0"),
        ({"id": "Small"}, "id"),
        ({"meter__price_usd_per_hour": 1.5}, r"meter\.price_usd_per_hour"),
    ],
)
def test_one_wrong_fact_is_refused_with_file_and_line(changes: dict[str, Any], place: str):
    with pytest.raises(BadRequest, match=rf"small\.md:\d+: (\S+\.)?{place}: ") as caught:
        profile(**changes)
    assert re.match(r"small\.md:\d+: ", caught.value.message)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"run_root": "/elsewhere/runs"}, id="run-root-elsewhere"),
        pytest.param({"run_root": "/data/../etc"}, id="run-root-climbs"),
        pytest.param({"storage": [tier(), tier(path="/other")]}, id="same-tier-twice"),
        pytest.param({"storage": [tier(), tier(tier="b")]}, id="same-path-twice"),
        pytest.param({"storage": [tier(), tier(tier="b", present="sometimes")]}, id="same-path-sometimes"),
        pytest.param({"storage": [tier(present="on_request")]}, id="run-root-on-request"),
        pytest.param({"storage": [tier(present="sometimes")]}, id="run-root-sometimes"),
        pytest.param({"storage__0__path": "/data/"}, id="path-ends-with-a-slash"),
        pytest.param({"storage__0__path": "//data"}, id="path-begins-with-two"),
        pytest.param({"storage__0__path": "/data/../x"}, id="path-climbs"),
        pytest.param({"storage__0__bills_when_stopped": True}, id="stop-bills"),
        pytest.param({"storage__0__bills_when_terminated": {"unknown": "ask the platform"}}, id="terminate-bills"),
        pytest.param({"meter__stops_on": []}, id="no-stopping-verb"),
        pytest.param({"verbs__terminate": None}, id="no-terminate"),
        pytest.param({"verbs__stop": None, "verbs__reversible": ["stop"]}, id="no-stop"),
        pytest.param({"meter__metered": False}, id="owned-meter"),
        pytest.param({"kind": "owned"}, id="kind"),
        pytest.param({"spot__offered": True}, id="spot"),
    ],
)
def test_facts_that_contradict_each_other_are_refused_with_file_and_line(changes: dict[str, Any], wording: Wording):
    with pytest.raises(BadRequest) as caught:
        profile(**changes)
    wording(caught.value.message.partition("; small.md:")[0], "small.md:")


def test_an_error_names_the_line_of_the_faulty_value():
    text = text_of(front(meter__verified="2026-13"))
    line = text.splitlines().index("  verified: 2026-13") + 1
    with pytest.raises(BadRequest, match=rf"small\.md:{line}: meter\.verified"):
        load_text(text, "small.md")


def test_a_duplicate_key_is_refused():
    text = text_of(front()).replace("kind: rented\n", "kind: rented\nkind: owned\n")
    with pytest.raises(BadRequest, match=r"small\.md:5: .*'kind'"):
        load_text(text, "small.md")


# ------------------------------------------------------------------------------------------------------ the folder


def test_the_five_platforms_are_there_and_load():
    assert profile_names() == sorted(f.stem for f in FILES)
    assert {"autodl", "lambda", "local", "runpod", "vastai"} <= set(profile_names())
    assert [load_profile(n).id for n in profile_names()] == profile_names()


def test_a_user_profile_is_added_and_takes_precedence(tmp_path: Path):
    (tmp_path / "small.md").write_text(text_of(front()))
    (tmp_path / "runpod.md").write_text(text_of(front(id="runpod", title="Mine")))
    assert "small" in profile_names(tmp_path)
    assert load_profile("small", tmp_path).title == "Small"
    assert load_profile("runpod", tmp_path).title == "Mine"
    assert load_profile("vastai", tmp_path) == load_profile("vastai")


def test_a_broken_user_profile_is_an_error(tmp_path: Path):
    (tmp_path / "runpod.md").write_text(text_of(front(id="runpod", colour="red")))
    with pytest.raises(BadRequest, match=re.escape(str(tmp_path / "runpod.md")) + r":\d+: colour"):
        load_profile("runpod", tmp_path)
    assert load_profile("vastai", tmp_path).id == "vastai"


def test_an_unreadable_user_profile_is_an_error(tmp_path: Path):
    (tmp_path / "runpod.md").symlink_to(tmp_path / "nowhere")
    (tmp_path / "vastai.md").mkdir()
    for name in ("runpod", "vastai"):
        with pytest.raises(BadRequest, match=rf"{name}\.md: ") as caught:
            load_profile(name, tmp_path)
        assert isinstance(caught.value.__cause__, OSError)


def test_two_files_cannot_claim_one_id(tmp_path: Path):
    (tmp_path / "small.md").write_text(text_of(front()))
    (tmp_path / "copy.md").write_text(text_of(front()))
    assert load_profile("small", tmp_path).id == "small"
    with pytest.raises(BadRequest, match=r"copy\.md: .*'small'"):
        load_profile("copy", tmp_path)


@pytest.mark.parametrize("name", ["", "nothere", "../profiles/runpod", "runpod/", "RUNPOD", "rehearsal/runpod", "a\n"])
def test_an_unknown_profile_name_raises_not_found(name: str, tmp_path: Path):
    with pytest.raises(NotFound) as caught:
        load_profile(name, tmp_path)
    assert "runpod" in in_calls(caught.value.next_steps)


def test_a_missing_profile_folder_adds_nothing(tmp_path: Path):
    assert profile_names(tmp_path / "no") == profile_names()


def test_a_non_text_file_is_refused(tmp_path: Path):
    (tmp_path / "small.md").write_bytes(b"---\nid: \xff\xfe\n---\n")
    with pytest.raises(BadRequest, match=r"small\.md: ") as caught:
        load_profile("small", tmp_path)
    assert isinstance(caught.value.__cause__, UnicodeDecodeError)


# -------------------------------------------------------------------------------------------- what survives what

# Each profile's expected consequences, taken from the platform's documentation: with its emulator, if it has one.
EXPECTED: dict[str, Any] = {
    **{f.stem: tomllib.loads(f.read_text("utf-8")) for f in (ROOT / "tests" / "profile_facts").glob("*.toml")},
    **{platform.name: platform.facts for platform in platforms()},
}
SURVIVES = [
    pytest.param(name, row["path"], row.get("durable", False), row["lives"], id=f"{name}:{row['path']}")
    for name, facts in sorted(EXPECTED.items())
    for row in facts["survives"]
]


def test_every_profile_has_its_expectations():
    assert EXPECTED.keys() == {f.stem for f in FILES}


# Whether files at the path survive stop, terminate, an interruption, and the end of the job, in this order.
@pytest.mark.parametrize(("platform", "path", "requested", "lives"), SURVIVES)
def test_paths_survive_the_expected_events(platform: str, path: str, requested: bool, lives: str):
    found = [load_profile(platform).survives(path, event, requested=requested) for event in EVENTS]
    assert "".join("y" if alive else "n" for alive in found) == lives


def test_the_expectations_cover_every_tier_of_every_shipped_profile():
    rows = [(name, row["path"]) for name, facts in EXPECTED.items() for row in facts["survives"]]
    seen = {(p, t.path) for p, path in rows for t in load_profile(p).storage if path.startswith(t.path)}
    assert seen >= {(f.stem, t.path) for f in FILES for t in load_profile(f.stem).storage}


@pytest.mark.parametrize("path", ["", "x", "workspace/x", "~/x", "/workspace/../root/x", "/..", "C:\\runs"])
def test_a_path_not_clearly_on_a_tier_survives_nothing(path: str):
    for name in profile_names():
        assert not any(load_profile(name).survives(path, event, requested=True) for event in EVENTS)


@pytest.mark.parametrize(
    "path", ["/dev/shm/out", "/run", "/run/user/0/x", "/var/run/x", "//dev//shm/x", "/proc/1", "/sys/x"]
)
@pytest.mark.parametrize("name", [f.stem for f in FILES])
def test_memory_contents_never_survive_the_end_of_a_machine(name: str, path: str):
    found = load_profile(name)
    assert not any(found.survives(path, e, requested=asked) for e in EVENTS[:3] for asked in (False, True))
    disk, memory = found.tier_of("/"), found.tier_of(path)
    assert memory is None or (disk is not None and memory.survives.job_end == disk.survives.job_end)


def test_a_path_that_merely_starts_like_memory_is_on_disk():
    vastai = load_profile("vastai")
    assert [vastai.survives(path, "stop") for path in ("/devel/x", "/running", "/tmp/x", "/var/lib/x")] == [True] * 4


@pytest.mark.parametrize(("mount", "lives"), [("/run/media/disk", True), ("/dev/shm", True), ("/var", False)])
def test_a_profile_tier_at_a_memory_path_decides_survival(mount: str, lives: bool):
    disk = front()["storage"][0]
    found = profile(storage=[tier(path="/"), {**disk, "tier": "mounted", "path": mount}])
    assert found.survives(f"{mount}/run/x", "stop") is lives


def test_equivalent_path_spellings_find_the_same_tier():
    runpod = load_profile("runpod")
    for path in ("/workspace", "/workspace/", "//workspace/x", "/workspace//x", "/./workspace/x"):
        assert runpod.tier_of(path) == runpod.storage[1]


@pytest.mark.parametrize("name", [f.stem for f in FILES])
def test_each_verb_has_the_expected_effect_on_the_bill(name: str):
    found = load_profile(name)
    wanted = EXPECTED[name]
    verbs = [v for v in ("stop", "terminate") if getattr(found.verbs, v)]
    assert list(found.meter.stops_on) == wanted["rests"]
    assert [v for v in verbs if found.residue(v)] == wanted["bills"]
    assert [v for v in verbs if found.residue(v, requested=True)] == wanted["bills_with_durable_storage"]
    assert sorted(found.verbs.reversible) == wanted["reversible"]
    assert found.spot.offered is wanted["spot"]


def test_profiles_have_the_expected_verbs_and_interruptions():
    assert load_profile("lambda").verbs.stop is None
    autodl = load_profile("autodl").verbs
    assert (autodl.stop, autodl.terminate, autodl.terminate_needs_stop) == ("power_off", "release", True)
    spot = load_profile("vastai").spot
    assert (spot.offered, spot.signal, spot.grace_s, spot.then, spot.auto_resume) == (True, "none", 0, "stopped", True)
    assert isinstance(load_profile("runpod").spot.grace_s, UnknownFact)


def test_profiles_without_a_provider_state_they_are_rented_by_hand():
    for name in profile_names():
        text = (ROOT / "profiles" / f"{name}.md").read_text(encoding="utf-8")
        found = load_profile(name)
        assert (BY_HAND in text) is ("rented by hand" in found.title) is found.by_hand, name
        assert found.by_hand is EXPECTED[name]["by_hand"], name


def test_profiles_and_providers_refer_to_each_other():
    named = {load_profile(n).provider for n in profile_names()} - {None}
    assert named == {n for n in provider_names() if n != "rehearsal"}


def test_a_requested_tier_replaces_the_default_at_its_path():
    runpod = load_profile("runpod")
    assert [t.tier for t in runpod.tiers()] == ["container-disk", "volume-disk"]
    assert sorted(t.tier for t in runpod.tiers(requested=True)) == ["container-disk", "network-volume"]


# ------------------------------------------------------------------------------------------------------ properties

PATHS = st.sampled_from(["/", "/a", "/a/b", "/a/b/c", "/d"])
FACTS = st.sampled_from([True, False, {"unknown": "ask the platform"}])


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Draw any storage table over a few nested mounts."""
    root = tier(tier="root", path="/", survives={event: draw(FACTS) for event in EVENTS})
    storage = [root]
    for i, path in enumerate(draw(st.lists(PATHS, unique=True, max_size=5))):
        for present in draw(st.sampled_from([["always"], ["on_request"], ["sometimes"], ["always", "on_request"]])):
            if path == "/" and present != "on_request":
                continue
            lives = {event: draw(FACTS) for event in EVENTS}
            storage.append(tier(tier=f"t{i}{present[0]}", path=path, present=present, survives=lives))
    return profile(storage=storage, run_root="~/runs")


@given(profiles(), PATHS, st.sampled_from(EVENTS), st.booleans())
def test_nothing_survives_on_an_unknown_fact_or_an_absent_tier(p: Profile, path: str, event: Event, requested: bool):
    if not p.survives(f"{path}/file", event, requested=requested):
        return
    mounts = [t for t in p.storage if t.path == "/" or path == t.path or path.startswith(t.path + "/")]
    deepest = [t for t in mounts if len(t.path) == max(len(m.path) for m in mounts)]
    counted = [t for t in deepest if t.present == "always" or (t.present == "on_request" and requested)]
    assert "sometimes" not in [t.present for t in deepest]
    asked = [t for t in counted if t.present == "on_request"] or counted
    assert [getattr(t.survives, event) for t in asked] == [True]


# ------------------------------------------------------------------------------------------------- prose and tables

SECTIONS = ["Overview", "Storage", "Meter", "Interruptions", "Deadlines and tips"]
FACT_IN_PROSE = re.compile(r"[$€¥]|\d\s*(?:%|s|h|d|min|sec|seconds?|minutes?|hours?|days?|weeks?|months?|[KMGT]i?B)\b")


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_generated_blocks_are_up_to_date(file: Path):
    text = file.read_text(encoding="utf-8")
    assert text == render_blocks(text, file.name), (
        f"{file.name} is out of date; see render_blocks in gpuwarden.profiles"
    )


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_prose_has_its_sections_and_every_block(file: Path):
    text = file.read_text(encoding="utf-8")
    assert re.findall(r"(?m)^## (.+)$", text) == SECTIONS
    assert re.findall(r"<!-- generated:(\w+) -->", text) == list(BLOCKS)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_prose_has_no_facts_in_numbers_and_the_file_no_prices(file: Path):
    text = file.read_text(encoding="utf-8")
    prose = re.sub(r"(?s)<!-- generated:.*?<!-- /generated -->", "", text.split("\n---\n", 1)[1])
    assert not FACT_IN_PROSE.search(prose)
    assert not re.search(r"[$€¥]\s*\d|\d\s*(?:USD|CNY|EUR)\b", text)


def test_a_block_shows_the_front_matter_values(wording: Wording):
    text = text_of(
        front(storage__0__survives__stop={"unknown": "stop one and look"}),
        "<!-- generated:storage -->\n<!-- /generated -->\n",
    )
    done = render_blocks(text, "small.md")
    wording(
        done.partition("<!-- generated")[2], "`/data`", "(stop one and look)", "https://example.org/docs", "2026-08"
    )
    assert render_blocks(done, "small.md") == done
    assert render_blocks(done.replace("\n", "\r\n"), "small.md") == done


def test_an_unknown_block_is_refused():
    with pytest.raises(BadRequest, match="'weather'"):
        render_blocks(text_of(front(), "<!-- generated:weather -->\n<!-- /generated -->\n"), "small.md")


def test_a_bar_in_a_note_does_not_break_the_table():
    text = text_of(front(storage__0__note="a | b\nc"), "<!-- generated:storage -->\n<!-- /generated -->\n")
    assert "| a \\| b c |" in render_blocks(text, "small.md")


@pytest.mark.parametrize("name", [f.stem for f in FILES])
def test_a_narrow_terminal_truncates_no_path_or_fact(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("GPUWARDEN_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["profiles", name]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for tier in load_profile(name).storage:
        assert f"{tier.tier} (path: {tier.path};" in shown
    assert "…" not in shown
