// What arrives of an answer, without a page: server-sent events, and the message they add up to.

/** Cuts text that comes in any pieces into the data of its events; comments are left out. */
export class EventReader {
  #rest = "";

  push(text) {
    const events = (this.#rest + text).split("\n\n");
    this.#rest = events.pop();
    return events.filter((event) => event.startsWith("data: ")).map((event) => event.slice(6));
  }
}

/** An answer of which nothing has come. */
export function emptyAnswer() {
  return { role: "assistant", reasoning: "", content: "", calls: [], finish: null, usage: null };
}

/** Adds a chunk of /v1/chat/completions to an answer; throws the error that a chunk may hold. */
export function addChunk(answer, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) answer.usage = chunk.usage;
  for (const choice of chunk.choices) {
    answer.reasoning += choice.delta.reasoning_content ?? "";
    answer.content += choice.delta.content ?? "";
    for (const piece of choice.delta.tool_calls ?? []) addCall(answer.calls, piece);
    answer.finish = choice.finish_reason ?? answer.finish;
  }
}

function addCall(calls, piece) {
  const call = (calls[piece.index] ??= { id: "", name: "", arguments: "" });
  call.id ||= piece.id ?? "";
  call.name ||= piece.function.name ?? "";
  call.arguments += piece.function.arguments;
}

/** A turn of the conversation as the API takes it back. */
export function asMessage(turn) {
  if (turn.role !== "assistant") return turn;
  const message = { role: "assistant", content: turn.content };
  if (turn.reasoning) message.reasoning_content = turn.reasoning;
  if (turn.calls.length) {
    message.tool_calls = turn.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return message;
}

/** Chunks of an answer as they come; throws what the server says is wrong. */
export async function* chunks(body, headers, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw new Error(await reasonOf(response));
  const reader = new EventReader();
  let ended = false;
  for await (const text of texts(response.body)) {
    for (const data of reader.push(text)) {
      if (data === "[DONE]") ended = true;
      else yield JSON.parse(data);
    }
  }
  if (!ended) throw new Error("The connection ended before the answer did.");
}

async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}
