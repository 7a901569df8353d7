"""SkyPilot's provisioning code against the Paperspace emulator.

Paperspace's own command line is in no registry, and the available clients use the interface that was shut down.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clouds.base import KEY, PUBLIC_KEY, Web, alive, known
from clouds.paperspace import PaperspaceTeam
from real_clients import Client, sky
from rehearsal_kit import HandClock

pytestmark = [pytest.mark.prove, pytest.mark.real("skypilot")]
BEGIN = """
import sys
from types import SimpleNamespace as Config
from sky.provision.paperspace import constants, instance, utils
utils.API_ENDPOINT, instance.POLL_INTERVAL = sys.argv[1], 0.01
api = utils.PaperspaceCloudClient()
"""


@pytest.fixture
def team(tmp_path: Path, web: Web) -> PaperspaceTeam:
    team = PaperspaceTeam(tmp_path / "cloud", HandClock())
    team.home = web.add(team)
    team.before = lambda: pass_time(team)
    return team


@pytest.fixture
def client(tmp_path: Path) -> Client:
    (tmp_path / "home" / ".paperspace").mkdir(parents=True)
    (tmp_path / "home" / ".paperspace" / "config.json").write_text(json.dumps({"apiKey": KEY}))
    return Client("rented", tmp_path / "home")


def pass_time(team: PaperspaceTeam) -> None:
    team.clock.time += 15  # type: ignore[attr-defined]
    team.cloud.tick()


def test_skypilot_provisions_and_ends_instances(team: PaperspaceTeam, client: Client) -> None:
    """SkyPilot ends machines without stopping them first, which the documentation rules out."""
    team.deletes_running = True
    made, name, before, off, back, left = client.python(
        sky("paperspace") + BEGIN + "api.set_sky_key_script(sys.argv[2])\n"
        "api.set_sky_key_script(sys.argv[2])\n"
        "network = api.setup_network('c-1', 'East Coast (NY2)')\n"
        "assert api.setup_network('c-1', 'East Coast (NY2)') == network\n"
        "config = Config(count=2, node_config={'InstanceType': 'H100', 'NetworkId': network['id'], 'DiskSize': 250})\n"
        "run = lambda: instance.run_instances('East Coast (NY2)', 'c', 'c-1', config)\n"
        "made = run().created_instance_ids\n"
        "api.rename(made[1], 'c-1-worker')\n"
        "states = lambda: [s[0].value for s in instance.query_instances('c', 'c-1', {}).values()]\n"
        "before = states()\n"
        "instance.stop_instances('c-1', worker_only=True)\n"
        "off = states()\n"
        "back = run().created_instance_ids + states()\n"
        "instance.terminate_instances('c-1')\n"
        "answer = [made, api.list_startup_scripts()[0]['name'], before, off, back, states()]",
        team.home, PUBLIC_KEY,
    )  # fmt: skip
    assert made == list(team.own) and name == "sky-add-key-0a1b2c3d" and team.networks == []
    assert before == ["UP", "UP"] and sorted(off) == ["STOPPED", "UP"] and back == ["UP", "UP"] and left == []
    order = next(a.body for a in team.requests if a.line == "POST /machines")
    assert order["templateId"] == "tilqt47t" and order["diskSize"] == 250 and order["startupScriptId"] == "ss0"
    pass_time(team)
    assert not any(alive(known(team.cloud.get(ident))) for ident in team.own)


def test_the_client_gets_the_platforms_refusals(team: PaperspaceTeam, client: Client) -> None:
    odd, running, absent = client.python(
        sky("paperspace") + BEGIN + "def ends(call, *words, **more):\n"
        "  try: return call(*words, **more)\n"
        "  except utils.PaperspaceCloudError as error: return str(error)\n"
        "api.set_sky_key_script(sys.argv[2])\n"
        "made = api.launch('n', 'H100', None, 'East Coast (NY2)', 100)['data']\n"
        "assert made['usageRate'] == 5.95 and made['storageRate'] == 7\n"
        "odd = ends(api.list_endpoint, 'machines', gpu='H100')\n"
        "answer = [odd, ends(api.remove, made['id']), ends(api.stop, 'no')]",
        team.home, PUBLIC_KEY,
    )  # fmt: skip
    assert odd == "BAD_REQUEST: Unrecognized key(s) in object: gpu"
    assert running == "BAD_REQUEST: Machine must be off" and absent == "NOT_FOUND: Machine not found"
