"""A backend that applies a rehearsal cloud's faults to `submit`. Other calls are unchanged."""

from __future__ import annotations

from typing import Any, cast

from gpuwarden.backends.base import Backend
from gpuwarden.core.models import Handle, JobSpec, Place
from gpuwarden.rehearsal.cloud import Cloud


def lossy(backend: Backend, cloud: Cloud) -> Backend:
    """Return `backend` with a `submit` whose request or reply may be lost, depending on the cloud's faults."""
    return cast("Backend", _Lossy(backend, cloud))


class _Lossy:
    def __init__(self, backend: Backend, cloud: Cloud) -> None:
        self._backend = backend
        self._cloud = cloud

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def submit(self, spec: JobSpec, place: Place, token: str, **given: Any) -> Handle:
        with self._cloud.submitting():
            return await self._backend.submit(spec, place, token, **given)
