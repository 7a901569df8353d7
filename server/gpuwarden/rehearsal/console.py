"""The provider's console in a simulated scenario, for evaluations and drills. It controls rehearsal clouds and a Hub,
and shows the bills.

The console reads and writes one JSON object per line. Like a provider's command line, it has no gates and reports the
true state. It can't access a real account, because all its clouds are rehearsal clouds.

    {"do": "configure", "platform": P, "settings": {...}, "faults": [...]}
    {"do": "create", "platform": P, "label": L, "gpu": G, "interruptible": B, "durable": B}
    {"do": "list" | "quote", "platform": P}
    {"do": "get" | "start" | "stop" | "terminate" | "preempt", "platform": P, "id": I}
    {"do": "books", "platform": P}             every instance that ever existed, and its cost
    {"do": "hub", "root": R, "repos": [...]}   serve a Hub; returns the environment for its clients
    {"do": "ledger"}                           the server's ledger, as `gpuwarden history --json` prints it
    {"do": "halt", "platform": P}              kill every process of every instance
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from gpuwarden.core.errors import BadRequest, Unreachable, WardenError
from gpuwarden.core.models import Answer, Resources, Unknown
from gpuwarden.rehearsal import processes
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Fault, Faults, Settings

Order = dict[str, Any]
TOKEN = "hf_worldworldworldworldworldworld0"  # noqa: S105  (valid only for the simulated Hub)


class Console:
    """The console of one scenario. `cloud` returns a platform's rehearsal cloud by name, and `ledger` returns the
    server's events so far.
    """

    def __init__(self, cloud: Callable[[str], Cloud], ledger: Callable[[], list[dict[str, Any]]]) -> None:
        self._cloud = cloud
        self._ledger = ledger
        self._open = ExitStack()

    def serve(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the reply to each line. The Hub, if one was started, stops after the last line."""
        with self._open:
            for line in lines:
                if not line.strip():
                    continue
                try:
                    order = json.loads(line)
                    act = getattr(self, f"_do_{order['do']}")
                    answer = {"ok": True, "value": act(order)}
                except WardenError as error:
                    answer = error.as_dict()
                except ValidationError as error:
                    message = error.errors()[0]["msg"]
                    answer = BadRequest(f"invalid arguments: {message}").as_dict()
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    answer = BadRequest(f"unknown request: {error!r}"[:300]).as_dict()
                yield json.dumps(answer)

    def _do_configure(self, order: Order) -> None:
        faults = Faults(faults=tuple(Fault(**f) for f in order.get("faults", ())))
        self._cloud(order["platform"]).configure(Settings(**order.get("settings", {})), faults)

    def _do_create(self, order: Order) -> Any:
        wanted = Resources(
            gpu=order.get("gpu"),
            interruptible=bool(order.get("interruptible")),
            durable_storage=bool(order.get("durable")),
        )
        return _value(self._cloud(order["platform"]).create(wanted, str(order["label"])))

    def _do_quote(self, order: Order) -> Any:
        return _value(self._cloud(order["platform"]).quote(Resources(gpu=order.get("gpu"))))

    def _do_list(self, order: Order) -> Any:
        return _value(self._cloud(order["platform"]).list())

    def _do_get(self, order: Order) -> Any:
        return _value(self._cloud(order["platform"]).get(order["id"]))

    def _do_start(self, order: Order) -> Any:
        return _value(self._cloud(order["platform"]).start(order["id"]))

    def _do_stop(self, order: Order) -> Any:
        return _value(self._cloud(order["platform"]).stop(order["id"]))

    def _do_terminate(self, order: Order) -> Any:
        return _value(self._cloud(order["platform"]).terminate(order["id"]))

    def _do_preempt(self, order: Order) -> None:
        self._cloud(order["platform"]).preempt(order["id"])

    def _do_books(self, order: Order) -> list[dict[str, Any]]:
        cloud = self._cloud(order["platform"])
        rows = []
        for id, truth in cloud.truths().items():  # noqa: A001
            record = cloud.store.state().records[id]
            rows.append(
                {
                    **truth.model_dump(mode="json"),
                    "label": record.token,
                    "created_at": record.created_at,
                    "since": record.since,
                    "fs": str(cloud.root / "instances" / id),
                }
            )
        return rows

    def _do_ledger(self, _: Order) -> list[dict[str, Any]]:
        return self._ledger()

    def _do_halt(self, order: Order) -> None:
        for id in self._cloud(order["platform"]).truths():  # noqa: A001
            processes.kill(id)

    def _do_hub(self, order: Order) -> dict[str, str]:
        from gpuwarden.rehearsal.hub.seed import furnish
        from gpuwarden.rehearsal.hub.server import HubServer

        hub = self._open.enter_context(HubServer(Path(order["root"])))
        furnish(hub.store, order.get("repos", []), TOKEN)
        return {**hub.env, "HF_TOKEN": TOKEN}


def _value(answer: Answer[Any]) -> Any:
    if isinstance(answer, Unknown):
        raise Unreachable(answer.why)
    value = answer.value
    return [_row(v) for v in value] if isinstance(value, tuple) else _row(value)


def _row(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value
