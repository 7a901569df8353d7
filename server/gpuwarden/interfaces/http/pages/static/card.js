// A card in a conversation. It connects to its host and writes the view of a tool's result, using view.js above.
// It requests no tool, message or link from its host, so a card can't approve, start or end anything.

const host = window.parent;
const main = document.querySelector("main");
const plain = document.querySelector("[data-plain]");
const wait = document.querySelector("[data-wait]");
const GREETING = "greeting";
const FRESH_S = 600; // the meters of an older view stop, because the machine may be gone
const REQUESTS = new Set(["ping", "ui/resource-teardown"]);
let ageing = 0;
let size = "";

function send(message) {
  // The host's origin is unknown here, so job data is never sent.
  host.postMessage({ jsonrpc: "2.0", ...message }, "*");
}

function look(context) {
  if (context?.theme === "light" || context?.theme === "dark") document.documentElement.dataset.theme = context.theme;
}

function show(result) {
  const view = result?._meta?.["gpuwarden/card"];
  const mine = view?.card === document.body.dataset.card && !result.isError;
  clearTimeout(ageing);
  if (mine) {
    const left = FRESH_S - (Date.now() / 1000 - view.at);
    age(view, left <= 0);
    if (left > 0) ageing = setTimeout(() => age(view, true), Math.min(left, FRESH_S) * 1000);
  } else {
    const message = result?.structuredContent?.message || (result?.content ?? []).map((part) => part.text ?? "").join("\n");
    const words = [message, result?.structuredContent?.hint].filter(Boolean).join("\n");
    plain.textContent = words.replace(/[\u27e6\u27e7]/g, ""); // quotation markers are for models
  }
  main.hidden = !mine;
  plain.hidden = mine || plain.textContent === "";
  wait.hidden = true;
}

function age(view, old) {
  const meters = Object.entries(view.meters).map(([name, meter]) => [name, { ...meter, rate: old ? 0 : meter.rate }]);
  apply({ ...view, meters: Object.fromEntries(meters) });
  document.querySelector("[data-old]").hidden = !old;
}

function measure() {
  const box = document.documentElement.getBoundingClientRect();
  const [width, height] = [Math.ceil(box.width), Math.ceil(box.height)];
  if (size === `${width} ${height}`) return;
  size = `${width} ${height}`;
  send({ method: "ui/notifications/size-changed", params: { width, height } });
}

addEventListener("message", (event) => {
  const message = event.data;
  if (event.source !== host || message?.jsonrpc !== "2.0") return;
  if (message.method === undefined) {
    if (message.id !== GREETING || !message.result) return;
    look(message.result.hostContext);
    send({ method: "ui/notifications/initialized", params: {} });
    new ResizeObserver(measure).observe(document.documentElement);
  } else if (message.id !== undefined) {
    const answer = REQUESTS.has(message.method) ? { result: {} } : { error: { code: -32601, message: "Method not found" } };
    send({ id: message.id, ...answer });
  } else if (message.method === "ui/notifications/tool-result") show(message.params);
  else if (message.method === "ui/notifications/host-context-changed") look(message.params);
  else if (message.method === "ui/notifications/tool-cancelled") wait.textContent = "The call was canceled.";
});

send({
  id: GREETING,
  method: "ui/initialize",
  params: {
    protocolVersion: "2026-01-26",
    appInfo: { name: "gpuwarden", version: "1" },
    appCapabilities: { availableDisplayModes: ["inline"] },
  },
});
