"""The scripts, the styles and the icon, each read once, and the security headers for the pages."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from gpuwarden.core.errors import NotFound
from gpuwarden.interfaces.http.pages.rendering import HERE

TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
HEADERS: Final = {
    # No inline script or style, no resources from other servers, and no markup from text in scripts.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-embedder-policy": "require-corp",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


@cache
def files() -> dict[str, tuple[bytes, str, str]]:
    """Return the content, the type and the digest of each file, keyed by its path. Other paths are not served."""
    folder = HERE / "static"
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in TYPES:
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:32]
            found[path.relative_to(folder).as_posix()] = (content, TYPES[path.suffix], f'"{digest}"')
    return found


async def static_file(request: Request) -> Response:
    """GET one file. A browser that already has the file revalidates its copy."""
    known = files().get(request.path_params["path"])
    if known is None:
        raise NotFound("this file does not exist")
    content, kind, tag = known
    headers = {"etag": tag, "cache-control": "no-cache", "content-type": kind}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)
