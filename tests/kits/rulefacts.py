"""Facts for tests of the submit rules: a rented machine with a price, a healthy job, and the Hub's replies."""

from __future__ import annotations

import json
from typing import Any

from gpuwarden.core.models import JobSpec, Known, Quote
from gpuwarden.core.policy import Policy
from gpuwarden.hub.client import HubConfig
from gpuwarden.hub.preflight_facts import hub_facts
from gpuwarden.lifecycle.submission.facts import read_spec
from gpuwarden.profiles import load_profile
from gpuwarden.rehearsal.hub.seed import TOKEN as HF_TOKEN
from gpuwarden.rehearsal.hub.store import HubStore
from gpuwarden.rules.facts import SubmitFacts

__all__ = ["HF_TOKEN", "facts_for", "seed_for_rules"]


async def facts_for(
    script: str | None, *, hub: HubConfig, platform: str = "runpod", proven: bool = False, **spec: Any
) -> SubmitFacts:
    """Return the facts of one job, as the submit gate collects them."""
    job = JobSpec(name="t", platform=platform, script=script, **spec)
    read, script_url = await read_spec(job, lambda: hub)
    profile = load_profile(platform, None)
    return SubmitFacts(
        spec=job,
        policy=Policy(),
        profile=profile,
        platforms=(platform,),
        script=read,
        quote=Known(Quote(platform=platform, price_usd_per_hour=1.5, source="test", at=0.0)),
        hub=await hub_facts(read, job, lambda: hub),
        proven_script=proven,
        script_url=script_url,
    )


def seed_for_rules(store: HubStore) -> None:
    """Add the repos that the corpus needs in addition to the demo's."""
    rows = "\n".join(json.dumps({"question": "q", "chosen_response": "a", "rejected_response": "b"}) for _ in range(3))
    store.put("dataset", "rehearsal/pairs-other-names", {"train.jsonl": rows})
    line = json.dumps({"text": "x"})
    store.put("dataset", "rehearsal/two-configs", {"en/train.jsonl": line, "de/train.jsonl": line})
    triple = json.dumps({"anchor": "a", "positive": "b", "negative": "c"})
    store.put("dataset", "rehearsal/triples", {"train.jsonl": triple})
    card = "---\nbase_model: Qwen/Qwen2.5-0.5B\n---\n"
    adapter = {"adapter_config.json": "{}", "adapter_model.safetensors": b"x", "README.md": card}
    store.put("model", "rehearsal/qwen-capybara-lora", adapter)
