"""The tools, resources, and prompts that the conformance suite calls by name, mounted on the product's own MCP server.

Only tests mount them. Each does the minimum that its scenario requires; transport, guards, session handling, and errors
are the product's.
"""

# No `from __future__ import annotations` here: the SDK evaluates the annotations of tools that are defined in a
# function.
import base64
import json
import struct
import warnings
import zlib
from collections.abc import Mapping
from typing import Annotated, Any

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.prompts.base import Prompt, UserMessage
from mcp.shared.exceptions import MCPError
from mcp_types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    AudioContent,
    CreateMessageRequest,
    CreateMessageRequestParams,
    CreateMessageResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    EmbeddedResource,
    ImageContent,
    InputRequest,
    InputRequiredResult,
    ListRootsRequest,
    ListRootsResult,
    SamplingMessage,
    TextContent,
    TextResourceContents,
)
from pydantic import BaseModel, Field

Ctx = Context[Any, Any]


def _picture() -> str:
    """Return a PNG of one red pixel, base64-encoded."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\x00\xff\x00\x00")) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


def _sound() -> str:
    """Return a WAV file without samples, base64-encoded."""
    form = struct.pack("<HHIIHH", 1, 1, 8_000, 16_000, 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", 0)
    return base64.b64encode(b"RIFF" + struct.pack("<I", len(body)) + body).decode()


PICTURE = ImageContent(type="image", data=_picture(), mime_type="image/png")


def text(words: str) -> TextContent:
    """Return a text block."""
    return TextContent(type="text", text=words)


def embedded(uri: str, words: str, mime_type: str = "text/plain") -> EmbeddedResource:
    """Return a resource embedded in a result."""
    return EmbeddedResource(type="resource", resource=TextResourceContents(uri=uri, text=words, mime_type=mime_type))


def mount(server: MCPServer[Any]) -> None:
    """Register all fixtures on a server."""
    for part in (_contents, _talking, _asking, _rounds, _lists, _resources, _prompts):
        part(server)


def _contents(server: MCPServer[Any]) -> None:
    @server.tool()
    async def test_simple_text() -> str:
        """Fixture test_simple_text."""
        return "This is a simple text response for testing."

    @server.tool()
    async def test_image_content() -> list[ImageContent]:
        """Fixture test_image_content."""
        return [PICTURE]

    @server.tool()
    async def test_audio_content() -> list[AudioContent]:
        """Fixture test_audio_content."""
        return [AudioContent(type="audio", data=_sound(), mime_type="audio/wav")]

    @server.tool()
    async def test_embedded_resource() -> list[EmbeddedResource]:
        """Fixture test_embedded_resource."""
        return [embedded("test://embedded-resource", "This is an embedded resource content.")]

    @server.tool()
    async def test_multiple_content_types() -> list[TextContent | ImageContent | EmbeddedResource]:
        """Fixture test_multiple_content_types."""
        mixed = embedded("test://mixed-content-resource", '{"test": "data", "value": 123}', "application/json")
        return [text("Multiple content types test:"), PICTURE, mixed]

    @server.tool()
    async def test_error_handling() -> str:
        """Fixture test_error_handling."""
        raise RuntimeError("This tool intentionally returns an error for testing")

    @server.tool()
    async def test_x_mcp_header(
        region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})] = "none",
    ) -> str:
        """Fixture test_x_mcp_header."""
        return f"region={region}"


async def _log(ctx: Ctx, words: str) -> None:
    """Send a log message with the response to this request, if the client requested log messages."""
    with warnings.catch_warnings():  # tested in both protocol versions, although the newer one deprecates it
        warnings.simplefilter("ignore")
        await ctx.session.send_log_message("info", words, related_request_id=ctx.request_id)


def _talking(server: MCPServer[Any]) -> None:
    @server.tool()
    async def test_tool_with_logging(ctx: Ctx) -> str:
        """Fixture test_tool_with_logging."""
        for words in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            await _log(ctx, words)
            await anyio.sleep(0.05)
        return "Tool with logging executed successfully"

    @server.tool()
    async def test_logging_tool(ctx: Ctx) -> str:
        """Fixture test_logging_tool."""
        await _log(ctx, "only for who asked")
        return "logged"

    @server.tool()
    async def test_tool_with_progress(ctx: Ctx) -> str:
        """Fixture test_tool_with_progress."""
        for done in (0, 50, 100):
            await ctx.report_progress(done, 100, f"Completed step {done} of 100")
            await anyio.sleep(0.05)
        return "done"

    @server.tool()
    async def test_missing_capability(ctx: Ctx) -> str:
        """Fixture test_missing_capability."""
        declared = ctx.client_capabilities
        if declared is None or declared.sampling is None:
            wanted = {"requiredCapabilities": {"sampling": {}}}
            raise MCPError(code=MISSING_REQUIRED_CLIENT_CAPABILITY, message="sampling is required", data=wanted)
        return "sampling is declared"


class Reply(BaseModel):
    response: str = Field(description="User's response")


class Defaults(BaseModel):
    name: str = Field(default="John Doe")
    age: int = Field(default=30)
    score: float = Field(default=95.5)
    status: str = Field(default="active", json_schema_extra={"enum": ["active", "inactive", "pending"]})
    verified: bool = Field(default=True)


def _titled(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"const": value, "title": title} for value, title in pairs]


class Choices(BaseModel):
    untitledSingle: str = Field(json_schema_extra={"enum": ["active", "inactive", "pending"]})  # noqa: N815
    titledSingle: str = Field(  # noqa: N815
        json_schema_extra={"oneOf": _titled(("low", "Low"), ("medium", "Medium"), ("high", "High"))}  # type: ignore[dict-item]
    )
    untitledMulti: list[str] = Field(  # noqa: N815
        json_schema_extra={"items": {"type": "string", "enum": ["read", "write", "execute"]}}
    )
    titledMulti: list[str] = Field(  # noqa: N815
        json_schema_extra={"items": {"anyOf": _titled(("feature", "New"), ("bug", "Fix"), ("docs", "Docs"))}}  # type: ignore[dict-item]
    )
    legacyEnum: str = Field(  # noqa: N815
        json_schema_extra={"enum": ["small", "medium", "large"], "enumNames": ["Small", "Medium", "Large"]}
    )


def _asking(server: MCPServer[Any]) -> None:
    async def elicited(ctx: Ctx, message: str, schema: type[BaseModel]) -> str:
        answer = await ctx.elicit(message=message, schema=schema)
        content = answer.data.model_dump_json() if answer.action == "accept" else "{}"
        return f"action={answer.action}, content={content}"

    @server.tool()
    async def test_sampling(prompt: str, ctx: Ctx) -> str:
        """Fixture test_sampling."""
        params = CreateMessageRequestParams(
            messages=[SamplingMessage(role="user", content=text(prompt))], max_tokens=100
        )
        raw = params.model_dump(by_alias=True, mode="json", exclude_none=True)
        # Use this request's channel: a client might not be reading the other stream.
        channel = ctx.session._request_outbound
        answer = CreateMessageResult.model_validate(await channel.send_raw_request("sampling/createMessage", raw))
        return f"LLM response: {getattr(answer.content, 'text', '')}"

    @server.tool()
    async def test_elicitation(message: str, ctx: Ctx) -> str:
        """Fixture test_elicitation."""
        return f"User response: {await elicited(ctx, message, Reply)}"

    @server.tool()
    async def test_elicitation_sep1034_defaults(ctx: Ctx) -> str:
        """Fixture test_elicitation_sep1034_defaults."""
        return f"Elicitation completed: {await elicited(ctx, 'Please provide user information', Defaults)}"

    @server.tool()
    async def test_elicitation_sep1330_enums(ctx: Ctx) -> str:
        """Fixture test_elicitation_sep1330_enums."""
        return f"Elicitation completed: {await elicited(ctx, 'Please select', Choices)}"


def ask(message: str, field: str, kind: str = "string") -> ElicitRequest:
    """Return a form with one field."""
    schema = {"type": "object", "properties": {field: {"type": kind}}, "required": [field]}
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=schema))


def sample(words: str) -> CreateMessageRequest:
    """Return a request to the client's model."""
    message = SamplingMessage(role="user", content=text(words))
    return CreateMessageRequest(params=CreateMessageRequestParams(messages=[message], max_tokens=50))


def said(answers: Mapping[str, Any] | None, name: str, field: str) -> str | None:
    """Return one field of an answered form, or None if it was not answered."""
    answer = (answers or {}).get(name)
    return str(answer.content.get(field)) if isinstance(answer, ElicitResult) and answer.content else None


def _rounds(server: MCPServer[Any]) -> None:
    @server.tool()
    async def test_input_required_result_elicitation(ctx: Ctx) -> str | InputRequiredResult:
        """Fixture test_input_required_result_elicitation."""
        name = said(ctx.input_responses, "user_name", "name")
        return f"Hello, {name}!" if name else _wanted(user_name=ask("What is your name?", "name"))

    @server.tool()
    async def test_streaming_elicitation(ctx: Ctx) -> str | InputRequiredResult:
        """Fixture test_streaming_elicitation."""
        name = said(ctx.input_responses, "user_name", "name")
        return f"Hello, {name}!" if name else _wanted(user_name=ask("What is your name?", "name"))

    @server.tool()
    async def test_input_required_result_sampling(ctx: Ctx) -> str | InputRequiredResult:
        """Fixture test_input_required_result_sampling."""
        answer = (ctx.input_responses or {}).get("capital_question")
        if isinstance(answer, CreateMessageResult):
            return f"Model said: {getattr(answer.content, 'text', '')}"
        return _wanted(capital_question=sample("What is the capital of France?"))

    @server.tool()
    async def test_input_required_result_list_roots(ctx: Ctx) -> str | InputRequiredResult:
        """Fixture test_input_required_result_list_roots."""
        answer = (ctx.input_responses or {}).get("client_roots")
        if isinstance(answer, ListRootsResult):
            return f"Client exposed {len(answer.roots)} root(s)."
        return _wanted(client_roots=ListRootsRequest())

    @server.tool()
    async def test_input_required_result_request_state(ctx: Ctx) -> str | InputRequiredResult:
        """Fixture test_input_required_result_request_state."""
        if "confirm" in (ctx.input_responses or {}) and ctx.request_state == "asked":
            return "state-ok: confirmation received"
        return _wanted("asked", confirm=ask("Please confirm", "ok", "boolean"))

    @server.tool()
    async def test_input_required_result_multiple_inputs(ctx: Ctx) -> str | InputRequiredResult:
        """Fixture test_input_required_result_multiple_inputs."""
        if {"user_name", "greeting", "client_roots"} <= (ctx.input_responses or {}).keys():
            return "All inputs received."
        return _wanted(
            "several",
            user_name=ask("What is your name?", "name"),
            greeting=sample("Generate a greeting"),
            client_roots=ListRootsRequest(),
        )

    @server.tool()
    async def test_input_required_result_multi_round(ctx: Ctx) -> str | InputRequiredResult:
        """Fixture test_input_required_result_multi_round."""
        state = json.loads(ctx.request_state or "{}")
        name, color = (said(ctx.input_responses, step, f) for step, f in (("step1", "name"), ("step2", "color")))
        if state.get("round") == 2 and color:
            return f"{state['name']} likes {color}."
        if state.get("round") == 1 and name:
            return _wanted(json.dumps({"round": 2, "name": name}), step2=ask("Step 2: a color?", "color"))
        return _wanted(json.dumps({"round": 1}), step1=ask("Step 1: a name?", "name"))

    @server.tool()
    async def test_input_required_result_tampered_state(ctx: Ctx) -> str | InputRequiredResult:
        """Fixture test_input_required_result_tampered_state."""
        if ctx.request_state is not None:
            return f"state-ok: {ctx.request_state}"
        return _wanted("round-1", confirm=ask("Please confirm", "ok", "boolean"))

    @server.tool()
    async def test_input_required_result_capabilities(ctx: Ctx) -> InputRequiredResult:
        """Fixture test_input_required_result_capabilities."""
        declared = ctx.client_capabilities
        wanted: dict[str, InputRequest] = {}
        if declared is not None and declared.sampling is not None:
            wanted["sample"] = sample("Say hello")
        if declared is not None and declared.elicitation is not None:
            wanted["ask"] = ask("What is your name?", "name")
        return _wanted("declared", **wanted)


def _wanted(state: str | None = None, /, **requests: InputRequest) -> InputRequiredResult:
    return InputRequiredResult(input_requests=requests, request_state=state)


def _lists(server: MCPServer[Any]) -> None:
    async def passing() -> str:
        return "passing"

    @server.tool()
    async def test_trigger_tool_change(ctx: Ctx) -> str:
        """Fixture test_trigger_tool_change."""
        server.add_tool(passing, name="test_dynamic_tool")
        server.remove_tool("test_dynamic_tool")
        await ctx.notify_tools_changed()
        return "tool list changed"

    @server.tool()
    async def test_trigger_prompt_change(ctx: Ctx) -> str:
        """Fixture test_trigger_prompt_change."""
        server.add_prompt(Prompt.from_function(passing, name="test_dynamic_prompt"))
        server.remove_prompt("test_dynamic_prompt")
        await ctx.notify_prompts_changed()
        return "prompt list changed"


def _resources(server: MCPServer[Any]) -> None:
    @server.resource("test://static-text", mime_type="text/plain")
    async def static_text() -> str:
        """Fixture static_text."""
        return "This is the content of the static text resource."

    @server.resource("test://static-binary", mime_type="image/png")
    async def static_binary() -> bytes:
        """Fixture static_binary."""
        return base64.b64decode(PICTURE.data)

    @server.resource("test://template/{id}/data", mime_type="application/json")
    async def template_data(id: str) -> str:
        """Fixture template_data."""
        return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})

    @server.resource("test://watched-resource", mime_type="text/plain")
    async def watched() -> str:
        """Fixture watched."""
        return "Watched resource content"


def _prompts(server: MCPServer[Any]) -> None:
    def message(content: Any) -> UserMessage:
        return UserMessage(role="user", content=content)

    @server.prompt()
    async def test_simple_prompt() -> list[UserMessage]:
        """Fixture test_simple_prompt."""
        return [message(text("This is a simple prompt for testing."))]

    @server.prompt()
    async def test_prompt_with_arguments(arg1: str, arg2: str) -> list[UserMessage]:
        """Fixture test_prompt_with_arguments."""
        return [message(text(f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"))]

    @server.prompt()
    async def test_prompt_with_embedded_resource(resourceUri: str) -> list[UserMessage]:  # noqa: N803
        """Fixture test_prompt_with_embedded_resource."""
        return [
            message(embedded(resourceUri, "Embedded resource content for testing.")),
            message(text("Please process the embedded resource above.")),
        ]

    @server.prompt()
    async def test_prompt_with_image() -> list[UserMessage]:
        """Fixture test_prompt_with_image."""
        return [message(PICTURE), message(text("Please analyze the image above."))]

    @server.prompt()
    async def test_input_required_result_prompt(ctx: Ctx) -> list[UserMessage] | InputRequiredResult:
        """Fixture test_input_required_result_prompt."""
        given = said(ctx.input_responses, "user_context", "context")
        if given:
            return [message(text(f"Use the following context: {given}"))]
        return _wanted(user_context=ask("What context should the prompt use?", "context"))
