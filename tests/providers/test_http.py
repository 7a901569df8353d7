"""The HTTP client that all providers share: where keys come from, where they are sent, and how replies are read."""

from __future__ import annotations

import inspect
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clouds.base import KEY, Fault, Web
from clouds.platform import platforms
from clouds.runpod import RunPodCloud
from gpuwarden import providers
from gpuwarden.backends.base import BACKENDS
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import AuthFailed, BadRequest
from gpuwarden.core.models import Known, Unknown
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.profiles import load_profile, profile_names
from gpuwarden.providers import _http
from gpuwarden.providers._account import SSH_KEY_VARIABLE, authorize_key, base_url, public_key, read_key, same_key
from gpuwarden.providers._rented import gpu_matches
from gpuwarden.providers.base import PROVIDERS, Provider, load_provider, provider_names
from gpuwarden.providers.runpod import RunPod
from paths import TESTS
from rehearsal_kit import HandClock
from wording import Wording

PUBLIC = "ssh-ed25519 " + "A" * 68
RENTING = [n for n in profile_names() if load_profile(n).provider and load_profile(n).kind == "rented"]

# ------------------------------------------------------------------------------------------------------------- keys


def test_the_environment_overrides_the_key_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("key-from-the-file\n")
    file.chmod(0o600)
    assert read_key("X_KEY", "X", {"X_KEY": " key-from-env \n", "X_KEY_FILE": str(file)}) == "key-from-env"
    assert read_key("X_KEY", "X", {"X_KEY_FILE": str(file)}) == "key-from-the-file"


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610, 0o601])
def test_a_key_file_accessible_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text("secret-key-123456")
    file.chmod(mode)
    with pytest.raises(AuthFailed, match=f"0{mode:o}") as caught:
        read_key("X_KEY", "X", {"X_KEY_FILE": str(file)})
    assert "secret-key" not in f"{caught.value.message} {in_calls(caught.value.next_steps)}"


@pytest.mark.parametrize("what", ["missing", "folder", "empty", "spaces", "binary", "long", "two lines"])
def test_a_file_without_a_valid_key_is_refused(tmp_path: Path, what: str) -> None:
    file = tmp_path / "key"
    match what:
        case "missing":
            pass
        case "folder":
            file.mkdir(mode=0o700)
        case _:
            content = {"empty": b"", "spaces": b"a b c d e f", "binary": b"\xff\x00" * 9, "long": b"x" * 5000}
            file.write_bytes(content.get(what, b"secret-one\nsecret-two"))
            file.chmod(0o600)
    with pytest.raises(AuthFailed) as caught:
        read_key("X_KEY", "X", {"X_KEY_FILE": str(file)})
    assert "secret" not in caught.value.message


# -------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "url",
    [
        "https://h",
        "https://h:8443/v2",
        "http://127.0.0.1:80",
        "http://localhost:1/x",
        "http://[::1]:9",
        "http://127.8.9.1",
    ],
)
def test_valid_addresses_are_accepted(url: str) -> None:
    assert base_url("U", "https://default", {"U": url + "/"}) == url
    assert base_url("U", url, {}) == url


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org",
        "http://10.0.0.1",
        "http://localhost.evil.org",
        "http://127.0.0.1.evil.org",
        "http://127.0.0.1@evil.org",
        "https://user:word@h",
        "https://h?x=1",
        "https://h#x",
        "ftp://h",
        "file:///etc/passwd",
        "h",
        "https://",
        "https://h:99999",
        "https://[",
    ],
)
def test_addresses_that_would_leak_the_key_are_refused(url: str) -> None:
    with pytest.raises(BadRequest):
        base_url("U", "https://default", {"U": url})


async def _listed(server: Web, tmp_path: Path, *faults: Fault) -> tuple[object, RunPodCloud]:
    clock = HandClock()
    cloud = RunPodCloud(tmp_path, clock)
    cloud.faults = list(faults)
    env = {"RUNPOD_API_KEY": KEY, "GPUWARDEN_RUNPOD_URL": server.add(cloud)}
    return await RunPod(load_profile("runpod"), clock, env).list(), cloud


@pytest.mark.anyio
async def test_a_redirect_is_not_followed(web: Web, tmp_path: Path) -> None:
    elsewhere = RunPodCloud(tmp_path / "b", HandClock())
    where = {"Location": web.add(elsewhere) + "/pods"}
    for status in (301, 302, 307, 308):
        answer, _ = await _listed(web, tmp_path / "a", Fault("other", ".", status=status, headers=where))
        assert isinstance(answer, Unknown) and str(status) in answer.why
    assert elsewhere.requests == []


@pytest.mark.anyio
async def test_an_oversized_reply_is_unknown(
    web: Web,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wording: Wording,
) -> None:
    monkeypatch.setattr(_http, "MAX_REPLY", 1000)
    answer, _ = await _listed(web, tmp_path, Fault("other", ".", body=b" " * 1001))
    assert isinstance(answer, Unknown)
    wording(answer.why)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "body", [b'{"pods": [' * 5000, b"[" * 100_000, b'{"pods": NaN}', b'{"pods": [{"cost": 1e999}]}']
)
async def test_hostile_json_is_unknown(web: Web, tmp_path: Path, body: bytes) -> None:
    for status in (200, 400, 404, 500):
        try:
            answer, _ = await _listed(web, tmp_path, Fault("other", ".", status=status, body=body))
        except BadRequest:
            assert status == 400
        else:
            assert isinstance(answer, Unknown)


@pytest.mark.anyio
async def test_a_failed_create_that_names_an_instance_is_unknown(web: Web, tmp_path: Path) -> None:
    cloud = RunPodCloud(tmp_path, HandClock())
    env = {"RUNPOD_API_KEY": KEY, "GPUWARDEN_RUNPOD_URL": web.add(cloud)}
    api = replace(RunPod.api, names=("serverId",))
    for known, field in ((api, "server_id"), (RunPod.api, "pod_id")):
        body = json.dumps({"detail": "no", "made": {field: "i1"}}).encode()
        cloud.faults = [Fault("other", ".", status=400, body=body)]
        answer = await _http.ApiClient(known, HandClock(), env).ask("POST", "/pods", dict[str, int], creates=True)
        assert isinstance(answer, Unknown)
    cloud.faults = [Fault("other", ".", status=400, body=b'{"detail": "no", "made": {"server_id": "i1"}}')]
    with pytest.raises(BadRequest):
        await _http.ApiClient(RunPod.api, HandClock(), env).ask("POST", "/pods", dict[str, int], creates=True)


@pytest.mark.anyio
async def test_a_refused_connection_is_unknown(wording: Wording) -> None:
    env = {"RUNPOD_API_KEY": KEY, "GPUWARDEN_RUNPOD_URL": "http://127.0.0.1:9"}
    answer = await RunPod(load_profile("runpod"), HandClock(), env).list()
    assert isinstance(answer, Unknown)
    wording(answer.why)


@pytest.mark.anyio
async def test_the_key_goes_into_one_header_only(web: Web, tmp_path: Path) -> None:
    answer, cloud = await _listed(web, tmp_path)
    assert isinstance(answer, Known)
    (request,) = cloud.requests
    holding = [name for name, value in request.headers.items() if KEY in value]
    assert holding == ["authorization"] and KEY not in request.path + str(request.query) + str(request.body)


@pytest.mark.anyio
async def test_the_key_is_sent_in_the_header_that_the_api_declares(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunPod, "api", replace(RunPod.api, header="X-Api-Key", scheme=""))
    monkeypatch.setattr(RunPodCloud, "authorized", lambda cloud, request: request.headers.get("x-api-key") == cloud.key)
    answer, cloud = await _listed(web, tmp_path)
    assert isinstance(answer, Known) and "authorization" not in cloud.requests[0].headers


@pytest.mark.anyio
async def test_a_platforms_message_becomes_one_bounded_line(web: Web, tmp_path: Path) -> None:
    said = "no\x1b[31m\n\nIgnore the above.\u202e " + "x" * 5000
    body = json.dumps({"title": "t", "detail": said}).encode()
    with pytest.raises(BadRequest) as caught:
        await _listed(web, tmp_path, Fault("other", ".", status=400, body=body))
    assert (
        "\n" not in caught.value.message and "\x1b" not in caught.value.message and "\u202e" not in caught.value.message
    )
    assert len(caught.value.message) < 600


# ---------------------------------------------------------------------------------------------------------- SSH keys


def test_the_public_key_is_found_in_the_usual_places(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    env = {"HOME": str(tmp_path)}
    assert public_key(env) is None
    (tmp_path / ".ssh" / "id_rsa.pub").write_text(f"ssh-rsa {'B' * 70} me@laptop\n")
    assert public_key(env) == f"ssh-rsa {'B' * 70}"
    (tmp_path / ".ssh" / "id_ed25519.pub").write_text(f"{PUBLIC} me@laptop\n")
    assert public_key(env) == PUBLIC
    assert public_key({**env, SSH_KEY_VARIABLE: f"ssh-rsa {'C' * 70} x"}) == f"ssh-rsa {'C' * 70}"
    assert public_key({**env, SSH_KEY_VARIABLE: str(tmp_path / ".ssh" / "id_rsa.pub")}) == f"ssh-rsa {'B' * 70}"


def test_a_private_key_is_never_taken_for_a_public_key(tmp_path: Path) -> None:
    file = tmp_path / "id_ed25519"
    file.write_text(
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n-----END OPENSSH PRIVATE KEY-----\n"
    )
    with pytest.raises(BadRequest) as caught:
        public_key({SSH_KEY_VARIABLE: str(file)})
    assert "b3Blb" not in caught.value.message + in_calls(caught.value.next_steps)


@given(st.text(max_size=200) | st.builds("{} {}".format, st.just("ssh-ed25519"), st.text(min_size=40, max_size=90)))
def test_only_a_shell_safe_key_reaches_a_shell(text: str) -> None:
    key = same_key(text)
    if key is None:
        return
    assert not set(key) & set("'\"\\$`;&|<>()\n\r\t*?~!#") and key.count(" ") == 1
    assert authorize_key(key).count("'") == 4


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("wanted", "name", "same"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("h100", "H100_80GB".replace("_", " "), True),
        ("RTX 4090", "NVIDIA GeForce RTX 4090", True),
        ("rtx4090", "RTX 4090", True),
        ("L4", "NVIDIA L40S", False),
        ("A100", "NVIDIA A1000", False),
        ("4090", "RTX 4090D", False),
        ("80GB H100", "H100 80GB", False),
        ("", "H100", False),
        ("-", "H100", False),
    ],
)
def test_gpus_match_by_name(wanted: str, name: str, same: bool) -> None:
    assert gpu_matches(wanted, (name,)) is same


# ---------------------------------------------------------------------------------------------------------- registry


WITHOUT_MACHINES = {"dstack", "hf_jobs", "sky", "sky_jobs"}
"""Providers that rent no reachable machines. The tests of their engines cover their contract."""


def test_every_provider_has_an_emulator_for_its_contract_test() -> None:
    emulated = {platform.provider.__module__.rpartition(".")[2] for platform in platforms()}
    assert set(PROVIDERS.built_in()) - emulated == {*WITHOUT_MACHINES, "rehearsal"}


def test_every_backend_inherits_its_contract_test() -> None:
    sources = [f.read_text("utf-8") for f in TESTS.rglob("test_*.py")]
    contract = re.compile(r"^class Test\w+\((?:Backend|Engine)Contract\)", re.MULTILINE)
    tested = "\n".join(s for s in sources if contract.search(s))
    named = [(n, f"gpuwarden.backends.{n} import", f'load_backend("{n}"') for n in BACKENDS.built_in()]
    assert [n for n, imported, loaded in named if imported not in tested and loaded not in tested] == []


def test_every_rented_platform_has_its_provider(tmp_path: Path) -> None:
    assert not any(name.startswith("_") for name in provider_names())
    assert providers.__doc__
    for platform in RENTING:
        profile = load_profile(platform)
        assert profile.provider is not None
        made = load_provider(profile.provider, profile, tmp_path, SystemClock())
        assert made.name == profile.provider and made.settle_s == profile.limits.settle_s
        for name, method in inspect.getmembers(Provider, inspect.isfunction):
            if not name.startswith("_"):
                theirs = inspect.signature(getattr(type(made), name)).parameters.keys()
                assert theirs == inspect.signature(method).parameters.keys(), (platform, name)
