"""The page: running jobs, open questions and billing, rendered here and updated in place by small scripts."""

from __future__ import annotations

from starlette.routing import BaseRoute

from gpuwarden.interfaces.http.serving import Serving


def routes(serving: Serving) -> list[BaseRoute]:
    """Return the routes of the page."""
    # Import Jinja and the templates only if the page is served.
    from gpuwarden.interfaces.http.pages.approving import approving_routes
    from gpuwarden.interfaces.http.pages.reading import reading_routes

    return [*reading_routes(serving), *approving_routes(serving)]
