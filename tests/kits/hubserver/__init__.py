"""The rehearsal Hub for tests: seeded, on a free port, with replies checked against the published specs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from gpuwarden.core.clock import Clock
from gpuwarden.hub.client import HubConfig
from gpuwarden.rehearsal.hub.seed import TOKEN, seed
from gpuwarden.rehearsal.hub.server import VIEWER, HubServer

SPECS = os.environ.get("GPUWARDEN_SPECS")
STRANGER = "hf_strangerstrangerstranger00000000"
READER = "hf_readerreaderreaderreader00000000"


@contextmanager
def hub_server(
    root: Path, *, seeded: bool = True, check: bool = True, clock: Clock | None = None
) -> Iterator[HubServer]:
    """Run a Hub. If GPUWARDEN_SPECS is set, every reply on a described route must match its description."""
    server = HubServer(root, clock=clock, unsandboxed=True)
    checker = SpecCheck(server.app) if SPECS and check else None
    if checker:
        server.app = checker
    if seeded:
        seed(server.store)
    server.store.add_user(STRANGER, "stranger")
    server.store.add_user(READER, "reader", role="read")
    with server:
        yield server
    if checker:
        assert not checker.problems, checker.problems


def config(server: HubServer, token: str | None = TOKEN) -> HubConfig:
    """Return a client configuration for the Hub."""
    return HubConfig(server.url, server.viewer_url, token)


class SpecCheck:
    """ASGI middleware: validate JSON replies against the OpenAPI documents, and record the mismatches."""

    def __init__(self, app: Any) -> None:
        assert SPECS
        self.app = app
        self.hub, self.viewer = _spec("huggingface-hub"), _spec("dataset-viewer")
        self.table = _table()
        self.problems: list[str] = []
        self.checked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, start = bytearray(), {}

        async def keep(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif len(body) < 1_000_000:
                body.extend(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, keep)
        headers = {k.decode(): v.decode() for k, v in start.get("headers", ())}
        if scope["type"] == "http" and headers.get("content-type") == "application/json":
            self._validate(scope["method"].lower(), scope["path"], str(start["status"]), json.loads(bytes(body)))

    def _validate(self, method: str, path: str, status: str, answer: Any) -> None:
        import jsonschema

        if (schema := self._schema(method, path, status)) is None:
            return
        self.checked.append(f"{method} {path} {status}")
        validator = jsonschema.Draft202012Validator(schema)
        for error in list(validator.iter_errors(answer))[:3]:
            self.problems.append(f"{method} {path} {status}: {'/'.join(map(str, error.path))}: {error.message[:300]}")

    def _schema(self, method: str, path: str, status: str) -> Any:
        if path.startswith(VIEWER):
            operation = self.viewer["paths"].get(path.removeprefix(VIEWER), {}).get(method)
            response = (operation or {}).get("responses", {}).get(status)
            # The schemas of cells and features reject the description's own examples, so only the envelope is checked.
            loose = {**self.viewer["components"]["schemas"], "Cell": True, "Feature": True}
            wrap = {"components": {**self.viewer["components"], "schemas": loose}}
        else:
            found = next((p for regex, p in self.table if regex.fullmatch(path)), None)
            # The description of paths-info lacks fields that every client needs.
            if found is None or "paths-info" in found:
                return None
            response = self.hub["paths"][found].get(method, {}).get("responses", {}).get(status)
            wrap = {}
        content = (response or {}).get("content", {}).get("application/json", {})
        return {**content["schema"], **wrap} if "schema" in content else None


@cache
def _spec(name: str) -> Any:
    return json.loads((Path(SPECS or "") / f"{name}.openapi.json").read_text())


@cache
def _table() -> list[tuple[re.Pattern[str], str]]:
    # Paths with fewer placeholders first, so that jobs match before a repo of any name.
    return [(_regex(p), p) for p in sorted(_spec("huggingface-hub")["paths"], key=lambda p: p.count("{"))]


def _regex(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path)))
