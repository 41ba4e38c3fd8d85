// The live view: /metrics once a second while somebody looks.

import {
  acceptance, named, parseMetrics, prefixHits, quantile, stepShares, valueOf,
} from "./metrics.js";

const WINDOW = 120; // samples kept, one a second
const byId = (id) => document.getElementById(id);
const history = []; // {time, samples}
const rates = [];

/** Polls for ever; `headers` gives those of a request, `onState` hears the engine's state. */
export function watch(headers, onState) {
  const tick = async () => {
    if (!document.hidden) await look(headers, onState);
    setTimeout(tick, 1000);
  };
  tick();
}

async function look(headers, onState) {
  try {
    const [ready, metrics] = await Promise.all([
      fetch("/ready", { headers: headers() }),
      fetch("/metrics", { headers: headers() }),
    ]);
    onState(await ready.json());
    if (!metrics.ok) throw new Error((await metrics.json()).error.message);
    remember(parseMetrics(await metrics.text()));
    byId("live-error").hidden = true;
  } catch (error) {
    const lost = error instanceof TypeError; // what fetch throws when nobody answers
    if (lost) onState({ status: "unreachable", detail: "" });
    byId("live-error").textContent = lost ? "The server cannot be reached." : error.message;
    byId("live-error").hidden = false;
  }
}

function remember(samples) {
  history.push({ time: performance.now(), samples });
  if (history.length > WINDOW) history.shift();
  const last = history.at(-2);
  if (last) {
    const tokens = generated(samples) - generated(last.samples);
    rates.push((1000 * Math.max(0, tokens)) / (history.at(-1).time - last.time));
    if (rates.length > WINDOW) rates.shift();
  }
  show(samples);
}

const generated = (samples) => valueOf(samples, "k3jax_tokens_total", { kind: "generated" }) ?? 0;

function show(samples) {
  const recent = rates.slice(-3);
  const mean = recent.reduce((sum, rate) => sum + rate, 0) / (recent.length || 1);
  byId("rate").textContent = recent.length ? digits(mean) : "–";
  byId("ttft").textContent = times(samples, "ttft", [0.5, 0.95]);
  byId("tpot").textContent = times(samples, "tpot", [0.5]);
  byId("waiting").textContent = valueOf(samples, "k3jax_waiting") ?? "–";
  const hits = prefixHits(samples, history[0].samples) ?? prefixHits(samples, []);
  byId("prefix").textContent = hits === undefined ? "–" : percent(hits);
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, i) => `${WINDOW - rates.length + i},${31 - (30 * rate) / top}`);
  byId("spark").firstElementChild.setAttribute("points", points.join(" "));
  bars("use", ["slots", "pages"].map((what) => use(samples, what)).filter(Boolean));
  const accepted = acceptance(samples).map(({ position, share }) => [`${position}`, percent(share), share]);
  bars("accepted", accepted, "No drafts yet.");
  const shares = stepShares(samples);
  const specialized = shares.filter((step) => step.path === "specialized");
  byId("specialized").textContent = shares.length
    ? percent(specialized.reduce((sum, step) => sum + step.share, 0))
    : "–";
  const steps = shares.map(({ path, reason, share }) => [
    reason ? `${path}: ${reason}` : path, percent(share), share,
  ]);
  bars("steps", steps, "No steps yet.");
  byId("ranks").replaceChildren(...named(samples, "k3jax_health").map(rank));
}

/** Quantiles over the window, or since the start if nothing came in it. */
function times(samples, what, parts) {
  const name = `k3jax_${what}_seconds`;
  const of = (earlier) => parts.map((part) => quantile(samples, earlier, name, part));
  const recent = of(history[0].samples);
  const values = recent.includes(undefined) ? of([]) : recent;
  if (values.includes(undefined)) return "–";
  const unit = Math.max(...values) < 1 ? "ms" : "s";
  const texts = values.map((value) => (unit === "s" ? value.toFixed(1) : digits(1000 * value)));
  return `${texts.join(" / ")} ${unit}`;
}

const digits = (value) => value.toFixed(value < 10 ? 1 : 0);

function use(samples, what) {
  const used = valueOf(samples, `k3jax_${what}_in_use`);
  const all = valueOf(samples, `k3jax_${what}`);
  if (used === undefined || !all) return null;
  return [`${what[0].toUpperCase()}${what.slice(1)} in use`, `${used} of ${all}`, used / all];
}

const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

function bars(id, rows, nothing = "") {
  const made = rows.map(([label, value, share]) => {
    const bar = document.createElement("div");
    bar.className = "bar";
    for (const text of [label, value]) bar.append(element("span", text));
    const line = element("i", "");
    line.style.setProperty("--part", String(Math.min(1, share)));
    bar.append(line);
    return bar;
  });
  byId(id).replaceChildren(...(made.length ? made : [element("span", nothing, "quiet")]));
}

function rank({ labels, value }) {
  const good = value === 0;
  return element("li", `${labels.rank}: ${good ? "well" : `failed (${value})`}`, `pill ${good ? "good" : "bad"}`);
}

function element(tag, text, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}
