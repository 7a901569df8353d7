// Approve the displayed facts with a passkey or with a code from a terminal, and register passkeys.

const outcome = document.querySelector("[data-outcome]");

async function post(path, body) {
  const answer = await fetch(path, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), cache: "no-store",
  });
  const found = await answer.json();
  if (!answer.ok || !found.ok) throw new Error([found.message, found.hint].filter(Boolean).join(" ").replace(/[⟦⟧]/g, ""));
  return found;
}

async function attempt(button, work, waiting = "Waiting for your passkey ...") {
  button.disabled = true;
  outcome.className = "";
  outcome.textContent = waiting;
  try {
    outcome.textContent = (await work()).message;
    return true;
  } catch (error) {
    outcome.className = "warn";
    outcome.textContent = error.name === "NotAllowedError" ? "The passkey was not used; nothing changed." : error.message;
    button.disabled = false;
    return false;
  }
}

function supported() {
  if (!window.PublicKeyCredential?.parseRequestOptionsFromJSON) throw new Error("This browser does not support passkeys on this page.");
}

const decide = document.querySelector("[data-approve]");
decide?.querySelector("[data-sign]")?.addEventListener("click", (event) => attempt(event.target, async () => {
  supported();
  const { options } = await post(`${decide.dataset.approve}/challenge.json`, { digest: decide.dataset.digest });
  const credential = await navigator.credentials.get({ publicKey: PublicKeyCredential.parseRequestOptionsFromJSON(options) });
  const answer = await post(`${decide.dataset.approve}/answer.json`, { credential: credential.toJSON() });
  answered();
  return answer;
}));

const typed = decide?.querySelector("[data-code]");
typed?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = { digest: decide.dataset.digest, code: typed.elements.code.value };
  const done = await attempt(typed.querySelector("button"), () => post(`${decide.dataset.approve}/code.json`, body), "Checking the code ...");
  if (!done) return;
  typed.reset();
  answered();
});

function answered() {
  document.querySelector("h1").textContent = "Approved";
  for (const way of document.querySelectorAll("[data-sign], [data-code-way], [data-terminal]")) way.hidden = true;
  follow();
}

// Poll the teardown until it ends, because the machine is billed until billing is confirmed stopped.
async function follow() {
  if (!decide.dataset.approve.startsWith("/approve/t")) return;
  const found = await fetch(`${decide.dataset.approve}/state.json`, { cache: "no-store" }).then((answer) => answer.json()).catch(() => null);
  if (found?.ok && outcome.textContent !== found.message) outcome.textContent = found.message;
  if (!found?.ok || found.under_way) setTimeout(follow, 1000);
}

const form = document.querySelector("[data-register]");
form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const code = form.elements.code.value;
  const done = await attempt(form.querySelector("button"), async () => {
    supported();
    const { options } = await post("/passkeys/challenge.json", { code });
    const credential = await navigator.credentials.create({ publicKey: PublicKeyCredential.parseCreationOptionsFromJSON(options) });
    return post("/passkeys/answer.json", { code, credential: credential.toJSON() });
  });
  if (!done) return;
  form.reset();
  document.querySelector("[data-registered]").hidden = true; // the list is out of date
});
