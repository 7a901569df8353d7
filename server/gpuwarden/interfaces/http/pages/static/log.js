// The log as text: its end is replaced in place, older parts are prepended, and matches are marked without markup.

const section = document.querySelector("[data-log]");
const box = section.querySelector("pre");
const tail = section.querySelector("[data-tail]");
const before = section.querySelector("[data-before]");
const find = section.querySelector("[data-find]");
const count = section.querySelector("[data-count]");
const older = section.querySelector("[data-older]");
const marks = "highlights" in CSS;
let start = Number(section.dataset.start);
let matches = [];
let current = -1;

function setTail(text) {
  if (tail.textContent === text) return;
  const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
  tail.textContent = text;
  section.querySelector("[data-no-log]").hidden = text !== "";
  box.hidden = text === "" && before.textContent === "";
  if (atEnd) box.scrollTop = box.scrollHeight;
  search(false);
}

function ranges(word) {
  const found = [];
  for (const part of [before, tail]) {
    const node = part.firstChild;
    if (!node || !word) continue;
    const text = node.data.toLowerCase();
    for (let at = text.indexOf(word); at >= 0 && found.length < 5000; at = text.indexOf(word, at + word.length)) {
      const range = new Range();
      // In a few languages, lowercase text has a different length, which shifts the marks.
      range.setStart(node, Math.min(at, node.length));
      range.setEnd(node, Math.min(at + word.length, node.length));
      found.push(range);
    }
  }
  return found;
}

function search(jump = true) {
  matches = ranges(find.value.toLowerCase());
  current = jump ? matches.length - 1 : Math.min(current, matches.length - 1);
  if (marks) {
    CSS.highlights.set("found", new Highlight(...matches));
  }
  show(jump);
}

function show(scroll) {
  const one = matches[current];
  if (marks) {
    if (one) CSS.highlights.set("current", new Highlight(one));
    else CSS.highlights.delete("current");
  }
  const text = find.value ? (matches.length ? `${current + 1} of ${matches.length}` : "no match in the lines shown") : "";
  if (count.textContent !== text) count.textContent = text;
  if (one && scroll) {
    const at = one.getBoundingClientRect();
    const frame = box.getBoundingClientRect();
    box.scrollTop += at.top - frame.top - box.clientHeight / 2;
  }
}

function move(by) {
  if (!matches.length) return;
  current = (current + by + matches.length) % matches.length;
  show(true);
}

find.addEventListener("input", () => search());
find.addEventListener("keydown", (event) => {
  if (event.key === "Enter") { event.preventDefault(); move(event.shiftKey ? 1 : -1); }
});
section.querySelector("[data-next]").addEventListener("click", () => move(1));
section.querySelector("[data-previous]").addEventListener("click", () => move(-1));
older.addEventListener("click", async () => {
  older.disabled = true;
  try {
    const answer = await fetch(`${section.dataset.log}?before=${start}`, { cache: "no-store" });
    if (!answer.ok) return;
    const piece = await answer.json();
    const height = box.scrollHeight;
    before.textContent = piece.text + before.textContent;
    start = piece.start;
    box.scrollTop += box.scrollHeight - height;
    older.hidden = start <= 0;
    search(false);
  } finally {
    older.disabled = false;
  }
});
document.addEventListener("view", (event) => {
  const log = event.detail.log;
  if (!log) return;
  setTail(log.text);
  if (before.textContent === "") {
    start = log.start;
    older.hidden = start <= 0;
  }
});
box.hidden = tail.textContent === "";
box.scrollTop = box.scrollHeight;
