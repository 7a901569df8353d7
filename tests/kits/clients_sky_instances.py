# ruff: noqa: F821  (clients_sky.py, which runs first, defines _folder and _stand_in)
# Runs after clients_sky.py, and before SkyPilot's modules that start and terminate whole clusters. Defines the
# stand-ins that these modules need, with SkyPilot's names and as much of its behavior as they use.
import contextlib
import enum


def _format_exception(error, use_bracket=False):
    return f"{type(error).__name__}: {error}"


class _Backoff:
    def __init__(self, initial_backoff=5, max_backoff_factor=5):
        pass

    def current_backoff(self):
        return 0.01


class _ClusterStatus(enum.Enum):
    INIT, UP, STOPPED = "INIT", "UP", "STOPPED"


def _ports(words):
    ends = [[int(n) for n in word.split("-")] for word in words]
    return {port for low_high in ends for port in range(low_high[0], low_high[-1] + 1)}


def _ranges(ports):
    begins = sorted(p for p in ports if p - 1 not in ports)
    ends = sorted(p for p in ports if p + 1 not in ports)
    return [str(low) if low == high else f"{low}-{high}" for low, high in zip(begins, ends, strict=True)]


_folder("sky.catalog")
_folder("sky.adaptors")
_stand_in("sky.exceptions", ResourcesUnavailableError=type("ResourcesUnavailableError", (Exception,), {}))
_stand_in("sky.catalog.common", read_catalog=None)
_stand_in(
    "sky.utils.common_utils",
    format_exception=_format_exception,
    Backoff=_Backoff,
    get_user_hash=lambda: "0a1b2c3d",
)
_stand_in("sky.utils.status_lib", ClusterStatus=_ClusterStatus)
_stand_in("sky.utils.ux_utils", print_exception_no_traceback=contextlib.nullcontext)
_stand_in("sky.utils.resources_utils", port_ranges_to_set=_ports, port_set_to_ranges=_ranges)
