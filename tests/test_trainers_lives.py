"""Whole lives of the trainers over the rehearsal: rented, trained as a real process, taken away, resumed, pulled, proven,
torn down.
"""

from __future__ import annotations

import os

import pytest

from trainer_kit import NEEDS, TEXTS

pytestmark = [pytest.mark.prove, pytest.mark.anyio]
STEPS, EVERY, HELD = 8, 2, 5
LIBRARIES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate")
# Each life starts the libraries twice. Those below run always, the others with GPUWARDEN_LIVES=all.
ALWAYS = ("sft", "dpo", "grpo", "object_detection")
METHODS = [m for m in (*TEXTS, *NEEDS) if m in ALWAYS or os.environ.get("GPUWARDEN_LIVES") == "all"]
