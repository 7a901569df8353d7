"""The `prime` command line and SkyPilot's provisioning code against the Prime Intellect emulator."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clouds.base import KEY, PUBLIC_KEY, Web, known
from clouds.prime_intellect import PrimeAccount
from clouds.specs import Spec
from clouds_kit import SPECS
from gpuwarden.core.models import InstanceState, Resources
from real_clients import Client, sky
from rehearsal_kit import HandClock

pytestmark = [pytest.mark.prove, pytest.mark.real("prime")]
DESCRIPTION = Path(SPECS or "/nowhere") / "prime-intellect.openapi.yaml"
KNOWN = {
    "status 404",
    "status 403",
    "status 400",
    "422",
}  # the description has a body for no refusal other than 422
Run = Callable[..., Any]


@pytest.fixture
def account(tmp_path: Path, web: Web) -> PrimeAccount:
    account = PrimeAccount(tmp_path / "cloud", HandClock())
    account.home = web.add(account)
    account.before = lambda: pass_time(account, 15)
    account.most_rows = 100
    return account


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


@pytest.fixture
def prime(account: PrimeAccount, home: Path) -> Run:
    """The command line. It appends /api/v1 to the emulator's address, which includes a path."""
    env = {"PRIME_API_KEY": KEY, "PRIME_API_BASE_URL": account.home, "PRIME_DISABLE_VERSION_CHECK": "1"}
    client = Client("prime", home, env)

    def run(*words: str, refused: str = "") -> Any:
        done = client.run("prime", *words)
        if refused:
            assert done.returncode == 1 and refused in done.stdout + done.stderr, done
            return None
        assert done.returncode == 0, done
        return json.loads(done.stdout) if "json" in words else done.stdout

    return run


def pass_time(account: PrimeAccount, seconds: float = 60) -> None:
    account.clock.time += seconds  # type: ignore[attr-defined]
    account.cloud.tick()


def states(account: PrimeAccount) -> list[InstanceState]:
    return [known(account.cloud.get(i)).state for i in account.own]  # type: ignore[union-attr]


def as_published(account: PrimeAccount) -> None:
    """Assert that each reply to a client matches the published description."""
    if not DESCRIPTION.exists():
        return
    faults = [f for request, reply in account.exchanges for f in Spec(DESCRIPTION).faults(request, reply)]
    assert not [f for f in faults if not any(word in f for word in KNOWN)], faults


def test_offers_are_listed_and_filtered(prime: Run, account: PrimeAccount) -> None:
    rows = prime("availability", "list", "--gpu-type", "H100_80GB", "--gpu-count", "2", "-o", "json")["gpu_resources"]
    assert {(r["gpu_type"], r["gpu_count"], r["price_value"]) for r in rows} == {
        ("H100 80GB (Spot)", 2, 2.1), ("H100 80GB", 2, 4.2),
    }  # fmt: skip
    rows = prime("availability", "list", "--regions", "canada", "-o", "json")["gpu_resources"]
    assert rows == []
    assert "L4_24GB" in prime("availability", "gpu-types")
    assert prime("availability", "disks", "-o", "json")["disks"][0]["max_size"] == "4000"
    as_published(account)


def test_a_pod_is_created_and_shown(prime: Run, account: PrimeAccount) -> None:
    rows = prime("availability", "list", "--gpu-type", "L4_24GB", "--gpu-count", "1", "-o", "json")["gpu_resources"]
    offer = next(r for r in rows if "Spot" not in r["gpu_type"])
    order = ("--name", "a-pod", "--disk-size", "200", "--image", "cuda_12_4_pytorch_2_6", "--team-id", "team1", "-y")
    assert "Successfully created pod" in prime("pods", "create", "--id", offer["id"], *order)
    (ident,) = account.own
    sent = next(a.body for a in account.requests if a.line == "POST /api/v1/pods")
    assert sent["pod"]["vcpus"] == 26 and sent["pod"]["memory"] == 200 and sent["team"] == {"teamId": "team1"}
    (row,) = prime("pods", "list", "-o", "json")["pods"]
    assert (row["id"], row["name"]) == (ident, "a-pod") and row["status"] in {"PROVISIONING", "ACTIVE"}
    pass_time(account)
    seen = prime("pods", "status", ident, "-o", "json")
    host, port = account.address(ident)
    assert (seen["status"], seen["ssh"], seen["team_id"]) == ("ACTIVE", f"root@{host} -p {port}", "team1")
    as_published(account)


def test_a_pod_is_terminated_and_billed(prime: Run, account: PrimeAccount) -> None:
    order = {"gpuType": "L4_24GB", "gpuCount": 1, "cloudId": "L4_24GB-1"}
    ident = account.rent("a-pod", Resources(gpu="L4_24GB"), order=order, provider="runpod", team="team1").id
    pass_time(account)
    assert "Successfully terminated" in prime("pods", "terminate", ident, "-y")
    pass_time(account)
    assert states(account) == [InstanceState.GONE]
    assert prime("pods", "list", "-o", "json")["total_count"] == 0
    (past,) = prime("pods", "history", "-o", "json")["history"]
    assert past["id"] == ident and past["total_cost"] > 0 and past["team_id"] == "team1"
    prime("pods", "status", ident, refused="not found")
    as_published(account)


def test_disks_are_created_renamed_and_terminated(prime: Run, account: PrimeAccount) -> None:
    words = ("--size", "500", "--name", "data", "--provider-type", "runpod", "--data-center-id", "US-1", "-y")
    assert "Successfully created disk" in prime("disks", "create", *words)
    (disk,) = prime("disks", "list", "-o", "json")["disks"]
    assert disk["name"] == "data" and disk["size"] == 500 and disk["price_hr"] == pytest.approx(0.05)
    prime("disks", "update", disk["id"], "--name", "other")
    assert prime("disks", "get", disk["id"], "-o", "json")["name"] == "other"
    prime("disks", "terminate", disk["id"], "-y")
    assert account.disk_rows == []
    as_published(account)


def test_teams_and_the_wallet(prime: Run, account: PrimeAccount) -> None:
    assert [t["teamId"] for t in prime("teams", "list", "-o", "json")["teams"]] == ["team1"]
    assert prime("wallet", "-o", "json")["balance_usd"] == 1000.0
    assert "user7" in prime("whoami")
    as_published(account)


def test_the_ssh_key_path_is_kept_in_the_settings(prime: Run, home: Path) -> None:
    (home / "id_test").write_text("private")
    assert "successfully" in prime("config", "set-ssh-key-path", str(home / "id_test"))
    settings = json.loads((home / ".prime" / "config.json").read_text())
    assert settings["ssh_key_path"] == str(home / "id_test")


def test_the_client_gets_the_platforms_refusals(prime: Run, account: PrimeAccount, home: Path) -> None:
    order = ("--cloud-id", "L4_24GB-1", "--name", "x", "--image", "ubuntu_22_cuda_12", "--team-id", "other", "-y")
    prime("pods", "create", *order, "--disk-size", "100", refused="Invalid pod configuration")
    client = Client("prime", home, {"PRIME_API_KEY": "another-key-0123456789", "PRIME_API_BASE_URL": account.home})
    assert "unauthorized" in client.run("prime", "pods", "list").stdout
    odd = client.python(
        "import json, urllib.request, sys\n"
        "ask = urllib.request.Request(sys.argv[1], headers={'Authorization': 'Bearer ' + sys.argv[2]})\n"
        "try: answer = [urllib.request.urlopen(ask).status, '']\n"
        "except urllib.error.HTTPError as error: answer = [error.code, error.read().decode()]",
        account.home + "/api/v1/availability/gpus?gpu_name=H100", KEY,
    )  # fmt: skip
    assert odd[0] == 422 and "gpu_name" in odd[1] and account.own == {}


def test_skypilot_provisions_and_ends_instances(account: PrimeAccount, home: Path) -> None:
    """SkyPilot sends maxPrice 0 for no maximum price, and reads the image's default as any image."""
    (home / ".prime").mkdir()
    (home / ".prime" / "config.json").write_text(json.dumps({"api_key": KEY, "base_url": account.home}))
    answer = Client("rented", home).python(
        sky("primeintellect") + "import sys\n"
        "from types import SimpleNamespace as Config\n"
        "from sky.provision.primeintellect import instance, utils\n"
        "utils.get_upstream_cloud_id = lambda kind: 'H100_80GB-1'\n"
        "instance.POLL_INTERVAL = 0.01\n"
        "api = utils.PrimeIntellectAPIClient()\n"
        "keys = [api.get_or_add_ssh_key(key)['name'] for key in (sys.argv[1], 'ssh-ed25519 ' + 'C' * 60)]\n"
        "kind = 'runpod__1xH100_80GB__26__200'\n"
        "config = Config(count=1, node_config={'InstanceType': kind, 'DiskSize': 100},\n"
        "  provider_config={'zones': 'US-1'})\n"
        "made = instance.run_instances('US', 'c', 'c-1', config)\n"
        "info = instance.get_cluster_info('US', 'c-1')\n"
        "before = instance.query_instances('c', 'c-1', {})\n"
        "instance.terminate_instances('c-1')\n"
        "answer = [keys, made.created_instance_ids, info.ssh_user, [s[0].value for s in before.values()],\n"
        "  instance.query_instances('c', 'c-1', {})]",
        PUBLIC_KEY,
    )  # fmt: skip
    keys, made, user, before, after = answer
    assert keys[0] == "mine" and keys[1].startswith("skypilot-") and made == list(account.own)
    assert (user, before, after) == ("root", ["UP"], {})
    pass_time(account)
    assert states(account) == [InstanceState.GONE]
    as_published(account)
