"""Run a model behind any OpenAI-compatible endpoint.

A small loop sends the prompt and the server's tools, and continues until the model replies without calling a tool.

In the `pack` arm, the loop offers an additional tool, Skill, as clients do: the system prompt contains the names and
descriptions of the skills, and the model requests a skill's text when it needs it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from evals.errors import EvalError
from evals.harness.chat import Endpoint
from evals.harness.recorder import LimitReached, Recorder
from evals.harness.runner import Play
from evals.harness.setup import Setup
from evals.harness.skill_pack import Pack
from evals.harness.skill_tool import DESCRIPTION, PARAMETERS, SKILL, read_skill, system
from evals.harness.tool_schemas import shown
from evals.scoring.cases import Case
from evals.transcripts.fields import sub, total

_EXTRA_TURNS: Final = 20
_MAX_ARGUMENTS: Final = 200_000


def make(setup: Setup) -> Play:
    """Return the agent. Raises EvalError if the model, the address or the key is missing."""
    if not setup.model:
        raise EvalError("an endpoint needs a model", "Specify the model's name with --model")
    key = setup.env.get(setup.key_env, "") if setup.key_env else ""
    if setup.key_env and not key:
        remedy = "Set it, name another variable with --key-env, or pass --key-env '' if the endpoint requires no key"
        raise EvalError(f"the variable {setup.key_env} with the endpoint's key is not set", remedy)
    endpoint = Endpoint(setup.url, setup.model, key, min(setup.timeout_s, 300.0), setup.sleep)

    def play(case: Case, recorder: Recorder) -> None:
        Loop(endpoint, setup.pack, recorder).run()

    return play


@dataclass
class Loop:
    """One conversation."""

    endpoint: Endpoint
    pack: Pack
    recorder: Recorder

    def run(self) -> None:
        """Send messages until the model makes no more calls. Raises LimitReached or AgentDied."""
        offer = shown(*self.recorder.scene.server())
        tools = [_function(t["name"], t.get("description", ""), t.get("inputSchema", {})) for t in offer.tools]
        self._ours = {t["name"] for t in offer.tools}
        if self.pack.skills:
            tools.append(_function(SKILL, DESCRIPTION, PARAMETERS))
        messages: list[dict[str, Any]] = [{"role": "system", "content": system(offer, self.pack)}]
        messages.append({"role": "user", "content": self.recorder.prompt})
        for _ in range(self.recorder.max_calls + _EXTRA_TURNS):
            message = self._turn(messages, tools)
            messages.append(message)
            if not message.get("tool_calls"):
                return
            messages += [self._answer(call) for call in message["tool_calls"]]
        raise LimitReached

    def _turn(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the model's turn for the next request: its text and calls, without the endpoint's additional keys."""
        reply = self.endpoint.complete(messages, tools)
        used = total(reply.get("usage"), "prompt_tokens", "completion_tokens")
        self.recorder.used(model=str(reply.get("model") or self.endpoint.model), turns=1)
        if used is not None:
            self.recorder.used(tokens=used)
        choice = sub(reply["choices"][0], "message")
        words = choice.get("content")
        if isinstance(words, list):
            words = "".join(str(sub(part, "text") or "") for part in words)
        if words:
            self.recorder.say(str(words))
        calls = choice.get("tool_calls")
        calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
        message: dict[str, Any] = {"role": "assistant", "content": words or ""}
        return {**message, "tool_calls": calls} if calls else message

    def _answer(self, call: dict[str, Any]) -> dict[str, Any]:
        """Make one call. A call that can't be made is reported to the model and recorded as a failed call."""
        name, text = str(sub(call, "function", "name")), sub(call, "function", "arguments")
        given = {} if text is None else text  # some endpoints send an object, or omit the arguments
        if isinstance(text, str) and len(text) <= _MAX_ARGUMENTS:
            try:
                given = json.loads(text) if text.strip() else {}
            except (ValueError, RecursionError):
                given = None
        args = given if isinstance(given, dict) else None
        if name == SKILL and self.pack.skills:
            content = read_skill(self.recorder, self.pack, args)
        elif args is None:
            content = self._refused(name, {"unreadable": str(text)[:2_000]}, "the arguments are not a JSON object")
        elif name not in self._ours:
            content = self._refused(name, args, f"unknown tool {name[:80]!r}")
        else:
            content = json.dumps(self.recorder.call(name, args), ensure_ascii=False)
        return {"role": "tool", "tool_call_id": str(call.get("id")), "content": content}

    def _refused(self, name: str, args: dict[str, Any], why: str) -> str:
        id, _ = self.recorder.begin(name[:80], args)  # noqa: A001
        self.recorder.answered(id, why, ok=False)
        return json.dumps({"ok": False, "code": "bad_request", "message": why})


def _function(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
