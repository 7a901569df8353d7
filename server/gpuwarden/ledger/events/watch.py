"""Events from the watch: alerts that were raised, cleared, delivered or not delivered."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gpuwarden.ledger.events.base import Body


class AlertBody(Body):
    """Base class for events about raised and cleared alerts.

    `condition` is stored as `kind`. `mark` identifies the event that the alert reports, if any. `following`,
    stored as `next`, lists the next steps that the alert suggests.
    """

    condition: str = Field(validation_alias="kind", serialization_alias="kind")
    mark: str
    text: str
    following: tuple[dict[str, Any], ...] = Field(default=(), validation_alias="next", serialization_alias="next")


class AlertRaised(AlertBody):
    """A condition has lasted long enough to raise an alert."""

    event: Literal["alert.raised"] = "alert.raised"


class AlertCleared(AlertBody):
    """The condition of a raised alert no longer applies."""

    event: Literal["alert.cleared"] = "alert.cleared"


class AlertSent(Body):
    """A channel delivered an alert. `alert` is the number of the alert's event; both events have the same subject."""

    event: Literal["alert.sent"] = "alert.sent"
    alert: int
    channel: str


class AlertUnsent(Body):
    """A channel could not deliver an alert. `alert` is the number of the alert's event."""

    event: Literal["alert.unsent"] = "alert.unsent"
    alert: int
