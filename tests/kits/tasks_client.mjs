// Wait for a job with the protocol's official tasks client: node tasks_client.mjs SUITES URL JOB UNTIL [TASK]
// With TASK, resumes a wait that another process started. Prints each task and the result as one line of JSON.
import { pathToFileURL } from "node:url";

const [suites, url, job, until, task] = process.argv.slice(2);
const folder = `${suites}/node_modules/@modelcontextprotocol/ext-tasks/dist/client/index.js`;
const { withTasks, resultFromTaskOutcome } = await import(pathToFileURL(folder));
const REVISION = "2026-07-28";
const meta = {
  "io.modelcontextprotocol/protocolVersion": REVISION,
  "io.modelcontextprotocol/clientInfo": { name: "tasks", version: "1" },
  "io.modelcontextprotocol/clientCapabilities": { extensions: { "io.modelcontextprotocol/tasks": {} } },
};
let id = 0;

async function dispatch(request) {
  const { method, params } = request;
  const headers = {
    "content-type": "application/json",
    accept: "application/json, text/event-stream",
    "mcp-protocol-version": REVISION,
    "mcp-method": method,
    "mcp-name": params.taskId ?? params.name,
  };
  const body = JSON.stringify({ jsonrpc: "2.0", id: ++id, method, params: { ...params, _meta: { ...params._meta, ...meta } } });
  const text = await (await fetch(url, { method: "POST", headers, body })).text();
  const answer = JSON.parse(text.startsWith("{") ? text : text.match(/^data: (\{.*)$/m)[1]);
  return answer.error ? { kind: "error", error: answer.error } : { kind: "result", result: answer.result };
}

const nothing = () => () => {};
const session = withTasks({
  endpointId: "gpuwarden",
  taskCapabilities: { generation: "v2", capabilities: {} },
  dispatch,
  onServerRequest: nothing,
  onNotification: nothing,
  onInvalidated: nothing,
  invalidated: false,
});
const execution = task
  ? await session.resumeTask({ endpointId: "gpuwarden", generation: "v2", taskId: task, originalOperation: "tools/call" })
  : await session.callTool("check_job", { job_id: job, until });
console.log(JSON.stringify({ kind: execution.kind, task: execution.handle?.taskId ?? null }));
const { outcome } = await execution.settle();
console.log(JSON.stringify(resultFromTaskOutcome(outcome)));
await session.close();
