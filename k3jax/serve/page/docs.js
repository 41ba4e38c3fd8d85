// The API, from /openapi.json: every route with its fields, those of objects within folded.

import { make } from "./view.js";

const docs = document.getElementById("docs");

function resolve(spec, schema) {
  const name = schema.$ref?.split("/").at(-1);
  return name ? { ...spec.components.schemas[name], name } : schema;
}

/** The schemas of a field: each of its forms but null. */
function forms(spec, schema) {
  const all = schema.anyOf ?? schema.oneOf ?? [schema];
  return all.map((one) => resolve(spec, one)).filter((one) => one.type !== "null");
}

function typeOf(spec, schema) {
  return forms(spec, schema).map((one) => {
    if (one.enum) return one.enum.map((value) => JSON.stringify(value)).join(" | ");
    if (one.const !== undefined) return JSON.stringify(one.const);
    if (one.type === "array") return `list of ${typeOf(spec, one.items ?? {})}`;
    return one.name ?? [one.type ?? "any value"].flat().join(" | ");
  }).join(" | ");
}

const BOUNDS = {
  minimum: "≥", maximum: "≤", exclusiveMinimum: ">", exclusiveMaximum: "<",
  minItems: "items ≥", maxItems: "items ≤", minLength: "length ≥", maxLength: "length ≤",
};

function boundsOf(spec, schema) {
  return forms(spec, schema).flatMap((one) =>
    Object.entries(BOUNDS)
      .filter(([key]) => Math.abs(one[key]) < 2 ** 31 - 1) // what a number can hold says nothing
      .map(([key, sign]) => `${sign} ${one[key]}`),
  ).join(", ");
}

/** The objects that a field's value is or holds. */
function inside(spec, schema) {
  return forms(spec, schema).flatMap((one) =>
    one.type === "array" ? inside(spec, one.items ?? {}) : one.properties ? [one] : [],
  );
}

function fields(spec, schema, above = []) {
  const required = schema.required ?? [];
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const notes = [typeOf(spec, field), boundsOf(spec, field), required.includes(name) && "required"];
    const deeper = inside(spec, field).filter((one) => one.name && !above.includes(one.name));
    return make("li", {}, make("code", { text: name }),
      make("span", { className: "quiet", text: ` ${notes.filter(Boolean).join("; ")}` }),
      ...(field.description ? [make("div", { text: field.description })] : []),
      ...deeper.map((one) => make("details", {}, make("summary", { text: one.name }),
        fields(spec, one, [...above, one.name]))));
  });
  return make("ul", {}, ...rows);
}

function operation(spec, path, method, described) {
  const body = described.requestBody?.content["application/json"].schema;
  const reply = described.responses["200"].content;
  const said = (described.description ?? "").replace(/^[A-Z]+ \/\S*[:,] /, ""); // the route, again
  const parts = [make("h2", { text: `${method.toUpperCase()} ${path}` }), make("p", { text: said })];
  if (body) {
    const schema = resolve(spec, body);
    parts.push(make("details", {}, make("summary", { text: "Request" }), fields(spec, schema)));
  }
  const json = reply["application/json"];
  const kinds = Object.keys(reply).join(" or ");
  parts.push(make("details", {}, make("summary", { text: `Reply: ${kinds}` }),
    json ? fields(spec, resolve(spec, json.schema)) : make("p", { text: "Text." })));
  return make("section", { className: "call" }, ...parts);
}

async function show() {
  try {
    const spec = await (await fetch("/openapi.json")).json();
    docs.replaceChildren(...Object.entries(spec.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, one]) => operation(spec, path, method, one))));
  } catch (error) {
    docs.replaceChildren(make("p", { className: "error", text: error.message, role: "alert" }));
  }
}

show();
