"""Replies: the results of use cases, in the form that the tools and `--json` share.

Every reply contains `ok` and `code`, because some transcript formats drop error flags. Untrusted text is fenced and
shortened here. Next steps are values until `worded` renders them for one interface. Each reply is imported on
first access, because a command needs only one, and importing all replies would import every use case.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gpuwarden.interfaces.results.alerts import AlertReply, WatchReply, watched
    from gpuwarden.interfaces.results.base import (
        ErrorReply,
        FindingReply,
        MeterReply,
        RefusalReply,
        Result,
        WarnedReply,
        Words,
        error_reply,
        findings,
        warned,
        worded,
    )
    from gpuwarden.interfaces.results.cells import FanOutReply
    from gpuwarden.interfaces.results.check import CheckReply, DiagnosisReply, checked, signaled
    from gpuwarden.interfaces.results.copies import (
        FileReply,
        PullReply,
        VerifyReply,
        pulled,
        verified,
    )
    from gpuwarden.interfaces.results.fan_out import fan_out_checked, fanned_out
    from gpuwarden.interfaces.results.hub import (
        DatasetsReply,
        ReposReply,
        datasets_found,
        repos_reply,
    )
    from gpuwarden.interfaces.results.inventory import (
        AccountReply,
        ClockReply,
        InstanceReply,
        InstancesReply,
        listed,
    )
    from gpuwarden.interfaces.results.metrics import MetricReply, MetricsReply, reported
    from gpuwarden.interfaces.results.offers import OffersReply, offered
    from gpuwarden.interfaces.results.overview import (
        CostsReply,
        JobsReply,
        StatusReply,
        WaitsReply,
        costs_of,
        jobs_of,
        status_of,
        waits,
    )
    from gpuwarden.interfaces.results.submission import SubmitReply, submitted
    from gpuwarden.interfaces.results.teardown import TeardownReply, torn_down

__all__ = [
    "AccountReply",
    "AlertReply",
    "CheckReply",
    "ClockReply",
    "CostsReply",
    "DatasetsReply",
    "DiagnosisReply",
    "ErrorReply",
    "FanOutReply",
    "FileReply",
    "FindingReply",
    "InstanceReply",
    "InstancesReply",
    "JobsReply",
    "MeterReply",
    "MetricReply",
    "MetricsReply",
    "OffersReply",
    "PullReply",
    "RefusalReply",
    "ReposReply",
    "Result",
    "StatusReply",
    "SubmitReply",
    "TeardownReply",
    "VerifyReply",
    "WaitsReply",
    "WarnedReply",
    "WatchReply",
    "Words",
    "checked",
    "costs_of",
    "datasets_found",
    "error_reply",
    "fan_out_checked",
    "fanned_out",
    "findings",
    "jobs_of",
    "listed",
    "offered",
    "pulled",
    "reported",
    "repos_reply",
    "signaled",
    "status_of",
    "submitted",
    "torn_down",
    "verified",
    "waits",
    "warned",
    "watched",
    "worded",
]

_HOMES: Final = {
    "alerts": (
        "AlertReply",
        "WatchReply",
        "watched",
    ),
    "base": (
        "ErrorReply",
        "FindingReply",
        "MeterReply",
        "RefusalReply",
        "Result",
        "WarnedReply",
        "Words",
        "error_reply",
        "findings",
        "warned",
        "worded",
    ),
    "check": (
        "CheckReply",
        "DiagnosisReply",
        "checked",
        "signaled",
    ),
    "copies": (
        "FileReply",
        "PullReply",
        "VerifyReply",
        "pulled",
        "verified",
    ),
    "cells": ("FanOutReply",),
    "fan_out": (
        "fan_out_checked",
        "fanned_out",
    ),
    "hub": (
        "DatasetsReply",
        "ReposReply",
        "datasets_found",
        "repos_reply",
    ),
    "inventory": (
        "AccountReply",
        "ClockReply",
        "InstanceReply",
        "InstancesReply",
        "listed",
    ),
    "metrics": (
        "MetricReply",
        "MetricsReply",
        "reported",
    ),
    "offers": (
        "OffersReply",
        "offered",
    ),
    "overview": (
        "CostsReply",
        "JobsReply",
        "StatusReply",
        "WaitsReply",
        "costs_of",
        "jobs_of",
        "status_of",
        "waits",
    ),
    "submission": (
        "SubmitReply",
        "submitted",
    ),
    "teardown": (
        "TeardownReply",
        "torn_down",
    ),
}
"""The public names of this package, by the module that defines them."""


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
