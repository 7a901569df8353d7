"""All ledger events: frozen models, each with a version.

`decode` reads a stored body. A body from an older version is first converted to the current version. An event of an
unknown kind is `Unrecognized` and changes no record.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from gpuwarden.ledger.events.approval_code import *
from gpuwarden.ledger.events.base import Body as Body
from gpuwarden.ledger.events.base import Unrecognized as Unrecognized
from gpuwarden.ledger.events.fan_out import *
from gpuwarden.ledger.events.job import *
from gpuwarden.ledger.events.lease import *
from gpuwarden.ledger.events.passkey import *
from gpuwarden.ledger.events.rehearsal import *
from gpuwarden.ledger.events.teardown import *
from gpuwarden.ledger.events.watch import *


def _stored(body: type[Body]) -> Iterator[type[Body]]:
    """Yield the subclasses whose events are stored: those with a field `event`."""
    for model in body.__subclasses__():
        if "event" in model.model_fields:
            yield model
        yield from _stored(model)


BODIES: Final[dict[str, type[Body]]] = {model.kind(): model for model in _stored(Body)}
"""Maps each stored kind to its model."""


@cache
def kinds_of(body: type[Body]) -> frozenset[str]:
    """Return the stored kinds of a model and of its subclasses."""
    return frozenset(kind for kind, model in BODIES.items() if issubclass(model, body))


def decode(kind: str, version: int, body: dict[str, Any]) -> Body:
    """Read a stored body. Raises ValueError if it is invalid or has a newer version."""
    model = BODIES.get(kind)
    if model is None:
        return Unrecognized()
    if version > model.VERSION:
        raise ValueError(f"{kind} has version {version}, but this gpuwarden supports versions up to {model.VERSION}")
    return model.model_validate(model.upcast(version, body) if version < model.VERSION else body)
