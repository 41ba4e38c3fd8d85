// The page: a conversation, its settings, and who is told what when.

import { watch } from "./live.js";
import { addChunk, asMessage, chunks, emptyAnswer } from "./stream.js";
import { AnswerView, make, userTurn } from "./view.js";

const byId = (id) => document.getElementById(id);
const [log, prompt, options] = [byId("log"), byId("prompt"), byId("options")];
const NUMBERS = ["temperature", "top_p", "top_k", "seed", "max_tokens"];
let turns = []; // {role, ..., element}
let running = null; // the AbortController of the answer that comes

function headers() {
  const key = options.elements.key.value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** The request of the conversation so far; throws if the tools are not JSON. */
function request() {
  const body = {};
  for (const name of NUMBERS) {
    const text = options.elements[name].value.trim();
    if (text) body[name] = Number(text);
  }
  const effort = options.elements.reasoning_effort.value;
  if (effort) body.reasoning_effort = effort;
  const tools = options.elements.tools.value.trim();
  if (tools) body.tools = JSON.parse(tools);
  const system = options.elements.system.value.trim();
  const said = turns.filter((turn) => turn.finish !== "failed");
  body.messages = said.map(({ element, ...turn }) => asMessage(turn));
  if (system) body.messages.unshift({ role: "system", content: system });
  return body;
}

async function ask() {
  let body;
  try {
    body = request();
    byId("tools-error").hidden = true;
  } catch (error) {
    byId("tools-error").textContent = `The tools are not JSON: ${error.message}`;
    byId("tools-error").hidden = false;
    togglePanels(true);
    options.elements.tools.focus();
    return;
  }
  await receive(body);
}

async function receive(body) {
  const answer = emptyAnswer();
  const view = new AnswerView(giveResult);
  const controller = new AbortController();
  addTurn(answer, view.element);
  setRunning(controller);
  const began = performance.now();
  let first = 0;
  let error = "";
  const seconds = () => (performance.now() - began) / 1000;
  const timer = setInterval(() => view.update(answer, seconds()), 1000);
  try {
    for await (const chunk of chunks(body, headers(), controller.signal)) {
      addChunk(answer, chunk);
      first ||= seconds();
      following(() => view.update(answer, seconds()));
    }
  } catch (problem) {
    if (!controller.signal.aborted) error = problem.message;
  }
  clearInterval(timer);
  answer.finish ??= controller.signal.aborted ? "stopped" : "failed";
  if (running === controller) setRunning(null);
  following(() => {
    view.update(answer, seconds());
    view.end({ error, notes: notes(answer, first, seconds()), buttons: [retryButton()] });
    if (answer.finish === "tool_calls") view.askForResults(answer.calls);
  });
}

function notes(answer, first, seconds) {
  const said = [];
  if (answer.finish === "length") said.push("Reached the token limit.");
  if (answer.finish === "stopped") said.push("Stopped.");
  const tokens = answer.usage?.completion_tokens;
  if (tokens) {
    const after = seconds - first;
    const rate = tokens > 1 && after > 0 ? `, ${((tokens - 1) / after).toFixed(1)} a second` : "";
    said.push(`${tokens} tokens${rate}, first after ${first.toFixed(2)} s`);
  }
  return said;
}

function retryButton() {
  const button = make("button", { text: "Retry", type: "button" });
  button.addEventListener("click", () => {
    if (running) return;
    const place = turns.findIndex((turn) => turn.element.contains(button));
    for (const turn of turns.splice(place)) turn.element.remove();
    ask();
  });
  return button;
}

function giveResult(call, text) {
  turns.push({ role: "tool", tool_call_id: call.id, content: text, element: make("i") });
  const answer = turns.findLast((turn) => turn.role === "assistant");
  const given = turns.slice(turns.indexOf(answer) + 1).map((turn) => turn.tool_call_id);
  if (answer.calls.every((one) => given.includes(one.id))) ask();
}

function addTurn(turn, element) {
  byId("empty").hidden = true;
  turn.element = element;
  turns.push(turn);
  log.append(element);
  log.scrollTop = log.scrollHeight;
}

/** Change the log; stay at its end if that is what is shown. */
function following(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function setRunning(controller) {
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  running = controller;
  log.ariaBusy = String(Boolean(controller));
  byId("send").hidden = Boolean(controller);
  byId("stop").hidden = !controller;
  if (hadFocus) (controller ? byId("stop") : prompt).focus();
}

function togglePanels(show) {
  document.body.classList.toggle("panels", show);
  byId("panels").setAttribute("aria-expanded", String(show));
}

function setState({ status, detail }) {
  byId("state").textContent = status === "ready" ? "ready" : detail || status;
  byId("state").title = detail || "";
  const bad = ["failed", "unreachable"].includes(status);
  byId("state").className = `pill ${status === "ready" ? "good" : bad ? "bad" : ""}`;
}

async function showModel() {
  try {
    const reply = await fetch("/v1/models", { headers: headers() });
    const { data } = await reply.json();
    byId("model").textContent = data?.[0]?.id ?? "";
  } catch {
    byId("model").textContent = ""; // the state beside it says that nobody answers
  }
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value;
  if (running || !text.trim()) return;
  prompt.value = "";
  fit();
  addTurn({ role: "user", content: text }, userTurn(text));
  ask();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
prompt.addEventListener("input", fit);
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
byId("stop").addEventListener("click", () => running?.abort());
byId("panels").addEventListener("click", () => {
  togglePanels(!document.body.classList.contains("panels"));
});
byId("new").addEventListener("click", () => {
  running?.abort();
  for (const turn of turns) turn.element.remove();
  turns = [];
  byId("empty").hidden = false;
  togglePanels(false);
  prompt.focus();
});
byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme ?? (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  localStorage.setItem("k3jax-theme", root.dataset.theme);
});
options.addEventListener("submit", (event) => event.preventDefault());
options.elements.key.addEventListener("change", () => {
  sessionStorage.setItem("k3jax-key", options.elements.key.value);
  showModel();
});

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

const theme = localStorage.getItem("k3jax-theme");
if (theme) document.documentElement.dataset.theme = theme;
options.elements.key.value = sessionStorage.getItem("k3jax-key") ?? "";
showModel();
watch(headers, setState);
