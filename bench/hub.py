"""Measure the verification of 50 repos at 50 ms of simulated latency, against a loop over the client library.

    python bench/hub.py [--repos 50] [--rounds 3]

Prints seconds and requests, with their ratios. Both sides look up the same repos. Two of them do not exist; ours also
ranks suggestions for those.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._figures import arguments, figure

LATENCY_S = 0.05


def main() -> None:
    """Measure, and print the figures."""
    asked = arguments(__doc__, {"repos": (50, 10), "rounds": (3, 1)})
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("HF_HOME", tempfile.mkdtemp())
    from gpuwarden.rehearsal.hub.seed import TOKEN
    from gpuwarden.rehearsal.hub.server import HubServer

    with tempfile.TemporaryDirectory() as root, HubServer(Path(root)) as server:
        server.store.add_user(TOKEN, "rehearsal")
        ids = [f"bench/model-{n}" for n in range(asked.repos)]
        for repo_id in ids[2:]:
            server.store.put("model", repo_id, {"config.json": "{}", "model.bin": b"x" * 100})
        server.conditions.latency_s = LATENCY_S
        loop, loop_requests = _measure(server, lambda: _loop(server, ids), asked.rounds)
        ours, our_requests = _measure(server, lambda: _ours(server, ids), asked.rounds)
    what, peer = f"{asked.repos} repos at {LATENCY_S * 1000:.0f} ms of latency", "one after another"
    figure(f"{what}, best of {asked.rounds}", f"{ours:.2f} s", f"{peer} {loop:.2f} s", ours / loop)
    figure("  requests", str(our_requests), f"{peer} {loop_requests}", our_requests / loop_requests)


def _measure(server, call, rounds: int) -> tuple[float, int]:  # type: ignore[no-untyped-def]
    best, requests = float("inf"), 0
    for _ in range(rounds):
        server.conditions.requests.clear()
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        requests = len(server.conditions.requests)
    return best, requests


def _loop(server, ids: list[str]) -> None:  # type: ignore[no-untyped-def]
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api, found = HfApi(endpoint=server.url, token=next(iter(server.store.users))), 0
    for repo_id in ids:
        try:
            api.model_info(repo_id)
            found += 1
        except RepositoryNotFoundError:
            pass
    assert found == len(ids) - 2


def _ours(server, ids: list[str]) -> None:  # type: ignore[no-untyped-def]
    from gpuwarden.hub.client import HubClient, HubConfig
    from gpuwarden.hub.details import repo_details

    async def run() -> None:
        config = HubConfig(server.url, server.viewer_url, next(iter(server.store.users)))
        statuses: list[str] = []

        async def batch(some: list[str]) -> None:
            statuses.extend(r.status for r in (await repo_details(some, "model", hub=hub)).repos)

        async with HubClient(config, concurrency=16) as hub, anyio.create_task_group() as group:
            for n in range(0, len(ids), 10):
                group.start_soon(batch, ids[n : n + 10])
        assert statuses.count("ok") == len(ids) - 2
        assert statuses.count("missing") == 2

    anyio.run(run)


if __name__ == "__main__":
    main()
