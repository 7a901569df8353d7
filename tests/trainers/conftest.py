"""Trainer runs, in a separate folder for each test."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from real_parts import need
from trainer_kit import Trainers


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    for name in ("torch", "transformers", "trl", "peft", "datasets", "accelerate"):
        need(name, importlib.util.find_spec(name) is not None)
    made = Trainers(tmp_path_factory.mktemp("trainers"))
    yield made
    made.close()


@pytest.fixture
def trainers(started: Trainers, tmp_path: Path) -> Trainers:
    (tmp_path / "empty.jsonl").touch()
    return started.at(tmp_path)
