// The log as text: its end is replaced in place, older parts are prepended, and matches are marked without markup.
// A search that has no more matches before the current one continues in the older parts.

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
  const text = find.value ? (matches.length ? `${current + 1} of ${matches.length}` : start > 0 ? "no match in the lines shown" : "no match") : "";
  if (count.textContent !== text) count.textContent = text;
  if (one && scroll) {
    const at = one.getBoundingClientRect();
    const frame = box.getBoundingClientRect();
    box.scrollTop += at.top - frame.top - box.clientHeight / 2;
  }
}

async function move(by) {
  const word = find.value;
  if (by < 0 && current <= 0 && word && await searchOlder(word)) return;
  if (word !== find.value || !matches.length) return;
  current = (current + by + matches.length) % matches.length;
  show(true);
}

async function searchOlder(word) {
  // Loads older parts until one of them contains the word, and returns whether one does.
  const known = matches.length;
  while (start > 0 && find.value === word && await loadOlder()) {
    const more = matches.length - known;
    if (more > 0) {
      current = more - 1;
      show(true);
      return true;
    }
    count.textContent = `searching older lines, ${Math.round(start / 1024).toLocaleString("en-US")} KiB left`;
  }
  show(false);
  return false;
}

find.addEventListener("input", () => search());
find.addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  move(event.shiftKey ? 1 : -1);
});
section.querySelector("[data-next]").addEventListener("click", () => move(1));
section.querySelector("[data-previous]").addEventListener("click", () => move(-1));
older.addEventListener("click", loadOlder);

async function loadOlder() {
  if (older.disabled) return false;
  older.disabled = true;
  try {
    const answer = await fetch(`${section.dataset.log}?before=${start}`, { cache: "no-store" });
    if (!answer.ok) return false;
    const piece = await answer.json();
    if (piece.start >= start) return false;
    const height = box.scrollHeight;
    before.textContent = piece.text + before.textContent;
    start = piece.start;
    box.scrollTop += box.scrollHeight - height;
    older.hidden = start <= 0;
    search(false);
    return true;
  } catch {
    return false; // the page itself reports a lost server
  } finally {
    older.disabled = false;
  }
}

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
