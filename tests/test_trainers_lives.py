"""Whole lives of the trainers over the rehearsal: rented, trained as a real process, taken away, resumed, pulled, proven,
torn down.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from conftest import need
from gpuwarden.core.models import JobSpec, Level, Verdict
from gpuwarden.core.policy import Approval, Local
from gpuwarden.core.states import TERMINAL_JOBS, Job, Teardown
from gpuwarden.lifecycle.artifacts.pull import PullResult, pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.ending.teardown import approve, proceed, request
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.rehearsal.cloud import Cloud
from lifecycle_kit import PLATFORM, WEALTHY, JumpingClock, launch, open_house, promises, records, rent_cloud
from trainer_kit import FAULTS, NEEDS, PICTURES, SCRIPTS, TEXTS, flags_of, jsonl, language_model, model_for, rows_for

pytestmark = [pytest.mark.prove, pytest.mark.anyio]
STEPS, EVERY, HELD = 8, 2, 5
LIBRARIES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate")
# Each life starts the libraries twice. Those below run always, the others with GPUWARDEN_LIVES=all.
ALWAYS = ("sft", "dpo", "grpo", "object_detection")
METHODS = [m for m in (*TEXTS, *NEEDS) if m in ALWAYS or os.environ.get("GPUWARDEN_LIVES") == "all"]
