// Prometheus' text format and what the live view computes from it, without a page.

/** Samples of a text: a list of {name, labels, value}. */
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, key, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[key] = value.replace(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter));
    }
    samples.push({ name: match[1], labels, value: toNumber(match[3]) });
  }
  return samples;
}

function toNumber(text) {
  return text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text);
}

/** The samples of one name. */
export function named(samples, name) {
  return samples.filter((sample) => sample.name === name);
}

/** The value of a name, with labels if given; undefined if there is none. */
export function valueOf(samples, name, labels = {}) {
  return named(samples, name).find((sample) =>
    Object.entries(labels).every(([key, value]) => sample.labels[key] === value),
  )?.value;
}

/** A quantile of a histogram's increase since earlier samples; undefined without observations. */
export function quantile(samples, earlier, name, part) {
  const counts = named(samples, `${name}_bucket`).map(({ labels, value }) => ({
    edge: toNumber(labels.le),
    count: value - (valueOf(earlier, `${name}_bucket`, { le: labels.le }) ?? 0),
  }));
  const total = counts.at(-1)?.count ?? 0;
  if (total <= 0) return undefined;
  const wanted = part * total;
  let low = { edge: 0, count: 0 };
  for (const high of counts) {
    if (high.count >= wanted) {
      if (high.edge === Infinity) return low.edge;
      const share = (wanted - low.count) / (high.count - low.count || 1);
      return low.edge + share * (high.edge - low.edge);
    }
    low = high;
  }
  return low.edge;
}

/** Accepted drafts at each position as shares of the decode steps of requests. */
export function acceptance(samples) {
  const steps = valueOf(samples, "k3jax_request_steps_total") ?? 0;
  return named(samples, "k3jax_accepted_total")
    .map(({ labels, value }) => ({ position: Number(labels.position), share: value / steps }))
    .filter(({ share }) => Number.isFinite(share))
    .sort((a, b) => a.position - b.position);
}

/** The share of prompt tokens found in the prefix cache since earlier samples; undefined without any. */
export function prefixHits(samples, earlier) {
  const since = (what) => {
    const name = `k3jax_prefix_cache_${what}_total`;
    return (valueOf(samples, name) ?? 0) - (valueOf(earlier, name) ?? 0);
  };
  return since("queries") > 0 ? since("hits") / since("queries") : undefined;
}

/** Steps by path and reason as shares of all, the commonest first. */
export function stepShares(samples) {
  const steps = named(samples, "k3jax_steps_total");
  const total = steps.reduce((sum, step) => sum + step.value, 0);
  return steps
    .filter((step) => step.value > 0)
    .map(({ labels, value }) => ({ ...labels, count: value, share: value / total }))
    .sort((a, b) => b.count - a.count);
}
