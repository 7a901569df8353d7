"""The web pages for jobs, open approvals, billing and platforms. The server renders them; small scripts update them."""

from __future__ import annotations

from starlette.routing import BaseRoute

from gpuwarden.interfaces.http.serving import Serving


def routes(serving: Serving) -> list[BaseRoute]:
    """Return the page routes."""
    # Jinja and the templates are imported only if the pages are served.
    from gpuwarden.interfaces.http.pages.approving import approving_routes
    from gpuwarden.interfaces.http.pages.reading import reading_routes

    return [*reading_routes(serving), *approving_routes(serving)]
