// Update a page: follow the stream of its views, or request its view every few seconds.

import { apply } from "./view.js";

const body = document.body;
const address = body.dataset.live;

// A visible page follows the stream of its views, or polls if it has no stream. A hidden page does neither.
const RETRY_STREAM_MS = 30_000;
const connection = document.querySelector("[data-connection]");
let failures = 0;
let stream = null;
let streamAfter = 0; // earliest time for another attempt to open a stream
let timer = 0;
let ended = false;

function say(text) {
  if (connection.textContent !== text) connection.textContent = text;
}

function received(view) {
  apply(view);
  failures = 0;
  say("");
}

function lost() {
  failures += 1;
  if (failures > 1) say("The server does not answer; this page may be out of date.");
}

function follow() {
  clearTimeout(timer);
  if (!address || ended || document.hidden || stream) return;
  if (performance.now() < streamAfter) poll();
  else open();
}

function open() {
  const opened = new EventSource(address.replace(/\.json(?=$|\?)/, ".events"));
  stream = opened;
  opened.addEventListener("view", (event) => { if (stream === opened) received(JSON.parse(event.data)); });
  opened.addEventListener("error", () => {
    if (stream !== opened) return;
    if (opened.readyState !== EventSource.CLOSED) { lost(); return; } // the browser reconnects
    close();
    streamAfter = performance.now() + RETRY_STREAM_MS;
    follow();
  });
}

function close() {
  clearTimeout(timer);
  stream?.close();
  stream = null;
}

async function poll() {
  try {
    const answer = await fetch(address, { headers: { accept: "application/json" }, cache: "no-store" });
    if (answer.status === 401) {
      ended = true;
      say("This session has ended: run gpuwarden dashboard again.");
      return;
    }
    if (!answer.ok) throw new Error(String(answer.status));
    received(await answer.json());
  } catch {
    lost();
  }
  clearTimeout(timer);
  if (!stream && !document.hidden) timer = setTimeout(follow, Number(body.dataset.every) * Math.min(8, 1 + failures));
}

if (address) {
  follow();
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : follow()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", follow);
}
