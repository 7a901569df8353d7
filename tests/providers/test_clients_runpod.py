"""RunPod's own SDK, runpodctl's calls, dstack's client, and SkyPilot's provisioning code against the emulator."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clouds.base import KEY, PUBLIC_KEY, Web, known
from clouds.runpod import CREATE_FIELDS, PARAMETERS, RunPodCloud
from clouds.specs import Spec
from clouds_kit import SPECS
from gpuwarden.core.models import InstanceState
from paths import KITS
from real_clients import Client
from rehearsal_kit import HandClock

pytestmark = [pytest.mark.prove, pytest.mark.real("runpod")]
SKY = (KITS / "clients_sky.py").read_text("utf-8")
H100 = "NVIDIA H100 80GB HBM3"
_S = InstanceState


@pytest.fixture
def cloud(tmp_path: Path) -> RunPodCloud:
    return RunPodCloud(tmp_path / "cloud", HandClock())


@pytest.fixture
def home(cloud: RunPodCloud, web: Web) -> str:
    return web.add(cloud)


@pytest.fixture
def client(home: str, tmp_path: Path) -> Client:
    (tmp_path / "home").mkdir()
    return Client("rented", tmp_path / "home", {"RUNPOD_API_BASE_URL": home, "RUNPOD_API_KEY": KEY})


def pass_time(cloud: RunPodCloud, seconds: float = 60) -> None:
    cloud.clock.time += seconds  # type: ignore[attr-defined]
    cloud.cloud.tick()


def states(cloud: RunPodCloud) -> list[InstanceState]:
    return [known(cloud.cloud.get(i)).state for i in cloud.own]  # type: ignore[union-attr]


def as_published(cloud: RunPodCloud) -> None:
    """Assert that each REST v2 reply to a client matches the published description."""
    if SPECS is not None:
        spec = Spec(Path(SPECS) / "runpod-v2.openapi.json", "/v2")
        faults = [
            f for request, reply in cloud.exchanges if request.path != "/graphql" for f in spec.faults(request, reply)
        ]
        assert not faults, faults


def sdk(client: Client, script: str) -> Any:
    return client.python(f"import runpod\nrunpod.api_key = '{KEY}'\n{script}")


def test_parameters_and_fields_match_the_description() -> None:
    if SPECS is None:
        pytest.skip("GPUWARDEN_SPECS is not set")
    spec = Spec(Path(SPECS) / "runpod-v2.openapi.json")
    for path, names in PARAMETERS.items():
        listed = spec.document["paths"][f"/v2{path}"]["get"].get("parameters", [])
        assert {(spec.at(p["$ref"]) if "$ref" in p else p)["name"] for p in listed} == names
    schemas = spec.document["components"]["schemas"]
    create = schemas["CreatePodRequest"]["allOf"][1]["properties"]
    container = {"registry", *schemas["BaseContainerConfig"]["properties"]}
    assert {*create, *container, "entrypoint", "cmd"} == CREATE_FIELDS


def test_the_sdk_returns_the_user_gpus_and_pods(client: Client) -> None:
    """User, GPUs, and Pods. An unknown GPU and a wrong key raise the SDK's own errors."""
    user, gpus, gpu, pods = sdk(
        client, f"answer = [runpod.get_user(), runpod.get_gpus(), runpod.get_gpu('{H100}', 2), runpod.get_pods()]"
    )
    assert user["id"] == "user_7" and user["networkVolumes"][0]["dataCenterId"] == "EU-RO-1"
    assert {"id": H100, "displayName": "H100 80GB", "memoryInGb": 80} in gpus and pods == []
    assert gpu["securePrice"] == 2.99 and gpu["communityPrice"] == pytest.approx(2.99 / 2)
    assert gpu["lowestPrice"]["uninterruptablePrice"] == 2.99
    missed, refused = sdk(
        client,
        "answer = []\n"
        "for ask in (lambda: runpod.get_gpu('NVIDIA X'), lambda: runpod.get_user(api_key='wrong-key-0123456789')):\n"
        "    try: ask()\n"
        "    except Exception as error: answer.append(type(error).__name__)",
    )
    assert (missed, refused) == ("ValueError", "AuthenticationError")


def test_the_sdk_manages_a_pod(client: Client, cloud: RunPodCloud) -> None:
    with client.session() as ask:
        ask(f"import runpod\nrunpod.api_key = '{KEY}'")
        one_pod(ask, cloud)


def one_pod(ask: Callable[[str], Any], cloud: RunPodCloud) -> None:
    """Create, get, list, stop, resume, and terminate a Pod."""
    made = ask(
        f"answer = runpod.create_pod('p', 'a/b:1', '{H100}', cloud_type='SECURE', gpu_count=2, volume_in_gb=30,\n"
        "  ports='8888/http,22/tcp', volume_mount_path='/workspace', env={'A': 'b'}, network_volume_id='vol1')",
    )
    assert made["env"] == ["A=b"] and made["machine"]["podHostId"].startswith(made["id"])
    order = cloud.own[made["id"]]["order"]
    assert order["gpu"] == {"id": H100, "count": 2} and order["ports"] == ["8888/http", "22/tcp"]
    booting = ask(f"answer = runpod.get_pod('{made['id']}')")
    assert booting["desiredStatus"] == "RUNNING" and booting["runtime"] is None
    pass_time(cloud)
    (pod,) = ask("answer = runpod.get_pods()")
    ssh = next(p for p in pod["runtime"]["ports"] if p["privatePort"] == 22)
    assert (ssh["ip"], ssh["publicPort"]) == cloud.address(made["id"]) and ssh["isIpPublic"] is True
    assert pod["gpuCount"] == 2 and pod["costPerHr"] == pytest.approx(5.98)
    stopped = ask(f"answer = runpod.stop_pod('{made['id']}')")
    assert stopped["id"] == made["id"]
    pass_time(cloud)
    assert states(cloud) == [_S.STOPPED]
    resumed = ask(f"answer = runpod.resume_pod('{made['id']}', 2)")
    assert resumed["desiredStatus"] == "RUNNING"
    pass_time(cloud)
    assert states(cloud) == [_S.RUNNING]
    assert ask(f"answer = runpod.terminate_pod('{made['id']}')") is None
    pass_time(cloud)
    assert states(cloud) == [_S.GONE]


def test_no_stock_is_an_error(client: Client, cloud: RunPodCloud) -> None:
    cloud.cloud.configure(cloud.cloud.settings.model_copy(update={"capacity": 0}))
    said = sdk(client, f"try: runpod.create_pod('p', 'a/b', '{H100}')\nexcept Exception as e: answer = str(e)")
    assert "no longer any instances available" in said and cloud.own == {}


# ------------------------------------------------------------------------------------------------ runpodctl, v2.7.2


def graph(home: str, query: str, variables: dict[str, Any] | None = None) -> Any:
    """Send a query as runpodctl does. The program isn't available in a package registry."""
    body = json.dumps({"query": query, "variables": variables or {}}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{home}/graphql", body, headers)) as reply:
        return json.load(reply)


CREATE = """mutation createPod($input: PodFindAndDeployOnDemandInput!) { podFindAndDeployOnDemand(input: $input) {
  id name imageName desiredStatus costPerHr containerDiskInGb volumeInGb volumeMountPath gpuCount memoryInGb vcpuCount
  ports lastStatusChange env machine { gpuDisplayName location } } }"""
ORDER = {
    "cloudType": "SECURE", "containerDiskInGb": 20, "env": [{"key": "A", "value": "b"}], "gpuCount": 1,
    "gpuTypeId": H100, "imageName": "a/b:1", "name": "p", "ports": "22/tcp", "startSsh": True, "volumeInGb": 20,
    "volumeMountPath": "/workspace", "stopAfter": "1970-01-12T14:46:40Z", "terminateAfter": "1970-01-12T15:46:40Z",
}  # fmt: skip
"""The dates are one hour and two hours after the start of the emulator's clock."""


def test_a_runpodctl_pod_outlives_its_end_dates(home: str, cloud: RunPodCloud) -> None:
    made = graph(home, CREATE, {"input": ORDER})["data"]["podFindAndDeployOnDemand"]
    assert made["desiredStatus"] == "RUNNING" and made["costPerHr"] == 2.99
    for seconds in (3700, 3600):  # past the first date, then past the second
        pass_time(cloud, seconds)
        graph(home, "query myself { myself { id pubKey } }")
        pass_time(cloud)
        assert states(cloud) == [_S.RUNNING]


def test_runpodctls_other_calls_are_answered(home: str, cloud: RunPodCloud) -> None:
    user = graph(
        home,
        "query { myself { id email clientBalance currentSpendPerHr spendLimit notifyPodsStale notifyPodsGeneral "
        "notifyLowBalance } }",
    )["data"]["myself"]
    assert user["clientBalance"] == 1000.0
    gpus = graph(home, "query { gpuTypes { id displayName memoryInGb secureCloud communityCloud } }")["data"]
    places = graph(
        home,
        "query { dataCenters { id name location gpuAvailability { gpuTypeId displayName stockStatus } } }",
    )["data"]
    assert len(gpus["gpuTypes"]) == len(places["dataCenters"][0]["gpuAvailability"]) == 4
    ident = graph(home, CREATE, {"input": ORDER})["data"]["podFindAndDeployOnDemand"]["id"]
    pass_time(cloud)
    listed = graph(
        home,
        "query myPods { myself { pods { id containerDiskInGb costPerHr desiredStatus lastStatusChange uptimeSeconds "
        "dockerArgs env gpuCount imageName memoryInGb name podType ports vcpuCount volumeInGb volumeMountPath "
        "machine { gpuDisplayName location } runtime { ports { ip isIpPublic privatePort publicPort type } } } } }",
    )["data"]["myself"]["pods"]
    assert [p["id"] for p in listed] == [ident] and listed[0]["runtime"]["ports"][0]["privatePort"] == 22
    variables = {"podId": ident}
    for query, state in (
        ("mutation stopPod($podId: String!) { podStop(input: {podId: $podId}) { id desiredStatus } }", _S.STOPPED),
        ("mutation podResume($podId: String!) { podResume(input: {podId: $podId}) { id costPerHr } }", _S.RUNNING),
        ("mutation terminatePod($podId: String!) { podTerminate(input: {podId: $podId}) }", _S.GONE),
    ):
        assert "errors" not in graph(home, query, variables)
        pass_time(cloud)
        assert states(cloud) == [state]


@pytest.mark.parametrize(
    "query",
    [
        "query { myself { walletBalance } }",
        "query { pods { id } }",
        'mutation { podFindAndDeployOnDemand(input: { gpuTypeId: "x", maxPrice: 2 }) { id } }',
        'mutation { podStop(input: { id: "x" }) { id } }',
        'mutation { podFindAndDeployOnDemand(input: { cloudType: CHEAP, imageName: "a" }) { id } }',
        'mutation { podRentInterruptable(input: { gpuTypeId: "x", bidPerGpu: 0.2 }) { id } }',
    ],
)
def test_an_unsupported_query_is_refused(home: str, cloud: RunPodCloud, query: str) -> None:
    """The errors have status 200. The last query is in the schema, but is being removed from the service."""
    assert graph(home, query)["errors"] and cloud.own == {}


@pytest.mark.parametrize(
    ("path", "status"),
    [("/pods?status=RUNNING", 400), ("/catalog/gpus?gpu=H100", 400), ("/catalog/gpus?product=POD", 400)],
)
def test_an_unknown_parameter_is_refused(home: str, path: str, status: int) -> None:
    request = urllib.request.Request(home + path, headers={"Authorization": f"Bearer {KEY}"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == status
    refused.value.close()


def test_rest_v1_returns_410(home: str) -> None:
    """runpodctl 2.7.2 uses it to list, start, stop, and delete Pods."""
    request = urllib.request.Request(home + "/v1/pods", headers={"Authorization": f"Bearer {KEY}"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 410
    refused.value.close()


# ------------------------------------------------------------------------------------------------ dstack and SkyPilot


def test_dstacks_client_manages_instances(client: Client, home: str, cloud: RunPodCloud) -> None:
    begin = (
        "import dstack._internal.core.backends.runpod.api_client as module\n"
        f"module.API_V2_URL, module.API_GRAPHQL_URL = '{home}', '{home}/graphql'\n"
        f"api = module.RunpodApiClient('{KEY}')\n"
    )
    made = client.python(
        begin + f"answer = [api.validate_api_key(), api.create_pod(name='n', cloud='SECURE', gpu_type_id='{H100}',\n"
        "  gpu_count=1, min_cpu_count_per_gpu=4, container_disk_in_gb=40, image_name='a/b', entrypoint=['/bin/sh'],\n"
        "  cmd=['-c', 'x'], ports=['10022/tcp'], data_center_ids=['EU-RO-1'], env={'A': '0'})['id'],\n"
        f" api.create_gpu_pod_graphql(name='c', image_name='a/b', gpu_type_id='{H100}', cloud_type='COMMUNITY',\n"
        "  country_code='RO', ports='10022/tcp', env={'A': '0'}, docker_args='x')['id']]"
    )
    assert made[0] is True and [own["order"]["cloud"] for own in cloud.own.values()] == ["SECURE", "COMMUNITY"]
    pass_time(cloud)
    pods, ended, gone = client.python(
        begin + f"ids = {made[1:]}\nanswer = [[api.get_pod(i) for i in ids], [api.terminate_pod(i) for i in ids],\n"
        "  api.get_pod('nothere')]"
    )
    assert [p["status"] for p in pods] == ["RUNNING", "RUNNING"] and ended == [True, True] and gone is None
    assert all({"private", "public", "ip"} <= set(p["runtime"]["ports"][0]) for p in pods)
    pass_time(cloud)
    assert client.python(begin + f"answer = api.terminate_pod('{made[1]}')") is False
    as_published(cloud)


def test_skypilot_provisions_and_ends_instances(client: Client, cloud: RunPodCloud) -> None:
    begin = SKY + f"import runpod\nrunpod.api_key = '{KEY}'\nfrom sky.provision.runpod import utils\n"
    launch = (
        "utils.launch('c', 'head', '1x_H100-SXM_SECURE', 'RO', 'EU-RO-1', 50, 'a/b', [8080],\n"
        f"  '{PUBLIC_KEY}', PREEMPTIBLE, 0.5, None)"
    )
    ident = client.python(begin + "answer = " + launch.replace("PREEMPTIBLE", "False"))
    pass_time(cloud)
    pods = client.python(begin + "answer = utils.list_instances()")
    host, port = cloud.address(ident)
    assert pods[ident]["name"] == "c-head" and (pods[ident]["external_ip"], pods[ident]["ssh_port"]) == (host, port)
    removed = client.python(
        begin + f"utils.remove('{ident}')\ntry: {launch.replace('PREEMPTIBLE', 'True').replace(chr(10), '')}\n"
        "except Exception as error: answer = str(error)"
    )
    assert "podRentInterruptable is no longer supported" in removed
    pass_time(cloud)
    assert states(cloud) == [_S.GONE]
