"""lambda-cloud-client, dstack's Lambda backend, and SkyPilot's provisioning code against the Lambda emulator.

lambda-cloud-client is generated from an older description: it sends `quantity`, and can't parse the status
`terminating`, with which 1.10 answers a termination. The other two still use the address from before Lambda's renaming;
the tests redirect it to the emulator through their constants.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clouds.base import KEY, PUBLIC_KEY, Web, known
from clouds.lambda_cloud import LambdaAccount
from clouds.specs import Spec
from clouds_kit import SPECS
from gpuwarden.core.models import InstanceState
from real_clients import Client, sky
from rehearsal_kit import HandClock

pytestmark = [pytest.mark.prove, pytest.mark.real("lambda-cloud-client")]
CLIENT = """
import sys
import lambda_cloud_client as client
api = client.DefaultApi(client.ApiClient(client.Configuration(host=sys.argv[1], access_token=sys.argv[2])))
def ends(call, *words):
    try: return call(*words)
    except client.ApiException as error: return [error.status, error.body]
"""


@pytest.fixture
def account(tmp_path: Path, web: Web) -> LambdaAccount:
    account = LambdaAccount(tmp_path / "cloud", HandClock())
    account.window = None  # type: ignore[misc]
    account.home = web.add(account) + "/api/v1"
    account.before = lambda: pass_time(account, 15)
    return account


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


def pass_time(account: LambdaAccount, seconds: float) -> None:
    account.clock.time += seconds  # type: ignore[attr-defined]
    account.cloud.tick()


def states(account: LambdaAccount) -> list[InstanceState]:
    return [known(account.cloud.get(i)).state for i in account.own]  # type: ignore[union-attr]


def as_published(account: LambdaAccount) -> None:
    """Assert that each reply to a client matches the published description."""
    if SPECS is None:
        return
    spec = Spec(Path(SPECS) / "lambda-cloud.openapi.json")
    faults = [f for request, reply in account.exchanges for f in spec.faults(request, reply)]
    assert not faults


def fields(pointer: list[str]) -> set[str]:
    """Return the names in a part of the description, given the path to its properties."""
    assert SPECS
    value: Any = Spec(Path(SPECS) / "lambda-cloud.openapi.json").document
    for step in pointer:
        value = value[step]
    return set(value)


def test_launch_fields_match_the_description() -> None:
    if SPECS is None:
        pytest.skip("GPUWARDEN_SPECS is not set")
    way = ["paths", "/api/v1/instance-operations/launch", "post", "requestBody", "content", "application/json"]
    taken = LambdaAccount.launch.described[1]  # type: ignore[attr-defined]
    assert taken - {"quantity"} == fields([*way, "schema", "properties"])


def test_the_generated_client_manages_an_instance(account: LambdaAccount, home: Path) -> None:
    client = Client("lambda", home)
    seen = client.python(
        CLIENT + "kinds = api.instance_types().data\n"
        "kind = kinds['gpu_1x_h100']\n"
        "key = api.add_ssh_key(client.AddSSHKeyRequest(name='mine', public_key='ssh-ed25519 AAAA me')).data\n"
        "order = client.LaunchInstanceRequest(region_name=kind.regions_with_capacity_available[0].name,\n"
        "  instance_type_name='gpu_1x_h100', ssh_key_names=['mine'], name='a-name')\n"
        "ident = api.launch_instance(order).data.instance_ids[0]\n"
        "listed = [i.id for i in api.list_instances().data]\n"
        "one = api.get_instance(ident).data\n"
        "back = api.restart_instance(client.RestartInstanceRequest(instance_ids=[ident])).data.restarted_instances\n"
        "files = [f.name for f in api.list_file_systems().data]\n"
        "keys = {k.name for k in api.list_ssh_keys().data}\n"
        "try: ended = api.terminate_instance(client.TerminateInstanceRequest(instance_ids=[ident])).data\n"
        "except ValueError as error: ended = str(error)\n"
        "api.delete_ssh_key(key.id)\n"
        "answer = [ident, kind.instance_type.price_cents_per_hour, kind.instance_type.specs.vcpus, listed,\n"
        "  one.status, one.name, one.ip, back[0].id, files, sorted(keys), ended,\n"
        "  [k.name for k in api.list_ssh_keys().data], ends(api.get_instance, 'no-such')]",
        account.home, KEY,
    )  # fmt: skip
    ident, cents, vcpus, listed, status, name, ip, back, files, keys, ended, left, absent = seen
    assert (cents, vcpus, listed, back) == (249, 26, [ident], ident) and list(account.own) == [ident]
    assert (status, name) == ("active", "a-name") and ip
    assert "'active', 'booting', 'unhealthy', 'terminated'" in ended, "it is older than the status of an ending one"
    assert files == ["gpuwarden"] and keys == ["laptop", "mine"] and left == ["laptop"]
    assert absent[0] == 404 and "global/object-does-not-exist" in absent[1]
    pass_time(account, 60)
    assert states(account) == [InstanceState.GONE]
    as_published(account)


def test_the_generated_client_gets_lambdas_errors(account: LambdaAccount, home: Path) -> None:
    order = "client.LaunchInstanceRequest(region_name='us-east-1', instance_type_name='{}', ssh_key_names=['{}'])"
    refused, odd, wrong = Client("lambda", home).python(
        CLIENT + f"refused = ends(api.launch_instance, {order.format('gpu_9x_none', 'laptop')})\n"
        "import json, urllib.request\n"
        "ask = urllib.request.Request(sys.argv[1] + '/instances?state=active',\n"
        "  headers={'Authorization': 'Bearer ' + sys.argv[2]})\n"
        "try: odd = [urllib.request.urlopen(ask).status, '']\n"
        "except urllib.error.HTTPError as error: odd = [error.code, error.read().decode()]\n"
        "api.api_client.configuration.access_token = 'another-key-0123456789'\n"
        "answer = [refused, odd, ends(api.list_instances)]",
        account.home, KEY,
    )  # fmt: skip
    assert refused[0] == 400 and "global/invalid-parameters" in refused[1] and account.own == {}
    assert odd[0] == 400 and "unknown state" in odd[1]
    assert wrong[0] == 401 and "global/invalid-api-key" in wrong[1]


def test_dstacks_client_manages_instances(account: LambdaAccount, home: Path) -> None:
    """Only dstack's API client is tested; the backend around it requires a server's settings and its catalog."""
    answer = Client("rented", home).python(
        "import sys\n"
        "from dstack._internal.core.backends.lambdalabs import api_client\n"
        "api_client.API_URL = sys.argv[1]\n"
        "api = api_client.LambdaAPIClient(sys.argv[2])\n"
        "assert api.validate_api_key()\n"
        "kinds = api.list_instance_types()\n"
        "regions = [r['name'] for r in kinds['gpu_8x_a10']['regions_with_capacity_available']]\n"
        "api.add_ssh_key('dstack', 'ssh-ed25519 AAAA me')\n"
        "ids = api.launch_instances(regions[0], 'gpu_8x_a10', ['dstack'], [], 1, 'a-fleet')\n"
        "rows = {i['id']: i for i in api.list_instances()}\n"
        "row = rows[ids[0]]\n"
        "ended = api.terminate_instances(ids)\n"
        "api.api_key = 'another-key-0123456789'\n"
        "answer = [ids, row['status'], row['ip'], ended, api.validate_api_key()]",
        account.home, KEY,
    )  # fmt: skip
    ids, status, ip, ended, valid = answer
    assert ids == list(account.own) and status in {"booting", "active"} and ip and valid is False
    assert [i["id"] for i in ended["terminated_instances"]] == ids
    assert {k["name"] for k in account.ssh_keys} == {"laptop", "dstack"}
    pass_time(account, 60)
    assert states(account) == [InstanceState.GONE]
    as_published(account)


def test_skypilot_provisions_and_ends_instances(account: LambdaAccount, home: Path) -> None:
    (home / ".lambda_cloud").mkdir()
    (home / ".lambda_cloud" / "lambda_keys").write_text(f"api_key = {KEY}\n")
    answer = Client("rented", home).python(
        sky("lambda_cloud") + "import sys\n"
        "from types import SimpleNamespace as Config\n"
        "from sky.provision.lambda_cloud import instance, lambda_utils\n"
        "lambda_utils.API_ENDPOINT, instance.POLL_INTERVAL = sys.argv[1], 0.01\n"
        "api = lambda_utils.LambdaCloudClient()\n"
        "name, there = api.get_unique_ssh_key_name('laptop', sys.argv[2])\n"
        "api.register_ssh_key('sky-1', 'ssh-ed25519 AAAA sky')\n"
        "config = Config(count=2, node_config={'InstanceType': 'gpu_1x_h100'},\n"
        "  authentication_config={'remote_key_name': 'sky-1'})\n"
        "made = instance.run_instances('us-west-1', 'c', 'c-1', config)\n"
        "again = instance.run_instances('us-west-1', 'c', 'c-1', config)\n"
        "info = instance.get_cluster_info('us-west-1', 'c-1')\n"
        "before = instance.query_instances('c', 'c-1', {})\n"
        "instance.open_ports('c-1', ['8080', '9000-9010'], {'region': 'us-west-1'})\n"
        "instance.terminate_instances('c-1')\n"
        "answer = [name, made.created_instance_ids, again.created_instance_ids, len(info.instances),\n"
        "  info.head_instance_id, [s[0].value for s in before.values()], instance.query_instances('c', 'c-1', {})]",
        account.home, PUBLIC_KEY,
    )  # fmt: skip
    name, made, again, count, head, before, after = answer
    assert name == "laptop-1", "the account's key has a comment, and SkyPilot compares whole lines"
    assert made == list(account.own) and again == [] and count == 2 and head == made[0]
    assert before == ["UP", "UP"] and after == {}
    assert [rule["port_range"] for rule in account.firewall] == [[8080, 8080], [9000, 9010]]
    pass_time(account, 60)
    assert states(account) == [InstanceState.GONE, InstanceState.GONE]
    as_published(account)
