"""Answer posts of metrics with Starlette alone: the peer of `bench/metrics.py`, which stores nothing."""

from __future__ import annotations

import socket

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


async def count(request: Request) -> Response:
    """Parse the body, as any server must, and return the number of its values."""
    body = await request.json()
    return JSONResponse({"stored": sum(len(point) for point in body["metrics"])})


def main() -> None:
    """Serve on a free port of the loopback, and print it."""
    app = Starlette(routes=[Route("/api/training/local/metrics", count, methods=["POST"])])
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main()
