"""The distribution of files over threads, which leaves no thread idle."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from gpuwarden.checkpoints import scheduling
from gpuwarden.checkpoints.sealing import manifest
from gpuwarden.checkpoints.values import checksums, content_scan
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Manifest, Verdict
from wording import Wording


def names(*sizes: int) -> dict[str, int]:
    return {f"f{i}": size for i, size in enumerate(sizes)}


@pytest.mark.parametrize(
    ("sizes", "together"),
    [
        ((9,) * 16, []),  # sixteen equal shards: eight each
        ((100,), ["f0"]),  # one file: all threads
        ((10, 20, 1), ["f1", "f0"]),  # a model and an optimizer twice its size
        ((50, 50, 50), ["f0"]),  # one shared by all, then one each
        ((5, 1), []),  # too small to share
        ((), []),
    ],
)
def test_large_files_are_shared_by_idle_threads(sizes: tuple[int, ...], together: list[str]) -> None:
    assert scheduling.plan(names(*sizes), 2, 8)[0] == together
    assert scheduling.plan(names(*sizes), 1, 8)[0] == []


@given(st.lists(st.integers(0, 1000)), st.integers(1, 8), st.integers(0, 500))
@pytest.mark.slow
def test_every_file_is_scheduled_once(sizes: list[int], threads: int, least: int) -> None:
    together, apart = scheduling.plan(names(*sizes), threads, least)
    assert sorted(together + apart) == sorted(names(*sizes))
    assert [sizes[int(n[1:])] for n in apart] == sorted((sizes[int(n[1:])] for n in apart), reverse=True)


def test_sharing_a_lone_large_file_keeps_its_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr(content_scan, "SEGMENT", 1 << 16)
    values = np.random.default_rng(0).normal(size=(500, 1000)).astype("f4")
    save_file({"w": values, "half": values.astype("f2"), "z": np.zeros((64, 64), "f4")}, tmp_path / "a.safetensors")
    seen = set()
    report = verify(tmp_path / "a.safetensors", progress=lambda count: seen.add(threading.get_ident()))
    assert report.verdict is Verdict.PROVEN
    assert threading.get_ident() not in seen
    wording("\n".join(report.files[0].warnings))
    values[321, 7] = np.nan
    save_file({"w": values}, tmp_path / "a.safetensors")
    wording("\n".join(verify(tmp_path / "a.safetensors").files[0].problems), "1 NaN", "500,000")


def test_crcs_of_a_lone_large_archive_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr(content_scan, "SEGMENT", 1 << 16)
    np.savez(tmp_path / "a.npz", w=np.random.default_rng(0).normal(size=200_000), v=np.ones(9))
    wording("\n".join(verify(tmp_path / "a.npz").files[0].proved), "CRC", 2)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[1_000_000] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    wording(verify(tmp_path / "a.npz").files[0].problems[0], "CRC", "w.npy")


def test_the_manifest_source_decides_which_digest_is_compared(tmp_path: Path) -> None:
    save_file({"w": np.ones((4, 4), "f4")}, tmp_path / "a.safetensors")
    taken = manifest.take(tmp_path)
    listing = Manifest.model_validate(taken)
    compared = verify(tmp_path, Level.CONTENT, manifest=listing).files[0]
    assert compared.sealed and "sha256" in " ".join(compared.proved)
    manifest.write(tmp_path, taken)
    beside = next(f for f in verify(tmp_path).files if f.path == "a.safetensors")
    assert set(checksums.digests()) <= set(taken["files"][0])
    assert beside.sealed and checksums.digests()[-1] in " ".join(beside.proved)
