"""Routes that refuse query parameters and JSON body fields outside the Hub's API description.

An emulator that ignored unknown parameters would hide a client's mistake.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gpuwarden.rehearsal.hub.access import HubError

Endpoint = Callable[[Request], Awaitable[Response]]
Body = TypeVar("Body", bound="StrictBody")


class StrictBody(BaseModel):
    """The base class for request bodies. A field that is not in the API description is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


def route(
    path: str, endpoint: Endpoint, *, methods: list[str] | None = None, query: Iterable[str] = (), fields: str = ""
) -> Route:
    """Return a route that returns 400 for an unlisted query parameter or JSON body field."""
    allowed, known = frozenset(query), frozenset(fields.split())

    async def checked(request: Request) -> Response:
        if odd := sorted(set(request.query_params) - allowed):
            return _refusal(f"Unrecognized query parameters: {', '.join(odd)}")
        if known:
            body = await request.json()
            if not isinstance(body, dict):
                return _refusal("Expected object")
            if odd := sorted(set(body) - known):
                return _refusal(f"Unrecognized keys in object: {', '.join(odd)}")
        return await endpoint(request)

    return Route(path, checked, methods=methods)


def parsed(model: type[Body], value: Any) -> Body:
    """Validate a request body and return it as a `model`. Raises HubError with the first mismatch."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise HubError(400, f"{where}: {first['msg']}") from None


def _refusal(message: str) -> Response:
    return JSONResponse({"error": message}, 400, {"X-Error-Message": message})
