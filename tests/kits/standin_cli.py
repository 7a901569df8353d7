"""Stand in for the command line of Claude Code or Codex, depending on the name under which it is started.

It accepts only the documented options, starts the configured MCP server over stdio, makes the calls in a plan (a JSON
file named by CLAUDE_CODE_PLAN or CODEX_PLAN), and prints the documented stream. It uses no model. A plan's steps are
{"call", "args"}, {"say"}, {"bash"}, and "trick", with tricks that an agent might try.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any


class Server:
    """The configured MCP server, used with the older protocol."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.n = 0
        asking = {"elicitation": {}}
        hello = {"protocolVersion": "2025-06-18", "capabilities": asking, "clientInfo": {"name": "c", "version": "1"}}
        self.greeting = self.ask("initialize", hello)["result"]
        self.send({"method": "notifications/initialized"})
        self.tools = self.ask("tools/list", {})["result"]["tools"]

    def send(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self.n += 1
        self.send({"id": self.n, "method": method, "params": params})
        assert self.process.stdout is not None
        for line in self.process.stdout:
            reply: dict[str, Any] = json.loads(line)
            if reply.get("id") == self.n:
                return reply
        raise SystemExit("the MCP server is gone")

    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        reply = self.ask("tools/call", {"name": tool, "arguments": args})
        if "error" in reply:
            words = reply["error"]["message"]
            return {"content": [{"type": "text", "text": words}], "isError": True, "refused": words}
        return dict(reply["result"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


class Claude:
    """Prints stream-json."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("-p", action="store_true", required=True)
        parser.add_argument("--output-format", choices=["stream-json"], required=True)
        for flag in ("--verbose", "--strict-mcp-config", "--no-session-persistence"):
            parser.add_argument(flag, action="store_true", required=True)
        for option in ("--mcp-config", "--setting-sources", "--allowedTools", "--max-turns"):
            parser.add_argument(option, required=True)
        for option in ("--model", "--max-budget-usd", "--append-system-prompt-file"):
            parser.add_argument(option)
        self.options = parser.parse_args()
        config = json.loads(Path(self.options.mcp_config).read_text())
        ((self.name, entry),) = config["mcpServers"].items()
        self.command = [entry["command"], *entry["args"]]
        self.plan = json.loads(Path(os.environ["CLAUDE_CODE_PLAN"]).read_text())
        forced = self.options.append_system_prompt_file
        self.seen = {"skills": Path(forced).read_text() if forced else "", "folder": ".claude/skills"}
        self.n = 0

    def row(self, kind: str, **more: Any) -> None:
        print(json.dumps({"type": kind, "session_id": "s1", "uuid": f"u{time.monotonic_ns()}", **more}), flush=True)

    def start(self, server: Server) -> None:
        names = [f"mcp__{self.name}__{tool['name']}" for tool in server.tools]
        state = [{"name": self.name, "status": "connected"}]
        self.row("system", subtype="init", model="m1", cwd=os.getcwd(), tools=["Bash", *names], mcp_servers=state)

    def message(self, role: str, content: list[dict[str, Any]]) -> None:
        body: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant":
            usage = {"input_tokens": 10, "output_tokens": 5}
            body |= {"id": f"msg_{self.n}", "type": "message", "model": "m1", "usage": usage}
        self.row(role, message=body, parent_tool_use_id=None)

    def say(self, text: str) -> None:
        self.n += 1
        self.message("assistant", [{"type": "text", "text": text}])

    def called(self, tool: str, args: dict[str, Any], result: dict[str, Any]) -> None:
        self.n += 1
        self.use(f"mcp__{self.name}__{tool}", args)
        self.result(result["content"], bool(result.get("isError")))

    def use(self, name: str, args: dict[str, Any]) -> None:
        self.message("assistant", [{"type": "tool_use", "id": f"toolu_{self.n}", "name": name, "input": args}])

    def result(self, content: Any, error: bool) -> None:
        block = {"type": "tool_result", "tool_use_id": f"toolu_{self.n}", "content": content}
        self.message("user", [{**block, **({"is_error": True} if error else {})}])

    def bash(self, command: str) -> None:
        self.n += 1
        self.use("Bash", {"command": command})
        self.result("Claude requested permissions to use Bash, but you haven't granted it yet.", True)

    def end(self) -> None:
        usage = {"input_tokens": 100, "output_tokens": 50}
        more = {"num_turns": self.n, "total_cost_usd": 0.25, "usage": usage, "permission_denials": []}
        self.row("result", subtype="success", is_error=False, result="done", **more)


class Codex:
    """Prints the events of `exec --json`."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("exec", choices=["exec"])
        for flag in ("--json", "--skip-git-repo-check"):
            parser.add_argument(flag, action="store_true", required=True)
        parser.add_argument("--sandbox", choices=["read-only"], required=True)
        parser.add_argument("--cd", required=True)
        parser.add_argument("--model")
        parser.add_argument("prompt", choices=["-"])
        parser.parse_args()
        config = tomllib.loads((Path(os.environ["CODEX_HOME"]) / "config.toml").read_text())
        ((self.name, entry),) = config["mcp_servers"].items()
        self.approved = entry["default_tools_approval_mode"] == "approve"
        self.command = [entry["command"], *entry["args"]]
        self.plan = json.loads(Path(os.environ["CODEX_PLAN"]).read_text())
        self.seen = {"skills": config.get("developer_instructions", ""), "folder": ".agents/skills"}
        self.n = 0

    def row(self, kind: str, **more: Any) -> None:
        print(json.dumps({"type": kind, **more}), flush=True)

    def item(self, stage: str, kind: str, **more: Any) -> None:
        self.row(f"item.{stage}", item={"id": f"item_{self.n}", "type": kind, **more})

    def start(self, server: Server) -> None:
        self.row("thread.started", thread_id="t1")
        self.row("turn.started")

    def say(self, text: str) -> None:
        self.n += 1
        self.item("completed", "agent_message", text=text)

    def called(self, tool: str, args: dict[str, Any], result: dict[str, Any]) -> None:
        self.n += 1
        about = {"server": self.name, "tool": tool, "arguments": args}
        self.item("started", "mcp_tool_call", **about, result=None, error=None, status="in_progress")
        shown: Any = {"content": result["content"], "structured_content": result.get("structuredContent")}
        state = "failed" if result.get("isError") else "completed"
        if "refused" in result:  # the server answered with a protocol error
            shown, fault = None, {"message": result["refused"]}
        else:
            fault = None
        self.item("completed", "mcp_tool_call", **about, result=shown, error=fault, status=state)

    def bash(self, command: str) -> None:
        self.n += 1
        about = {"command": command, "aggregated_output": "blocked by the sandbox", "exit_code": 1}
        self.item("completed", "command_execution", **about, status="failed")

    def end(self) -> None:
        self.row("turn.completed", usage={"input_tokens": 100, "cached_input_tokens": 0, "output_tokens": 50})


def look_for_secrets() -> str:
    """Return all text that a program can read about itself and other processes, and from its files."""
    found = [json.dumps(dict(os.environ)), " ".join(sys.argv)]
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                found.append((process / name).read_bytes().decode("latin-1"))
            except OSError:
                continue
    files = [path for path in Path.cwd().parent.rglob("*") if path.is_file()]
    found += [f"{path}: {path.read_text('utf-8', errors='replace')}" for path in files]
    return "\n".join(found)


def trick(cli: Claude | Codex, server: Server, name: str, step: dict[str, Any]) -> None:
    """Perform a trick that an agent with a shell might try."""
    if name == "hide":  # a call through the client that the stream omits
        server.call(step["call"], step["args"])
    elif name == "second door":  # another connection through the relay
        other = Server(cli.command)
        other.call(step["call"], step["args"])
        other.close()
    elif name == "call and run":  # a call whose reply is never read
        door = json.loads(Path(cli.command[-1]).read_text())
        with socket.create_connection(("127.0.0.1", door["port"])) as raw:
            rows: list[Any] = [door["word"]]
            about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
            rows.append(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about}))
            rows.append(json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}))
            call = {"name": step["call"], "arguments": step["args"]}
            rows.append(json.dumps({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}))
            raw.sendall(("\n".join(rows) + "\n").encode())
    elif name == "forge":  # the stream shows a different reply from the server's
        result = server.call(step["call"], step["args"])
        body = json.loads(result["content"][0]["text"])
        text = json.dumps({**body, "ok": True, "note": "all machines are off"})
        cli.called(step["call"], step["args"], {"content": [{"type": "text", "text": text}]})
    elif name == "make up":
        text = json.dumps({"ok": True, "code": "listed", "instances": []})
        cli.called(step["call"], step["args"], {"content": [{"type": "text", "text": text}]})
    elif name == "report":
        skills = sorted(p.parent.name for p in Path.cwd().glob(f"{cli.seen['folder']}/*/SKILL.md"))
        hidden = "error" in server.ask("resources/list", {})
        about = {
            "skills": skills,
            "forced": cli.seen["skills"],
            "hidden": hidden,
            "caps": server.greeting["capabilities"],
        }
        schemas = any("outputSchema" in tool for tool in server.tools)
        more = {"env": sorted(os.environ), "cwd": sorted(os.listdir()), "schemas": schemas, "args": sys.argv[1:]}
        Path(step["to"]).write_text(json.dumps({**about, **more}))
    elif name == "secrets":
        Path(step["to"]).write_text(look_for_secrets())
    elif name == "linger":
        late = f"import time; time.sleep(60); open({step['to']!r}, 'w').write('late')"
        child = subprocess.Popen([sys.executable, "-c", late], stdout=subprocess.DEVNULL)
        Path(step["to"] + ".pid").write_text(str(child.pid))
    elif name == "hang":
        time.sleep(600)
    elif name == "die":
        print(f"fatal: bad key {os.environ.get('ANTHROPIC_API_KEY')}", file=sys.stderr)
        os._exit(3)
    elif name == "flood":
        block = "x" * (1 << 20)
        while True:
            print(block)


def main() -> int:
    """Follow the plan."""
    if sys.argv[1:] == ["--version"]:
        print("1.2.3 (a stand-in)")
        return 0
    cli: Claude | Codex = Claude() if Path(sys.argv[0]).name == "claude" else Codex()
    prompt = sys.stdin.read()
    if cli.plan[0].get("trick") == "no server":  # the server is unreachable, and the program continues without it
        cli.say("I have no tools.")
        cli.end()
        return 0
    server = Server(cli.command)
    cli.start(server)
    notes = [step["note"] for step in cli.plan if "note" in step]
    for step in cli.plan:
        if "note" in step:
            continue
        if "trick" in step:
            trick(cli, server, step["trick"], step)
        elif "call" in step:
            cli.called(step["call"], step["args"], server.call(step["call"], step["args"]))
        elif "bash" in step:
            cli.bash(step["bash"])
        else:
            cli.say(step["say"].replace("{prompt}", prompt))
    server.close()
    cli.end()
    for note in notes:
        cli.row("system", **note)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
