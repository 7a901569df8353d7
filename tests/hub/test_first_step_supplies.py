"""A rehearsal's supplies from the rehearsal Hub over HTTP: configs, tokenizers and rows, but no weights."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from doors import quick_warden
from first_step_kit import SCRIPTS, config_of, tokenizer_files
from gpuwarden.core.models import JobSpec
from gpuwarden.core.policy import Local, Policy
from gpuwarden.hub import first_step_supplies
from gpuwarden.hub.client import HubConfig
from gpuwarden.hub.first_step_supplies import MOST_OF_ROWS, MOST_REPOS, MOST_ROWS, Supplies, bring
from gpuwarden.lifecycle.submission.rehearsing import rehearse_script
from gpuwarden.rehearsal.hub.seed import TOKEN
from gpuwarden.rehearsal.hub.server import HubServer
from gpuwarden.remote.first_step.start import Limits, Order, rehearse
from gpuwarden.remote.sandbox import detect
from gpuwarden.remote.sandbox.words import Kind
from gpuwarden.static_analysis.hub_references import RepoUse
from gpuwarden.static_analysis.script import read_script
from hubserver import STRANGER, config, hub_server
from real_parts import need

pytestmark = pytest.mark.anyio
ROW = {"question": "2 + 3?", "answer": "5", "level": 1}


def furnish(server: HubServer) -> None:
    """Add a model with weights, code and other files, and a dataset with two configs, to a Hub."""
    store = server.store
    store.put("model", "rehearsal/net", {
        "config.json": '{"model_type": "llama"}', "tokenizer.json": "{}" + " " * (11 << 20), "tokenizer.model": b"\0sp",
        "unet/config.json": "{}", "modeling_net.py": "x = 1", "README.md": "# net", "model.safetensors": b"\0" * 64,
        "model.safetensors.index.json": "{}", "trainer_state.json": "{}",
    }, private=True)  # fmt: skip
    lines = "\n".join(json.dumps(ROW | {"level": n}) for n in range(30))
    files = {f"{c}/{s}.jsonl": lines for c in ("main", "socratic") for s in ("train", "test")}
    store.put("dataset", "rehearsal/sums", files)


async def brought(server: HubServer, script: str, token: str | None = TOKEN) -> Supplies:
    return await bring(read_script(script).uses.repos, config(server, token))


SCRIPT = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("rehearsal/net")
rows = load_dataset("rehearsal/sums", "main", split="train")
other = load_dataset("nobody/nothing")
"""


async def test_configs_tokenizers_and_code_are_fetched_without_weights(tmp_path: Path) -> None:
    with hub_server(tmp_path) as server:
        furnish(server)
        found = await brought(server, SCRIPT)
    small = {"config.json", "tokenizer.json", "tokenizer.model", "unet/config.json", "modeling_net.py"}
    assert set(found.models) == {"rehearsal/net"} and set(found.models["rehearsal/net"]) == small
    assert found.models["rehearsal/net"]["tokenizer.model"] == b"\0sp"
    assert len(found.models["rehearsal/net"]["tokenizer.json"]) > 11 << 20  # an LFS file


async def test_rows_are_fetched_with_configs_splits_and_types(tmp_path: Path) -> None:
    with hub_server(tmp_path) as server:
        furnish(server)
        found = await brought(server, SCRIPT)
    assert set(found.datasets) == {"rehearsal/sums"}
    configs: dict[str, Any] = found.datasets["rehearsal/sums"]["configs"]
    assert {c: sorted(a["splits"]) for c, a in configs.items()} == {c: ["test", "train"] for c in ("main", "socratic")}
    train = configs["main"]["splits"]["train"]
    assert train["rows"] == [ROW | {"level": n} for n in range(MOST_ROWS)]
    assert set(train["features"]) == set(ROW) and train["features"]["level"]["_type"] == "Value"


async def test_unreadable_repos_are_left_out(tmp_path: Path) -> None:
    with hub_server(tmp_path) as server:
        furnish(server)
        found = await brought(server, SCRIPT, STRANGER)
        anonymous = await brought(server, SCRIPT, None)
    assert not found.models and not anonymous.models and set(found.datasets) == {"rehearsal/sums"}


async def test_old_name_fetches_the_renamed_repo(tmp_path: Path) -> None:
    with hub_server(tmp_path) as server:
        text = "from transformers import AutoModel\nfrom datasets import load_dataset\n"
        found = await brought(server, f"{text}AutoModel.from_pretrained('gpt2')\nload_dataset('imdb')\n")
    assert "config.json" in found.models["gpt2"] and found.datasets["imdb"]["configs"]["default"]["splits"]["train"]


@pytest.mark.slow
async def test_unreachable_hub_yields_no_supplies(tmp_path: Path) -> None:
    with hub_server(tmp_path) as server:
        gone = config(server)
    found = await bring(read_script(SCRIPT).uses.repos, gone)
    assert found == Supplies()


class Liar(BaseHTTPRequestHandler):
    """A mirror whose answers are wrong: files without content, a file that never ends, odd names and rows."""

    asked: ClassVar[list[str]] = []
    SIZES: ClassVar[dict[str, int]] = {
        "config.json": 2, "config.json/a.json": 2, "gone.json": 2, "grows.json": 2, "a #b.json": 2, "minus.json": -5,
    }  # fmt: skip

    def log_message(self, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer the Hub requests that fetch supplies."""
        self.asked.append(self.path)
        if self.path.startswith("/api/models/"):
            sizes = {} if "empty/" in self.path else self.SIZES
            files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            about = {"id": self.path.split("?")[0].removeprefix("/api/models/"), "sha": "main", "siblings": files}
            self.send(200, json.dumps(about).encode())
        elif "slow/" in self.path:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(b" ")
                    time.sleep(0.02)
        elif "gone.json" in self.path:
            self.send(404, b"")
        else:
            self.send(200, b"x" * (65 << 20) if "grows.json" in self.path else b"{}")

    def send(self, status: int, content: bytes) -> None:
        """Send one response."""
        self.send_response(status)
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(content)


@pytest.fixture(name="liar")
def liar_fixture() -> Iterator[HubConfig]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        server.daemon_threads, server.block_on_close = True, False
        Liar.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        yield HubConfig(address, address, None)
        server.shutdown()


def loading(*names: str) -> list[RepoUse]:
    return [RepoUse(name, "model", 1, "model") for name in names]


@pytest.mark.slow
async def test_endless_file_does_not_block_a_rehearsal(liar: HubConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_step_supplies, "PATIENCE_S", 3.0)
    found = await bring(loading("slow/net", "quick/net"), liar)
    assert set(found.models) <= {"quick/net"}


@pytest.mark.slow
async def test_unavailable_files_are_left_out_and_names_are_percent_encoded(liar: HubConfig) -> None:
    found = (await bring(loading("quick/net"), liar)).models["quick/net"]
    assert set(found) == {"config.json", "config.json/a.json", "a #b.json", "minus.json"}
    assert "/quick/net/resolve/main/a%20%23b.json" in Liar.asked


@pytest.mark.slow
async def test_number_of_fetched_repos_is_bounded(liar: HubConfig) -> None:
    await bring(loading(*(f"empty/net{n}" for n in range(60))), liar)
    assert len([path for path in Liar.asked if path.startswith("/api/models/")]) == MOST_REPOS


def test_names_that_are_a_file_and_a_folder_at_once_do_not_end_a_rehearsal() -> None:
    need("bubblewrap", detect.detect().kind is Kind.BUBBLEWRAP)
    files = {"config.json": b"{}", "config.json/a.json": b"{}", "b/c.json": b"{}", "b": b"{}"}
    outcome = rehearse(Order("raise KeyError", models={"o/net": files}), sys.executable, (), Limits(seconds=60))
    assert outcome.message == "KeyError", outcome


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"features": [], "rows": ["x"]},
        {"features": [], "rows": [None]},
        {"features": [{"name": "a"}], "rows": [{"row": {"a": 1}}]},
        {"features": 1, "rows": [{"row": {"a": 1}}]},
        {"features": [], "rows": [{"row": "x"}]},
        {"features": [], "rows": [{"row": {"a": "x" * MOST_OF_ROWS}}]},
    ],
)
def test_rows_of_an_unexpected_shape_or_size_are_left_out(said: dict[str, Any]) -> None:
    assert first_step_supplies._rows(said) is None


def test_total_size_of_cached_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / f"{name}.json").write_bytes(b" " * 60)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **more: str(tmp_path))
    monkeypatch.setattr(first_step_supplies, "MOST_BYTES", 150)
    assert set(first_step_supplies._cached("o/net")) == {"a.json", "b.json"}


@pytest.mark.prove
@pytest.mark.real
@pytest.mark.parametrize(("change", "outcome"), [(("", ""), "passed"), (('["answer"]', '["anwser"]'), "fault")])
async def test_script_is_rehearsed_with_supplies_fetched_over_http(
    tmp_path: Path, change: tuple[str, str], outcome: str
) -> None:
    need("bubblewrap", detect.detect().kind is Kind.BUBBLEWRAP)
    need("torch and transformers", all(map(importlib.util.find_spec, ("torch", "transformers", "datasets"))))
    text = (SCRIPTS / "adapter_loop.py").read_text(encoding="utf-8")
    text = text.replace('"tatsu-lab/alpaca"', '"rehearsal/sums", "main"')
    text = text.replace('row["instruction"]', 'row["question"]').replace('row["output"]', 'row["answer"]')
    assert change[0] in text
    with hub_server(tmp_path / "hub", check=False) as server:
        furnish(server)
        names = [use.id for use in read_script(text).uses.repos if use.type == "model"]
        for name in names:
            server.store.put("model", name, {"config.json": json.dumps(config_of(name)), **tokenizer_files()})
        reached = {"HF_ENDPOINT": server.url, "GPUWARDEN_DATASET_VIEWER": server.viewer_url, "HF_TOKEN": TOKEN}
        ctx = quick_warden(tmp_path / "home", **reached)
        ctx.policy = Policy(local=Local(rehearse="allow"))
        spec = JobSpec(name="t", platform="local", script=text.replace(*change), outputs=("out",))
        found = (await rehearse_script(ctx, spec)).outcome
    assert found.outcome == outcome, found
    print(found)
    assert "64" in found.substitutes["dataset rehearsal/sums"], "rows of the viewer"
