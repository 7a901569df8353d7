// Curves of several runs on one axis. The server sends a few thousand points; a zoom requests the visible part again.

const section = document.querySelector("[data-curves]");
const holder = section.querySelector("[data-plot]");
const choice = section.querySelector("[data-metric]");
const across = section.querySelector("[data-axis]");
const smoothing = section.querySelector("[data-smoothing]");
const logScale = section.querySelector("[data-log-scale]");
const reset = section.querySelector("[data-reset]");
const legend = section.querySelector("[data-legend]");
const table = section.querySelector("[data-points]");
const none = section.querySelector("[data-no-points]");
const runs = section.dataset.curves.split(" ");
const HEIGHT = 320;
const ROWS = 40;
let plot = null;
let curves = [];
let byTime = false; // whether the x axis shows time; the first run with points decides
let hours = across.value === "time"; // whether the x axis shows the hours since each run's first point
let part = null; // the zoomed range of the x axis
const whole = new Map(); // each run's whole curve over hours, from which a zoom determines the steps to request

function color(name) {
  // A canvas needs the computed color, because the value of a variable may be a light-dark() pair.
  const probe = document.createElement("i");
  probe.className = `probe ${name}`;
  section.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

async function load(run) {
  const query = new URLSearchParams({ metric: choice.value });
  const zoomed = part;
  const known = zoomed && whole.get(run);
  const range = hours ? known && stepsOf(known, zoomed) : zoomed;
  if (range) { query.set("from", String(range[0])); query.set("to", String(range[1])); }
  if (!hours) return asked(run, query);
  query.set("x", "time");
  const found = await asked(run, query);
  if (!found) return null;
  const placed = overHours(found, zoomed, known);
  if (!zoomed) whole.set(run, placed);
  return placed;
}

async function asked(run, query) {
  const answer = await fetch(`/jobs/${encodeURIComponent(run)}/curve.json?${query}`, { cache: "no-store", signal: AbortSignal.timeout(60_000) });
  return answer.ok ? answer.json() : null;
}

function overHours(found, zoomed, known) {
  // Points without a time are left out. The others are sorted, because a later attempt may have repeated a step.
  const timed = found.at.map((at, n) => [at, n]).filter(([at]) => at !== null).sort((a, b) => a[0] - b[0]);
  const begin = known?.begin ?? timed[0]?.[0] ?? 0;
  const kept = timed.map(([at, n]) => [(at - begin) / 3600, n]).filter(([x]) => !zoomed || (x >= zoomed[0] && x <= zoomed[1]));
  return {
    ...found, begin, by_time: false, apart: found.x.length > 0 && !timed.length,
    x: kept.map(([x]) => x), y: kept.map(([, n]) => found.y[n]), at: kept.map(([, n]) => found.x[n]),
    odd: found.odd_at.filter((at) => at !== null).map((at) => (at - begin) / 3600),
  };
}

function stepsOf(known, [from, to]) {
  // The steps between the neighbors of the range, because the whole curve lacks most points of a long run.
  const first = Math.max(0, known.x.findLastIndex((x) => x < from));
  const end = known.x.findIndex((x) => x > to);
  const steps = known.at.slice(first, end === -1 ? undefined : end + 1);
  return steps.length ? [Math.min(...steps), Math.max(...steps)] : null;
}

function number(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

function place(x) {
  return byTime ? moment(x).slice(5) : hours ? `${number(x)} h` : `step ${number(x)}`;
}

function moment(seconds) {
  return new Date(seconds * 1000).toLocaleString("sv-SE"); // 2026-11-28 17:05:00
}

function smoothed(values) {
  // An exponential moving average that does not start at 0, as in TensorBoard. A gap stays a gap.
  const weight = Number(smoothing.value);
  let sum = 0;
  let share = 1;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    share *= weight;
    return sum / (1 - share);
  });
}

function joined() {
  // With smoothing, the points themselves follow as further lines, drawn faintly.
  const lines = curves.map((curve) => [curve.x, smoothed(curve.y)]);
  if (Number(smoothing.value)) lines.push(...curves.map((curve) => [curve.x, curve.y]));
  return uPlot.join(lines, lines.map(([, y]) => y.map(() => 2)));
}

function marksOf(u) {
  const bad = color("bad");
  u.ctx.save();
  u.ctx.fillStyle = bad;
  for (const curve of curves) {
    for (const step of curve.odd) {
      const at = u.valToPos(step, "x", true);
      if (at >= u.bbox.left && at <= u.bbox.left + u.bbox.width) u.ctx.fillRect(at - 1, u.bbox.top + u.bbox.height - 14, 2, 14);
    }
  }
  u.ctx.restore();
}

function draw() {
  const points = curves.reduce((sum, curve) => sum + curve.x.length, 0);
  none.hidden = points > 0;
  holder.hidden = points === 0;
  describe();
  if (plot) { plot.destroy(); plot = null; }
  if (!points || typeof uPlot === "undefined") return;
  const line = color("line");
  const text = color("text");
  const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
  const series = curves.map((curve, n) => ({
    label: curve.job,
    stroke: color(`run${n}`),
    width: n === 0 ? 2 : 1.5,
    dash: n === 0 ? undefined : [[6, 4], [2, 3], [10, 4, 2, 4], [4, 2], [1, 4]][(n - 1) % 5],
    points: { show: curve.x.length < 60 },
    spanGaps: false,
  }));
  if (Number(smoothing.value)) series.push(...series.map((one) => ({ ...one, width: 1, alpha: 0.3, dash: undefined, points: { show: false } })));
  const positive = curves.every((curve) => curve.y.every((value) => value === null || value > 0));
  logScale.disabled = !positive;
  const started = performance.now();
  plot = new uPlot({
    width: Math.max(240, holder.clientWidth),
    height: HEIGHT,
    legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 7 } },
    scales: { x: { time: byTime }, y: { distr: logScale.checked && positive ? 3 : 1 } },
    axes: [{ ...axis, label: byTime ? "time" : hours ? "hours since the first point" : "step", labelFont: "12px system-ui, sans-serif", labelSize: 20, space: 90, values: (_u, ticks) => ticks.map((t) => (byTime ? moment(t).slice(5, 16) : number(t))) }, { ...axis, size: 60, values: (_u, ticks) => ticks.map((t) => (t === null ? "" : number(t))) }],
    series: [{ label: "step" }, ...series],
    hooks: {
      draw: [marksOf],
      setSelect: [(u) => {
        if (u.select.width < 8) return;
        const from = u.posToVal(u.select.left, "x");
        const to = u.posToVal(u.select.left + u.select.width, "x");
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        zoom([from, to]);
      }],
      setCursor: [(u) => readout(u.cursor.idx)],
    },
  }, joined(), holder);
  section.dataset.drawn = String(Math.round(performance.now() - started));
}

function readout(index) {
  const items = [...legend.children];
  if (!plot) return;
  const hovered = index !== null && index !== undefined;
  curves.forEach((curve, n) => {
    // A run that reports at other steps has no value here, so its last earlier value is shown.
    let at = hovered ? index : -1;
    while (at >= 0 && (plot.data[n + 1][at] === null || plot.data[n + 1][at] === undefined)) at -= 1;
    const shown = at >= 0 ? `${number(plot.data[n + 1][at])} at ${place(plot.data[0][at])}` : hovered ? "-" : number(last(curve));
    items[n].querySelector(".value").textContent = shown;
  });
}

function last(curve) {
  return curve.y.findLast((value) => value !== null) ?? null;
}

function describe() {
  legend.replaceChildren(...curves.map((curve, n) => {
    const item = document.createElement("li");
    const swatch = document.createElement("i");
    swatch.className = `swatch run${n}`;
    const name = document.createElement("span");
    name.textContent = curve.name;
    const id = document.createElement("span");
    id.className = "id";
    id.textContent = curve.job;
    const value = document.createElement("span");
    value.className = "value";
    value.textContent = number(last(curve));
    item.append(swatch, name, id, value);
    const notes = [];
    if (Number(smoothing.value) && curve.x.length) notes.push(`smoothed by ${smoothing.value}`);
    if (curve.odd_count) notes.push(`${curve.odd_count.toLocaleString("en-US")} not finite`);
    if (curve.total > curve.x.length) notes.push(`${curve.total.toLocaleString("en-US")} points`);
    if (curve.apart) notes.push(hours ? "without times, so not drawn here" : byTime ? "over steps, so not drawn here" : "without steps, so not drawn here");
    if (notes.length) {
      const odd = document.createElement("span");
      odd.className = curve.odd_count ? "warn" : "sub";
      odd.textContent = notes.join(", ");
      item.append(odd);
    }
    return item;
  }));
  holder.setAttribute("aria-label", curves.filter((curve) => curve.x.length).map((curve) => {
    const values = curve.y.filter((value) => value !== null);
    if (!values.length) return `${curve.name}: no finite value`;
    let low = Infinity;
    for (const value of values) if (value < low) low = value;
    const odd = curve.odd_count ? `, ${curve.odd_count} values are not finite` : "";
    return `${curve.metric} of ${curve.name}: ${number(values[0])} at ${place(curve.x[0])} to ${number(values.at(-1))} at ${place(curve.x.at(-1))}, lowest ${number(low)}${odd}`;
  }).join("; ") || "No points yet");
  tabulate();
}

function tabulate() {
  const head = document.createElement("tr");
  for (const title of [byTime ? "Time" : hours ? "Hours" : "Step", ...curves.map((curve) => curve.job)]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = title;
    head.append(cell);
  }
  const first = curves[0] ?? { x: [], y: [] };
  const stride = Math.max(1, Math.ceil(first.x.length / ROWS));
  const rows = [];
  for (let n = 0; n < first.x.length; n += stride) {
    const row = document.createElement("tr");
    const step = document.createElement("th");
    step.scope = "row";
    step.textContent = byTime ? moment(first.x[n]) : number(first.x[n]);
    row.append(step);
    for (const curve of curves) {
      const cell = document.createElement("td");
      const at = curve === first ? n : nearest(curve.x, first.x[n]);
      cell.textContent = at === -1 ? "-" : curve.y[at] === null ? "not finite" : number(curve.y[at]);
      row.append(cell);
    }
    rows.push(row);
  }
  const caption = table.caption;
  const top = document.createElement("thead");
  const main = document.createElement("tbody");
  top.append(head);
  main.append(...rows);
  table.replaceChildren(caption, top, main);
}

function nearest(steps, wanted) {
  let low = 0;
  let high = steps.length - 1;
  if (high < 0 || wanted < steps[0] || wanted > steps[high]) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

const overview = section.querySelector("[data-overview]");
const tiles = overview.querySelector("ul");
const TILES = 12;
const FEW = 200;
let due = 0; // earliest time for another overview, because a long run's curves take the server a while
let renewed = false; // whether the metrics have changed, or the job has ended, since the last overview began
let surveying = false;

async function survey() {
  const names = [...choice.options].map((option) => option.value);
  overview.hidden = names.length < 2;
  if (overview.hidden) renewed = false;
  if (overview.hidden || surveying || !(renewed || performance.now() > due)) return;
  surveying = true;
  renewed = false;
  const begun = performance.now();
  for (const [n, metric] of names.slice(0, TILES).entries()) {
    const query = new URLSearchParams({ metric, points: String(FEW) });
    const found = [];
    // One request at a time, because the curve of a long run keeps the server busy.
    for (const [k, run] of runs.entries()) found.push({ x: [], y: [], missing: true, ...await asked(run, query).catch(() => null), k });
    if (found[0].missing && tiles.children[n]) continue; // keep the last picture
    if (!tiles.children[n]) tiles.append(overview.querySelector("template").content.cloneNode(true));
    miniature(tiles.children[n].firstElementChild, metric, found);
  }
  while (tiles.children.length > Math.min(names.length, TILES)) tiles.lastElementChild.remove();
  overview.querySelector("[data-more]").textContent = names.length > TILES ? `(the first ${TILES} of ${names.length})` : "";
  due = performance.now() + Math.max(15_000, 20 * (performance.now() - begun));
  surveying = false;
}

function miniature(tile, metric, found) {
  const drawn = found.filter((curve) => curve.x.length && curve.by_time === found.find((one) => one.x.length).by_time);
  const [name, value, picture] = tile.children;
  name.textContent = metric;
  value.textContent = number(last(found[0]));
  tile.setAttribute("aria-pressed", String(metric === choice.value));
  const finite = drawn.flatMap((curve) => curve.y.filter((y) => y !== null));
  const [left, right] = [Math.min(...drawn.map((curve) => curve.x[0])), Math.max(...drawn.map((curve) => curve.x.at(-1)))];
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  picture.replaceChildren(...drawn.toReversed().map((curve) => { // this job's own curve is on top
    const place = (n) => `${(100 * (curve.x[n] - left) / (right - left || 1)).toFixed(1)} ${(39 - 38 * (curve.y[n] - low) / (high - low || 1)).toFixed(1)}`;
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", `run${curve.k}`);
    // "h0" draws a point that has no neighbor as a dot.
    path.setAttribute("d", curve.y.map((y, n) => (y === null ? "" : n && curve.y[n - 1] !== null ? `L${place(n)}` : `M${place(n)}h0`)).join(""));
    return path;
  }));
}

tiles.addEventListener("click", (event) => {
  const tile = event.target.closest("button");
  if (!tile) return;
  choice.value = tile.firstElementChild.textContent;
  choice.dispatchEvent(new Event("change"));
});

let turn = 0;
async function refresh() {
  if (!choice.value) { curves = []; draw(); return; }
  const mine = ++turn;
  const found = (await Promise.all(runs.map(load))).filter(Boolean);
  if (mine !== turn) return;
  byTime = found.find((curve) => curve.x.length)?.by_time ?? false;
  for (const curve of found) {
    if (curve.x.length && curve.by_time !== byTime) Object.assign(curve, { x: [], y: [], odd: [], apart: true }); // two axes
  }
  if (plot && same(found)) return;
  curves = found;
  draw();
}

function same(found) {
  return found.length === curves.length && found.every((curve, n) =>
    curve.metric === curves[n].metric && curve.x.length === curves[n].x.length && curve.total === curves[n].total && curve.x.at(-1) === curves[n].x.at(-1));
}

function zoom(range) {
  part = range;
  reset.hidden = part === null;
  refresh();
}

function restart() {
  part = null;
  reset.hidden = true;
  curves = [];
  whole.clear();
  refresh();
}

function span() {
  const all = curves.flatMap((curve) => (curve.x.length ? [curve.x[0], curve.x.at(-1)] : []));
  return [Math.min(...all), Math.max(...all)];
}

holder.addEventListener("keydown", (event) => {
  if (!plot) return;
  const [from, to] = part ?? span();
  const width = to - from;
  const moves = {
    "+": [from + width / 4, to - width / 4], "=": [from + width / 4, to - width / 4],
    "-": [from - width / 2, to + width / 2],
    ArrowLeft: [from - width / 4, to - width / 4], ArrowRight: [from + width / 4, to + width / 4],
  };
  if (event.key === "Escape" || event.key === "0") zoom(null);
  else if (moves[event.key]) zoom(moves[event.key]);
  else return;
  event.preventDefault();
});
holder.addEventListener("dblclick", () => zoom(null));
reset.addEventListener("click", () => { zoom(null); holder.focus(); });
choice.addEventListener("change", () => {
  for (const { firstElementChild: tile } of tiles.children) tile.setAttribute("aria-pressed", String(tile.firstElementChild.textContent === choice.value));
  restart();
});
across.addEventListener("change", () => {
  hours = across.value === "time";
  const url = new URL(location.href);
  url.searchParams.set("x", across.value);
  history.replaceState(null, "", url);
  restart();
});
logScale.addEventListener("change", draw);
smoothing.addEventListener("change", draw);
document.addEventListener("themechange", draw);
new ResizeObserver(() => { if (plot && holder.clientWidth > 0) plot.setSize({ width: Math.max(240, holder.clientWidth), height: HEIGHT }); }).observe(section);
let updating = false;
let stale = false; // whether the job has ended, or its metrics have changed, since the last request
async function update() {
  // A second request would discard the answer to the first, and then a long run's curve would never be drawn.
  if (updating) return;
  updating = true;
  try {
    do {
      stale = false;
      await refresh();
    } while (stale);
  } finally {
    updating = false;
  }
  survey();
}

let running = true;
document.addEventListener("view", (event) => {
  const names = event.detail.metrics;
  if (!names) return;
  const have = [...choice.options].map((option) => option.value);
  if (names.join("\n") !== have.join("\n")) {
    const chosen = choice.value;
    choice.replaceChildren(...names.map((name) => new Option(name, name))); // without a value, spaces would be trimmed
    if (names.includes(chosen)) choice.value = chosen;
    renewed = stale = true;
  }
  const { active } = event.detail.flags;
  if (running && !active) renewed = stale = true;
  running = active;
  if (active || renewed || curves.length === 0) update();
});
update(); // the chosen curve first
