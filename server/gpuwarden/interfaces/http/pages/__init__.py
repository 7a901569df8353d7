"""The web page with running jobs, open questions and billing. It is rendered here and updated by small scripts."""

from __future__ import annotations

from starlette.routing import BaseRoute

from gpuwarden.interfaces.http.serving import Serving


def routes(serving: Serving) -> list[BaseRoute]:
    """Return the routes for the page."""
    # Jinja and the templates are imported only if the page is served.
    from gpuwarden.interfaces.http.pages.approving import approving_routes
    from gpuwarden.interfaces.http.pages.reading import reading_routes

    return [*reading_routes(serving), *approving_routes(serving)]
