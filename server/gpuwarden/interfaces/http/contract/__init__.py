"""The API for trainers' metrics and alerts, for deployments, and for job events."""

from __future__ import annotations

from starlette.routing import BaseRoute

from gpuwarden.interfaces.http.contract import events, reporting, training
from gpuwarden.interfaces.http.serving import Serving


def routes(serving: Serving) -> list[BaseRoute]:
    """Return the API routes."""
    return [*reporting.routes(serving), *training.routes(serving), *events.routes(serving)]
