"""Read the bodies of requests. `Guard` limits their size."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from gpuwarden.core.errors import BadRequest


async def json_object(request: Request) -> dict[str, Any]:
    """Return the JSON object in a request. Raises BadRequest."""
    try:
        found = json.loads(await request.body())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadRequest("the body is not a JSON object")
    return found
