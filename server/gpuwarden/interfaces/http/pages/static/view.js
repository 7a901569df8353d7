// Write a view into a page or a card, in place: values as text, never as markup. Unchanged elements stay untouched.

const still = matchMedia("(prefers-reduced-motion: reduce)");

export function write(element, text) {
  if ("prose" in element.dataset) tell(element, text);
  else if (element.textContent !== text) element.textContent = text;
  if (element.hidden !== (text === "")) element.hidden = text === "";
}

function tell(element, text) {
  // Text between two backticks is code. Text with an odd number of backticks is shown unchanged.
  const pieces = text.split("`");
  const parts = pieces.length % 2 ? pieces : [text];
  if (element.textContent === parts.join("")) return;
  element.replaceChildren(...parts.map((part, n) => (n % 2 ? Object.assign(document.createElement("code"), { textContent: part }) : part)));
}

function trace(path, steps) {
  // Accept only moves and lines.
  const drawn = /^[ML0-9 .-]*$/.test(steps ?? "") ? steps ?? "" : "";
  if (path.getAttribute("d") !== drawn) path.setAttribute("d", drawn);
  if (!("mark" in path.dataset)) path.ownerSVGElement.toggleAttribute("hidden", drawn === "");
}

function fill(item, row) {
  item.dataset.key = row.key;
  const state = row.state ?? "";
  if (item.dataset.state !== state) item.dataset.state = state;
  for (const element of item.querySelectorAll("[data-f]")) {
    const text = row[element.dataset.f] ?? "";
    if ("link" in element.dataset) {
      write(element, text);
      const path = row[element.dataset.link];
      // Accept only a path on this server.
      if (path && /^\/(?!\/)/.test(path) && element.getAttribute("href") !== path) element.setAttribute("href", path);
    } else if (element.parentElement.dataset.with) {
      if (element.textContent !== text) element.textContent = text;
      element.parentElement.hidden = text === "";
    } else write(element, text);
  }
  for (const line of item.querySelectorAll("[data-line]")) trace(line, row[line.dataset.line]);
  for (const bar of item.querySelectorAll("[data-percent]")) {
    bar.hidden = !row.percent;
    const share = Number(row.percent || 0);
    if (bar.value !== share) bar.value = share;
  }
}

function fillList(list, rows) {
  const name = list.dataset.list;
  const pattern = document.querySelector(`template[data-item="${name}"]`);
  const have = new Map([...list.children].map((item) => [item.dataset.key, item]));
  let before = null;
  for (const row of rows) {
    let item = have.get(row.key);
    have.delete(row.key);
    if (!item) item = pattern.content.firstElementChild.cloneNode(true);
    fill(item, row);
    const next = before ? before.nextElementSibling : list.firstElementChild;
    if (item !== next) list.insertBefore(item, next);
    before = item;
  }
  for (const gone of have.values()) gone.remove();
  list.hidden = rows.length === 0;
  const empty = document.querySelector(`[data-empty="${name}"]`);
  if (empty) empty.hidden = rows.length > 0;
  const section = document.querySelector(`[data-section="${name}"]`);
  if (section) section.hidden = rows.length === 0;
}

export function apply(view) {
  for (const element of document.querySelectorAll("[data-text]")) {
    const text = view.texts?.[element.dataset.text];
    if (text === undefined) continue;
    write(element, text);
    if ("stateOf" in element.dataset && element.dataset.state !== text) element.dataset.state = text;
  }
  for (const element of document.querySelectorAll("[data-flag]")) {
    const flag = view.flags?.[element.dataset.flag];
    if (flag !== undefined && element.hidden === flag) element.hidden = !flag;
  }
  for (const element of document.querySelectorAll("[data-number]")) {
    const number = view.numbers?.[element.dataset.number];
    if (number !== undefined && element.value !== number) element.value = number;
  }
  for (const path of document.querySelectorAll("[data-drawn]")) {
    const steps = view.lines?.[path.dataset.drawn];
    if (steps !== undefined) trace(path, steps);
  }
  for (const [n, column] of [...document.querySelectorAll("[data-column]")].entries()) {
    const day = view.chart?.[n];
    if (!day) continue;
    for (const name of ["y", "height"]) if (column.getAttribute(name) !== day[name]) column.setAttribute(name, day[name]);
    write(column.firstElementChild, day.title);
  }
  for (const [name, rows] of Object.entries(view.lists ?? {})) {
    const list = document.querySelector(`[data-list="${name}"]`);
    if (list) {
      if (name === "waiting") announce(list, rows);
      fillList(list, rows);
    }
  }
  for (const [name, meter] of Object.entries(view.meters ?? {})) {
    for (const element of document.querySelectorAll(`[data-meter="${name}"]`)) begin(element, meter.amount, meter.rate);
  }
  if (view.texts?.title) document.title = view.texts.title;
  document.dispatchEvent(new CustomEvent("view", { detail: view }));
}

function announce(list, rows) {
  const known = new Set([...list.children].map((item) => item.dataset.key));
  const fresh = rows.filter((row) => !known.has(row.key));
  if (fresh.length) document.querySelector("[data-announce]").textContent = "Waiting for you: " + fresh[0].text;
}

// ------------------------------------------------------------------------------------------------------- meters

const meters = new Map();

function begin(element, amount, rate) {
  meters.set(element, { amount, rate, since: performance.now() });
  const spoken = element.querySelector("[data-spoken]");
  const text = dollars(amount, 2);
  // Screen readers get the amount to the cent; the running digits are visual only.
  if (spoken.textContent !== text) spoken.textContent = text;
  tick(element);
}

function dollars(amount, digits) {
  if (amount === null) return "unknown";
  return "$" + amount.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function tick(element) {
  const { amount, rate, since } = meters.get(element);
  const now = amount === null ? null : amount + (rate * (performance.now() - since)) / 3.6e6;
  const text = dollars(now, rate > 0 || (now !== null && now < 1) ? 4 : 2);
  const digits = element.querySelector("[data-digits]");
  if (digits.textContent !== text) digits.textContent = text;
  element.dataset.running = rate > 0 ? "yes" : "no";
}

for (const element of document.querySelectorAll("[data-meter]")) {
  const amount = element.dataset.amount;
  begin(element, amount === "" ? null : Number(amount), Number(element.dataset.rate));
}
setInterval(() => {
  if (!document.hidden && !still.matches) for (const [element, meter] of meters) if (meter.rate > 0) tick(element);
}, 250);
for (const element of document.querySelectorAll("[data-state-of]")) element.dataset.state = element.textContent;

// --------------------------------------------------------------------------------------------------- copy a command

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  try {
    await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
    button.textContent = "Copied";
  } catch {
    const range = document.createRange();
    range.selectNodeContents(button.parentElement.querySelector("code"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});
