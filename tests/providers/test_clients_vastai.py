"""Vast.ai's own command line and SDK, dstack's client, and SkyPilot's provisioning code against the emulator."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clouds.base import KEY, PUBLIC_KEY, Web, known
from clouds.specs import Spec
from clouds.vastai import VastCloud
from clouds.vastai_market import FILTERS
from clouds_kit import SPECS
from gpuwarden.core.models import InstanceState
from paths import KITS
from real_clients import Client
from rehearsal_kit import HandClock

pytestmark = [pytest.mark.prove, pytest.mark.real("vastai")]
SKY = (KITS / "clients_sky.py").read_text("utf-8")
KNOWN = {  # differences between the vendor's clients and the description; the clients work
    "instances.ports: {",  # an object, as the SDK and dstack expect, not an array of numbers
    "instances.extra_env",  # pairs, as the client unpacks them, not text
    "instances: None is not",  # null for an instance that is gone
    "/api/v0/gpu_names/unique/: no such route",
    "GET /logs/",
}


@pytest.fixture
def cloud(tmp_path: Path, web: Web) -> VastCloud:
    cloud = VastCloud(tmp_path / "cloud", HandClock())
    cloud.window = None  # type: ignore[misc]
    cloud.home = web.add(cloud)
    return cloud


@pytest.fixture
def client(cloud: VastCloud, tmp_path: Path) -> Client:
    home = tmp_path / "home"
    home.mkdir()
    return Client("rented", home, {"VAST_URL": cloud.home, "VAST_API_KEY": KEY})


@pytest.fixture
def vastai(client: Client) -> Callable[..., Any]:
    """The command line. With --raw, it prints JSON. Most refusals are printed on stderr, with exit code 0."""

    def run(*words: str, refused: str = "") -> Any:
        done = client.run("vastai", *words)
        if refused:
            assert refused in done.stderr, done
            return None
        assert done.returncode == 0 and "Failed" not in done.stderr, done
        return json.loads(done.stdout) if "--raw" in words else done.stdout

    return run


def pass_time(cloud: VastCloud, seconds: float = 60) -> None:
    cloud.clock.time += seconds  # type: ignore[attr-defined]
    cloud.cloud.tick()


def states(cloud: VastCloud) -> list[InstanceState]:
    return [known(cloud.cloud.get(i)).state for i in cloud.own]  # type: ignore[union-attr]


def as_published(cloud: VastCloud) -> None:
    """Assert that each reply to a client matches the published description, except for the known differences."""
    if SPECS is None:
        return
    spec = Spec(Path(SPECS) / "vastai.openapi.yaml")
    faults = [f for request, reply in cloud.exchanges for f in spec.faults(request, reply)]
    assert not [f for f in faults if not any(known in f for known in KNOWN)], faults


def test_filters_match_the_description() -> None:
    if SPECS is None:
        pytest.skip("GPUWARDEN_SPECS is not set")
    schema = Spec(Path(SPECS) / "vastai.openapi.yaml").document["paths"]["/api/v0/bundles"]["post"]["requestBody"]
    fields = set(schema["content"]["application/json"]["schema"]["properties"])
    assert fields - {"limit", "type", "order", "allocated_storage"} == FILTERS


def test_offers_are_searched_filtered_and_sorted(vastai: Callable[..., Any], cloud: VastCloud) -> None:
    rows = vastai("search", "offers", "num_gpus=2 gpu_name=H100_SXM reliability>0.9 gpu_ram>=80", "--raw")
    assert [(r["gpu_name"], r["num_gpus"]) for r in rows] == [("H100 SXM", 2)]
    rows = vastai("search", "offers", "num_gpus=1 dph<2 cuda_vers>=12.1", "-o", "dph_total", "--limit", "2", "--raw")
    assert [r["gpu_name"] for r in rows] == ["RTX 4090", "L40S"]
    bids = vastai("search", "offers", "num_gpus=1 gpu_name in [H100_SXM,L40S]", "--type", "bid", "-o", "dph-", "--raw")
    assert [r["gpu_name"] for r in bids] == ["H100 SXM", "L40S"] and bids[0]["dph_total"] < 2.2 / 2 + 0.1
    assert "RTX_4090" in vastai("search", "offers", "num_gpus=1")
    assert vastai("search", "offers", "num_gpus=1 verified=false", "--raw") == []
    as_published(cloud)


def test_an_unknown_filter_or_operator_is_refused(vastai: Callable[..., Any], cloud: VastCloud) -> None:
    vastai("search", "offers", "gpu_brand=nvidia", refused="error 400: Error in query parameters: gpu_brand is not a")
    vastai("show", "instances", "--order-by", "dph_total desc", refused="dph_total is not a valid search key")
    as_published(cloud)


def test_the_cli_creates_and_shows_an_instance(vastai: Callable[..., Any], cloud: VastCloud, tmp_path: Path) -> None:
    env, begin = "-p 8080:8080 -e TZ=UTC", "touch ~/.no_auto_tmux"
    made = vastai(
        "create", "instance", "101", "--image", "a/b:1", "--disk", "40", "--ssh", "--direct", "--label", "mine",
        "--env", env, "--onstart-cmd", begin, "--cancel-unavail", "--raw",
    )  # fmt: skip
    number = str(made["new_contract"])
    assert made["success"] is True and number == "4200001"
    pass_time(cloud)
    (row,) = vastai("show", "instances", "--raw")
    one = vastai("show", "instance", number, "--raw")
    assert row["label"] == one["label"] == "mine" and one["actual_status"] == "running"
    assert one["extra_env"] == {"TZ": "UTC", "-p 8080:8080": "1"} and set(one["ports"]) == {"22/tcp", "8080/tcp"}
    assert "H100_SXM" in vastai("show", "instance", number).replace(" SXM", "_SXM")
    assert "mine" in vastai("show", "instances") and vastai("show", "instances", "-q").split() == [number]
    host, port = cloud.address(next(iter(cloud.own)))
    assert vastai("ssh-url", number).strip() == f"ssh://root@{host}:{port}"
    assert vastai("scp-url", number).strip() == f"scp://root@{host}:{port}"
    as_published(cloud)


def test_the_cli_handles_labels_logs_and_keys(vastai: Callable[..., Any], cloud: VastCloud, tmp_path: Path) -> None:
    number = str(vastai("create", "instance", "101", "--image", "a/b:1", "--raw")["new_contract"])
    pass_time(cloud)
    cloud.logs[number] = ["step 1", "loss nan", "step 2"]
    assert "step 1\nloss nan\nstep 2" in vastai("logs", number)
    assert "step 2" in (tail := vastai("logs", number, "--tail", "1")) and "loss" not in tail
    assert "loss nan" in vastai("logs", number, "--filter", "nan")
    (tmp_path / "k.pub").write_text(PUBLIC_KEY + "\n")
    assert "success" in vastai("attach", "ssh", number, str(tmp_path / "k.pub"))
    assert cloud.own[cloud.numbered(number)]["keys"][0]["public_key"].strip() == PUBLIC_KEY
    assert "success" in vastai("detach", "ssh", number, "70")
    assert "label for" in vastai("label", "instance", number, "other")
    assert cloud.own[cloud.numbered(number)]["label"] == "other"
    as_published(cloud)


def test_stop_start_and_destroy(vastai: Callable[..., Any], cloud: VastCloud) -> None:
    number = str(vastai("create", "instance", "101", "--image", "a/b:1", "--raw")["new_contract"])
    pass_time(cloud)
    assert "stopping" in vastai("stop", "instance", number)
    pass_time(cloud)
    assert states(cloud) == [InstanceState.STOPPED]
    assert "starting" in vastai("start", "instance", number)
    pass_time(cloud)
    assert states(cloud) == [InstanceState.RUNNING]
    assert "destroying" in vastai("destroy", "instance", number, "-y")
    pass_time(cloud)
    assert states(cloud) == [InstanceState.GONE]
    assert vastai("show", "instances", "--raw") == []
    vastai("show", "instance", number, refused="not found or no longer exists")
    vastai("destroy", "instance", number, "-y", refused="error 404")
    as_published(cloud)


def test_the_cli_shows_charges(vastai: Callable[..., Any], cloud: VastCloud) -> None:
    number = str(vastai("create", "instance", "101", "--image", "a/b:1", "--raw")["new_contract"])
    pass_time(cloud, 7200)
    rows = vastai("show", "invoices-v1", "--charges", "--charge-type", "instance", "--raw")
    found = rows["results"] if isinstance(rows, dict) else rows
    assert [row["source"] for row in found] == [f"instance-{number}"] and found[0]["amount"] > 3
    assert vastai("show", "user", "--raw")["credit"] == 1000.0
    as_published(cloud)


def test_an_outbid_instance_resumes_after_a_raised_bid(vastai: Callable[..., Any], cloud: VastCloud) -> None:
    """An outbid instance shows `stopped` three times, as after a stop. The client's `change bid` brings it back."""
    vastai("create", "instance", "101", "--image", "a/b:1", "--bid_price", "0.5", refused="error 400: bid too low")
    assert cloud.own == {}
    number = str(vastai("create", "instance", "101", "--image", "a/b:1", "--bid_price", "1.2", "--raw")["new_contract"])
    pass_time(cloud)
    cloud.least["H100 SXM"] = 1.5
    cloud.cloud.preempt(cloud.numbered(number))
    row = vastai("show", "instance", number, "--raw")
    assert row["is_bid"] is True and row["min_bid"] == 1.5 > row["dph_base"] == 1.2
    assert {row["cur_state"], row["intended_status"], row["next_state"]} == {"stopped"}
    vastai("change", "bid", number, "--price", "1.6")
    pass_time(cloud)
    row = vastai("show", "instance", number, "--raw")
    assert row["actual_status"] == "running" and row["dph_base"] == 1.6
    as_published(cloud)


def test_more_than_one_page_of_instances_is_listed(vastai: Callable[..., Any], cloud: VastCloud) -> None:
    from gpuwarden.core.models import Resources

    for n in range(57):
        cloud.rent(f"n{n}", Resources(gpu="L40S"), order={}, gpu="L40S", count=1)
    pass_time(cloud)
    assert len({row["id"] for row in vastai("show", "instances", "--raw")}) == 57
    assert len(vastai("show", "instances", "-q", "--label", "n3", "n4").split()) == 2
    as_published(cloud)


def test_the_sdk_manages_an_instance(client: Client, cloud: VastCloud) -> None:
    number = client.python(
        "from vastai import VastAI\n"
        "v = VastAI()\n"
        "o = v.search_offers(query='num_gpus=1 gpu_name=RTX_4090', order='dph_total')\n"
        "answer = v.create_instance(o[0]['id'], image='a/b', disk=20, ssh=True, direct=True, label='sdk',\n"
        "  bid_price=0.3)\n"
        "answer = answer['new_contract']"
    )
    pass_time(cloud)
    cloud.logs[str(number)] = ["hello"]
    answer = client.python(
        f"from vastai import VastAI\nv, n = VastAI(), {number}\n"
        "answer = [len(v.show_instances()), v.show_instance(n)['actual_status'], v.ssh_url(n), v.logs(n, tail='5'),\n"
        "  v.label_instance(n, 'two'), v.stop_instance(n), v.change_bid(n, 0.5), v.destroy_instance(n)['success']]"
    )
    assert answer[:2] == [1, "running"] and answer[2].startswith("ssh://root@") and answer[3] == "hello"
    assert all(done == {"success": True} for done in answer[4:7]) and answer[7] is True
    as_published(cloud)


def test_dstacks_client_manages_instances(client: Client, cloud: VastCloud) -> None:
    """The clients for machines and for the catalog, redirected to the emulator through their constants."""
    begin = (
        "import gpuhunt.providers.vastai as catalog\n"
        "from dstack._internal.core.backends.vastai.api_client import VastAIAPIClient\n"
        f"catalog.bundles_url = '{cloud.home}/api/v0/bundles/'\n"
        f"api = VastAIAPIClient('{KEY}')\n"
        f"api.s.base_url = '{cloud.home}/api/'\n"
    )
    offers, number = client.python(
        begin + "offers = catalog.VastAIProvider(extra_filters={'direct_port_count': {'gte': 1}, 'reliability2':\n"
        "  {'gte': 0.9}, 'cuda_max_good': {'gte': 12.8}, 'compute_cap': {'gte': 600}, 'score': {'gte': 1}}).get()\n"
        "answer = [[(o.gpu_name, o.gpu_count, o.spot) for o in offers], api.create_instance('n', 101, 'a/b', 'x', 50)]"
    )
    assert ["H100SXM", 1, False] in offers or ["H100", 1, False] in offers
    assert any(spot for _, _, spot in offers)
    pass_time(cloud)
    row, gone = client.python(
        begin + f"row = api.get_instance({number})\napi.destroy_instance({number})\nanswer = [row, api.auth_test()]"
    )
    assert row["actual_status"] == "running" and int(row["ports"]["10022/tcp"][0]["HostPort"]) > 0 and gone is True
    refused = client.python(
        begin + "from dstack._internal.core.backends.vastai.api_client import VastAICreateInstanceError\n"
        "try: answer = api.create_instance('n', 101, 'a/b', 'x', 50, bid=0.01)\n"
        "except VastAICreateInstanceError as error: answer = [error.resp, error.created_instance_id]"
    )
    assert "invalid_price" in refused[0] and refused[1] is None


def test_skypilot_provisions_and_ends_instances(client: Client, cloud: VastCloud) -> None:
    launch = (
        SKY + "from sky.provision.vast import utils\n"
        "answer = utils.launch('c-head', '1x-H100_SXM-32-65536', 'SE', 50, 'a/b', None, PREEMPTIBLE, True,\n"
        f"  ssh_public_key='{PUBLIC_KEY}')"
    )
    first = client.python(launch.replace("PREEMPTIBLE", "False"))
    second = client.python(launch.replace("PREEMPTIBLE", "False"))
    pass_time(cloud)
    rows = client.python(SKY + "from sky.provision.vast import utils\nanswer = utils.list_instances()")
    assert {row["status"] for row in rows.values()} == {"RUNNING"} and set(rows) == {str(first), str(second)}
    client.python(
        SKY + f"from sky.provision.vast import utils\nutils.stop({first})\nutils.remove({second})\nanswer = 0"
    )
    pass_time(cloud)
    assert states(cloud) == [InstanceState.STOPPED, InstanceState.GONE]
    client.python(SKY + f"from sky.provision.vast import utils\nutils.start({first})\nanswer = 0")
    pass_time(cloud)
    assert states(cloud) == [InstanceState.RUNNING, InstanceState.GONE]
    bids = client.python(
        launch.replace("PREEMPTIBLE", "True").replace("answer = utils", "try: utils") + "\n"
        "except Exception as error: answer = str(error)"
    )
    assert "400" in bids and cloud.requests[-1].body["price"] == 0, "its search replaces every least bid with 0"
