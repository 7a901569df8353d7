"""Vast.ai's market: rows of offers and instances, and its filter language.

Follows the published description of `search offers` and `show instances`. If the vendor's clients send other fields,
both are accepted, and a comment marks the place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from clouds.base import Refuse, Reply

_FILTERS = """verified rentable rented gpu_name reliability num_gpus gpu_ram duration machine_id dlperf_per_dphtotal
    dph_total
    flops_per_dphtotal geolocation gpu_arch dlperf cuda_max_good inet_down inet_up inet_down_cost inet_up_cost
    driver_version compute_cap cpu_arch has_avx cpu_cores cpu_cores_effective cpu_ghz cpu_ram datacenter external
    disk_bw disk_space bw_nvlink gpu_max_power gpu_max_temp gpu_mem_bw gpu_total_ram gpu_frac gpu_display_active
    direct_port_count host_id id min_bid mobo_name pci_gen pcie_bw storage_cost static_ip total_flops os_version
    ubuntu_version verification vms_enabled"""
FILTERS: Final = frozenset(_FILTERS.split())
"""The filters in the description."""
MORE_FILTERS: Final = frozenset({"reliability2", "cluster_id", "score", "hosting_type"})
"""Filters that the description lacks but the vendor's client, dstack, or SkyPilot sends."""
CONTROLS: Final = frozenset({"limit", "type", "order", "allocated_storage", "disable_bundling"})
"""Other fields of a search; the vendor's client sends the last one."""
TYPES: Final = frozenset({"ondemand", "on-demand", "bid", "reserved"})
"""The description lists `ondemand` and shows `on-demand`, which the clients send."""
OPERATORS: Final = frozenset({"eq", "neq", "gt", "lt", "gte", "lte", "in", "notin"})
COUNTS: Final = range(1, 9)
STORAGE_USD: Final = 0.02
"""The hourly price of an instance's disk."""
HARDWARE: Final[dict[str, Any]] = {
    "bw_nvlink": 0.0, "compute_cap": 900, "cpu_arch": "amd64", "cpu_cores": 64, "cpu_cores_effective": 32.0,
    "cpu_name": "EPYC 9354", "cpu_ram": 257_000, "cuda_max_good": 12.8, "direct_port_count": 100, "disk_bw": 3000.0,
    "disk_name": "nvme", "dlperf": 300.0, "dlperf_per_dphtotal": 130.0, "driver_version": "570.86.15",
    "duration": 2_592_000.0, "flops_per_dphtotal": 30.0, "geolocation": "Sweden, SE", "gpu_arch": "nvidia",
    "gpu_display_active": False, "gpu_frac": 1.0, "gpu_lanes": 16, "gpu_max_power": 700.0, "gpu_max_temp": 87.0,
    "gpu_mem_bw": 2600.0, "gpu_ram": 81_559, "host_id": 5, "hosting_type": 1, "inet_down": 5000.0,
    "inet_up": 4000.0, "mobo_name": "H13", "os_version": "22.04", "pci_gen": 5.0, "pcie_bw": 53.0,
    "reliability2": 0.995, "rentable": True, "score": 200.0, "static_ip": True, "storage_cost": 0.15,
    "total_flops": 60.0, "verification": "verified", "webpage": None, "logo": "",
}  # fmt: skip
ALIASES: Final = {"reliability": "reliability2", "ubuntu_version": "os_version"}


def error(status: int, code: str, msg: str) -> Reply:
    """Return an error in the platform's format."""
    return Reply(status, {"success": False, "error": code, "msg": msg})


def not_a_key(name: object) -> Refuse:
    """Return the refusal of an unknown filter, with the description's message."""
    return Refuse(error(400, "invalid_request", f"Error in query parameters: {name} is not a valid search key"))


def offers(rows: Iterable[dict[str, Any]], query: object) -> list[dict[str, Any]]:
    """Return the offers that match a search, in its order. Raises Refuse for a query that the API does not support."""
    if not isinstance(query, dict):
        raise Refuse(error(400, "invalid_request", "Invalid json body"))
    if query.get("type", "ondemand") not in TYPES:
        raise Refuse(error(400, "invalid_request", f"invalid type {query['type']}"))
    wanted = {name: tests for name, tests in query.items() if name not in CONTROLS}
    for name in wanted:
        if name not in FILTERS | MORE_FILTERS:
            raise not_a_key(name)
    found = [row for row in rows if matches(row, wanted)]
    for field, direction in reversed(query.get("order") or []):
        key = ALIASES.get(field, field)
        if found and key not in found[0]:
            raise not_a_key(field)
        found.sort(key=lambda row: row[key], reverse=direction == "desc")
    return found[: int(query.get("limit") or len(found))]


def matches(row: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Return whether a row meets every condition."""
    return all(
        _holds(_value(row, name), operator, value)
        for name, tests in wanted.items()
        if name != "external"  # this filter widens the search
        for operator, value in _operators(name, tests)
    )


def _operators(name: str, tests: object) -> list[tuple[str, Any]]:
    if not isinstance(tests, dict) or not set(tests) <= OPERATORS:
        raise Refuse(error(400, "invalid_request", f"Error in query parameters: {name}: unknown operator"))
    return list(tests.items())


def _value(row: dict[str, Any], name: str) -> Any:
    if name == "verified":
        return row["verification"] == "verified"
    if name == "datacenter":
        return row["hosting_type"] == 1
    if name == "geolocation":
        return row["geolocation"][-2:]
    return row.get(ALIASES.get(name, name))


def _holds(value: Any, operator: str, request: Any) -> bool:
    """Compare a value with the requested one, which the vendor's client sends as text."""
    if operator in {"in", "notin"}:
        return (value in [_like(value, a) for a in request]) == (operator == "in")
    other = _like(value, request)
    if operator in {"eq", "neq"}:
        return bool(value == other) == (operator == "eq")
    if value is None or other is None:
        return False
    return bool({"gt": value > other, "lt": value < other, "gte": value >= other, "lte": value <= other}[operator])


def _like(value: Any, request: Any) -> Any:
    if isinstance(request, str) and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(request)
        except ValueError:
            raise Refuse(error(400, "invalid_request", f"{request} is not a number")) from None
    return request


CONTRACT_COLUMNS: Final = frozenset(
    {"id", "label", "actual_status", "cur_state", "intended_status", "next_state", "gpu_name", "verification"}
    | {"machine_id", "start_date", "end_date", "is_bid"}
)
"""Columns of instances that can be filtered and sorted; computed columns, such as dph_total, can't."""


def listed(rows: list[dict[str, Any]], query: dict[str, str]) -> list[dict[str, Any]]:
    """Return the instances that match a list request, in its order. Raises Refuse for unknown filters."""
    if unknown := set(query) - {"limit", "after_token", "order_by", "select_cols", "select_filters", "owner"}:
        raise not_a_key(min(unknown))
    wanted = conditions(query.get("select_filters", "{}"))
    order = conditions(query.get("order_by", "[]"))
    for name in (*wanted, *(o["col"] for o in order)):
        if name not in CONTRACT_COLUMNS:
            raise not_a_key(name)
    found = [row for row in rows if matches(row, wanted)]
    found.sort(key=lambda row: int(row["id"]))
    for key in reversed(order):
        found.sort(key=lambda row: (row[key["col"]] is not None, row[key["col"]]), reverse=key.get("dir") == "desc")
    return found


def columns(row: dict[str, Any], query: dict[str, str]) -> dict[str, Any]:
    """Return the columns that a list request names; an unknown one is null."""
    names = conditions(query.get("select_cols", '["*"]'))
    return row if "*" in names else {name: row.get(name) for name in {"id", *names}}


def conditions(text: str) -> Any:
    """Return the content of a query's JSON. Raises Refuse if the text is invalid."""
    try:
        return json.loads(text)
    except ValueError:
        raise Refuse(error(400, "invalid_request", "Error in query parameters: not JSON")) from None
