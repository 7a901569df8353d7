# Runs before SkyPilot's provisioning code, in the same process. Parts of SkyPilot that are not under test (logging,
# constants, exception messages) import a database and a web server, so small stand-ins replace them.
import importlib.machinery
import logging
import sys
import types


def _folder(name):
    above, _, last = name.rpartition(".")
    paths = (
        [f"{path}/{last}" for path in sys.modules[above].__path__]
        if above
        else list(importlib.machinery.PathFinder.find_spec(name).submodule_search_locations)
    )
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = paths
    if above:
        setattr(sys.modules[above], last, module)


def _stand_in(name, **values):
    above, _, last = name.rpartition(".")
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(values)
    setattr(sys.modules[above], last, module)


for _name in ("sky", "sky.provision", "sky.provision.vast", "sky.provision.runpod", "sky.skylet", "sky.utils"):
    _folder(_name)
_stand_in("sky.sky_logging", init_logger=logging.getLogger)
_stand_in("sky.skylet.constants", SKY_REMOTE_RAY_DASHBOARD_PORT=8266, SKY_REMOTE_RAY_PORT=6380)
_stand_in("sky.utils.common_utils", format_exception=str)
_stand_in("sky.provision.docker_utils", DockerLoginConfig=None)
