"""The knowledge over MCP with a real client: search, diagnosis, resources, the skills extension, and prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS

from doors import quick_warden
from gpuwarden.data import data_dir
from gpuwarden.frontmatter import read_front_matter
from gpuwarden.interfaces.mcp.live import JOB_TEMPLATE
from gpuwarden.interfaces.mcp.resources import ENTRY_TEMPLATE, FILLED_URI, PROFILE_TEMPLATE
from gpuwarden.interfaces.mcp.server import make_server
from gpuwarden.knowledge import shipped
from gpuwarden.lifecycle.context import Context
from hubserver import hub_server
from rulefacts import HF_TOKEN
from talk_kit import ask
from wording import Wording

pytestmark = pytest.mark.anyio

ERAS = ["legacy", "2026-07-28"]
EXTENSION = "io.modelcontextprotocol/skills"


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return quick_warden(tmp_path / "home")


@asynccontextmanager
async def client_of(ctx: Context, mode: str) -> AsyncIterator[Client]:
    async with Client(make_server(ctx), mode=mode) as client:
        yield client


async def look_up(client: Client, query: str, **more: Any) -> dict[str, Any]:
    result = await client.call_tool("search_references", {"query": query, **more})
    assert result.structured_content is not None
    return result.structured_content


# ------------------------------------------------------------------------------------------------------- resources


@pytest.mark.parametrize("mode", ERAS)
async def test_every_page_profile_and_skill_file_is_a_resource(ctx: Context, mode: str) -> None:
    async with client_of(ctx, mode) as client:
        listed = {r.uri: r for r in (await client.list_resources()).resources}
        for kind in ("references", "profiles"):
            for file in data_dir(kind).rglob("*.md"):  # type: ignore[arg-type]
                resource = listed[f"gpuwarden://{kind}/{file.relative_to(data_dir(kind)).as_posix()}"]  # type: ignore[arg-type]
                assert resource.mime_type == "text/markdown" and resource.size == file.stat().st_size
                front = read_front_matter(file.read_text("utf-8"), name=file.name).data
                assert resource.title == front["title"]
        for file in data_dir("skills").glob("*/scripts/*.*"):
            resource = listed[f"skill://{file.relative_to(data_dir('skills')).as_posix()}"]
            assert resource.mime_type in {"text/x-python", "text/x-shellscript"}
        assert len({r.name for r in listed.values()}) == len(listed)
        for resource in listed.values():
            (content,) = (await client.read_resource(resource.uri)).contents
            assert len(content.text.encode()) == resource.size  # type: ignore[union-attr]
            assert content.mime_type == resource.mime_type


@pytest.mark.parametrize("mode", ERAS)
@pytest.mark.parametrize(
    "uri",
    [
        "gpuwarden://references/nowhere.md",
        "gpuwarden://profiles/../../pyproject.toml",
        "gpuwarden://references/%2e%2e/pyproject.toml",
        "skill://gpu-training/../../../etc/passwd",
        "file:///etc/passwd",
        "gpuwarden://entries/NO-001",
        "gpuwarden://entries/..%2f..%2fetc",
        "gpuwarden://entries/" + "A" * 5_000,
    ],
)
async def test_unknown_resource_is_an_invalid_params_error(ctx: Context, mode: str, uri: str) -> None:
    async with client_of(ctx, mode) as client:
        with pytest.raises(MCPError) as error:
            await client.read_resource(uri)
    assert error.value.error.code == INVALID_PARAMS


@pytest.mark.parametrize("mode", ERAS)
async def test_each_entry_is_its_own_resource(ctx: Context, mode: str) -> None:
    async with client_of(ctx, mode) as client:
        templates = (await client.list_resource_templates()).resource_templates
        assert {t.uri_template for t in templates} == {ENTRY_TEMPLATE, PROFILE_TEMPLATE, JOB_TEMPLATE, FILLED_URI}
        for key in ("OOM-001", "ckpt-002", "PLAT-001"):
            (content,) = (await client.read_resource(f"gpuwarden://entries/{key}")).contents
            entry = shipped().gotcha(key)
            text = content.text  # type: ignore[union-attr]
            assert text.startswith(f"## {entry.id} · {entry.title}\n") and text.count("```yaml gotcha") == 1
            assert f"gpuwarden://references/{entry.page}" in text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ERAS)
async def test_template_resource_is_filled_for_a_model_and_a_dataset(ctx: Context, mode: str, tmp_path: Path) -> None:
    with hub_server(tmp_path / "hub") as server:
        ctx.env = {**ctx.env, **server.env, "HF_TOKEN": HF_TOKEN}
        async with client_of(ctx, mode) as client:

            async def read(uri: str) -> str:
                (content,) = (await client.read_resource(uri)).contents
                return str(content.text)  # type: ignore[union-attr]

            page = await read("gpuwarden://templates/ppo")
            assert page.startswith("# Template rloo") and "1.16" in page and "| reward | '' |" in page
            asked = "model=Qwen/Qwen2.5-0.5B-Instruct&dataset=trl-lib/DeepMath-103K&platform=rehearsal/runpod"
            filled = await read(f"gpuwarden://templates/grpo?{asked}")
            reply = json.loads(filled.partition("```json\n")[2].partition("\n```")[0])
            assert reply["submit"]["args"][-4:] == ["--reward", "answer", "--columns", "solution=answer"]
            assert reply["submit"]["script"] == "gpuwarden://templates/grpo"
            for wrong in ("nothing", "grpo?model=no/such", "dpo?dataset=trl-lib/tldr", "sft?dataset=/etc/passwd.json"):
                with pytest.raises(MCPError):
                    await read(f"gpuwarden://templates/{wrong}")


async def test_template_is_submitted_by_its_uri(ctx: Context) -> None:
    given = {"script": "gpuwarden://templates/sft", "platform": "rehearsal/vastai", "args": ["--model", "a"]}
    async with client_of(ctx, "2026-07-28") as client:
        told = await client.call_tool("submit_job", {**given, "dry_run": True})
        # The gate has read the script: the dataset is missing or, without uv, packages from its header are.
        assert any(word in str(told.structured_content) for word in ("PF-API-005", "the script's header asks for"))
        told = await client.call_tool("submit_job", {**given, "script": "gpuwarden://templates/sftt", "dry_run": True})
        assert told.structured_content and told.structured_content["code"] == "not_found"


async def test_lists_can_be_cached(ctx: Context) -> None:
    async with client_of(ctx, "2026-07-28") as client:
        answers = [await client.list_tools(), await client.list_prompts(), await client.list_resources()]
        assert all(a.ttl_ms and a.ttl_ms > 0 for a in answers)
        assert [a.cache_scope for a in answers] == ["public", "public", "private"]


async def test_user_profile_is_served_and_takes_precedence(ctx: Context, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    text = (data_dir("profiles") / "local.md").read_text("utf-8")
    (own / "local.md").write_text(text.replace("title: ", "title: Mine, "), "utf-8")
    (own / "broken.md").write_text("no front matter", "utf-8")
    (own / "binary.md").write_bytes(b"\xff\xfe\x00")
    (own / "link.md").symlink_to("/etc/passwd")
    ctx.own_profiles = own
    async with client_of(ctx, "2026-07-28") as client:
        listed = {r.uri: r for r in (await client.list_resources()).resources}
        assert (listed["gpuwarden://profiles/local.md"].title or "").startswith("Mine, ")
        assert "gpuwarden://profiles/broken.md" in listed
        assert "gpuwarden://profiles/binary.md" not in listed and "gpuwarden://profiles/link.md" not in listed


# ---------------------------------------------------------------------------------------------------------- skills


@pytest.mark.parametrize("mode", ERAS)
async def test_skill_digests_match_the_served_files(ctx: Context, mode: str) -> None:
    async with client_of(ctx, mode) as client:
        answer = await ask(client, "skills/list")
        assert answer["resultType"] == "complete" and answer["ttlMs"] > 0 and answer["cacheScope"] == "public"
        assert len(answer["skills"]) == len(list(data_dir("skills").glob("*/SKILL.md"))) >= 4
        for skill in answer["skills"]:
            name = skill["frontmatter"]["name"]
            assert skill["uri"] == f"skill://{name}/SKILL.md" and skill["frontmatter"]["description"]
            files = {r["uri"]: r for r in skill["resources"]}
            assert skill["uri"] in files and len(files) == len(skill["resources"])
            for uri, file in files.items():
                (content,) = (await client.read_resource(uri)).contents
                raw = content.text.encode()  # type: ignore[union-attr]
                assert file == {"uri": uri, "digest": f"sha256:{hashlib.sha256(raw).hexdigest()}", "size": len(raw)}
            assert (await ask(client, "skills/get", uri=skill["uri"]))["skill"] == skill


@pytest.mark.parametrize("mode", ERAS)
async def test_skill_folders_can_be_walked(ctx: Context, mode: str) -> None:
    async with client_of(ctx, mode) as client:
        (skill,) = [s for s in (await ask(client, "skills/list"))["skills"] if "training-debug" in s["uri"]]
        seen, todo = set(), ["skill://training-debug"]
        while todo:
            for row in (await ask(client, "resources/directory/read", uri=todo.pop()))["resources"]:
                assert row["name"] == row["uri"].rpartition("/")[2]
                todo += [row["uri"]] if row["mimeType"] == "inode/directory" else []
                seen |= {row["uri"]} if row["mimeType"] != "inode/directory" else set()
        assert seen == {r["uri"] for r in skill["resources"]}


@pytest.mark.parametrize("mode", ["legacy", "auto"])  # auto asks for the server's capabilities; a fixed era doesn't
async def test_extension_is_announced_to_clients_of_both_eras(ctx: Context, mode: str) -> None:
    async with client_of(ctx, mode) as client:
        assert (client.server_capabilities.extensions or {}).get(EXTENSION) == {"directoryRead": True}
        assert client.server_capabilities.resources is not None


BAD: list[tuple[str, dict[str, str]]] = [
    ("skills/get", {"uri": "skill://nobody/SKILL.md"}),
    ("skills/get", {"uri": "skill://gpu-training"}),
    ("skills/get", {}),
    ("skills/list", {"cursor": "2"}),
    ("resources/directory/read", {"uri": "skill://gpu-training/SKILL.md"}),
    ("resources/directory/read", {"uri": "skill://gpu-training/"}),
    ("resources/directory/read", {"uri": "gpuwarden://references"}),
    ("resources/directory/read", {"uri": "skill://.."}),
    ("resources/directory/read", {}),
]


@pytest.mark.parametrize("mode", ERAS)
async def test_invalid_skill_request_is_refused(ctx: Context, mode: str) -> None:
    async with client_of(ctx, mode) as client:
        for method, params in BAD:
            with pytest.raises(MCPError) as error:
                await ask(client, method, **params)
            assert error.value.error.code == INVALID_PARAMS, (method, params)


# --------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("mode", ERAS)
async def test_prompts_name_tools_and_documents_that_exist(ctx: Context, mode: str) -> None:
    async with client_of(ctx, mode) as client:
        offered = {p.name: p for p in (await client.list_prompts()).prompts}
        assert set(offered) == {"start_training_run", "debug_run", "finish_run"}
        given = {
            "start_training_run": {"goal": "SFT of Qwen"},
            "debug_run": {"job_id": "j1"},
            "finish_run": {"job_id": "j1"},
        }
        uris = {r.uri for r in (await client.list_resources()).resources}
        filled = (await client.list_resource_templates()).resource_templates
        templates = tuple(t.uri_template.partition("{")[0] for t in filled)
        tools = {t.name for t in (await client.list_tools()).tools}
        for name, prompt in offered.items():
            assert prompt.description and prompt.arguments
            (message,) = (await client.get_prompt(name, given[name])).messages
            text = message.content.text  # type: ignore[union-attr]
            words = {word.strip(".,;()") for word in text.split()}
            named = {u for u in words if "://" in u and "<" not in u}
            assert {u for u in named if not u.startswith(templates)} <= uris
            for uri in named - uris:
                assert (await client.read_resource(uri)).contents
            assert {word for word in words if word in tools}, "it names tools"
            assert all(value in text for value in given[name].values())


@pytest.mark.parametrize("mode", ERAS)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("nothing", {}), ("debug_run", {}), ("debug_run", {"job_id": "j1", "approve": "yes"})],
)
async def test_invalid_prompt_request_is_an_invalid_params_error(
    ctx: Context, mode: str, name: str, arguments: dict[str, str]
) -> None:
    async with client_of(ctx, mode) as client:
        with pytest.raises(MCPError) as error:
            await client.get_prompt(name, arguments)
    assert error.value.error.code == INVALID_PARAMS


# ---------------------------------------------------------------------------------------------------------- search


@pytest.mark.slow
@pytest.mark.parametrize("mode", ERAS)
async def test_search_answers_briefly_with_pages_to_read(ctx: Context, mode: str, wording: Wording) -> None:
    async with client_of(ctx, mode) as client:
        uris = {r.uri for r in (await client.list_resources()).resources}
        body = await look_up(client, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", limit=3)
        first = body["hits"][0]
        assert first["id"] == "OOM-001" and "Tried to allocate" in first["why"] and first["uri"] in uris
        assert len(body["hits"]) <= 3 and len(json.dumps(body)) < 5_000
        by_words = await look_up(client, "why does my stopped pod still cost money")
        assert by_words["hits"]
        wording(by_words["hits"][0]["why"])
        assert all(hit["uri"] in uris for hit in by_words["hits"])
        named = (await look_up(client, "what is CKPT-002"))["hits"][0]
        assert named["id"] == "CKPT-002"
        wording(named["why"])


@pytest.mark.slow
async def test_no_match_is_an_answer_and_a_bad_query_is_an_error(ctx: Context) -> None:
    async with client_of(ctx, "2026-07-28") as client:
        nothing = await look_up(client, "my grandmother's recipe for plum cake")
        assert nothing["ok"] and nothing["code"] == "nothing_fits" and nothing["hits"] == []
        for query, more in (("", {}), ("  \n", {}), ("oom", {"limit": 0}), ("oom", {"limit": 10_000})):
            assert (await look_up(client, query, **more))["code"] == "bad_request"
        long = "step 1 loss 2.0\n" * 20_000 + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
        assert (await look_up(client, long))["hits"][0]["id"] == "OOM-001", "of a long log the end is read"
