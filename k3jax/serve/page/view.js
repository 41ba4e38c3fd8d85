// Turns of a conversation as elements. Text of users and models only ever becomes text nodes.

/** An element with text, a class and children. */
export function make(tag, { text, className, ...properties } = {}, ...children) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

/** What a user said. */
export function userTurn(text) {
  return make("article", { className: "message user" }, make("div", { className: "text", text }));
}

/** An answer that grows; `onResult(call, text)` takes the result of a call that a user typed. */
export class AnswerView {
  #thought = make("div", { className: "text" });
  #summary = make("summary", { text: "Thinking" });
  #thinking = make("details", { className: "thinking", hidden: true }, this.#summary, this.#thought);
  #content = make("div", { className: "text" });
  #calls = make("div");
  #meta = make("div", { className: "meta" });
  #cards = [];
  #onResult;
  element = make("article", { className: "message assistant" },
    this.#thinking, this.#content, this.#calls, this.#meta);

  constructor(onResult) {
    this.#onResult = onResult;
  }

  /** Show an answer as far as it has come; `seconds` since it was asked for. */
  update(answer, seconds) {
    this.#thinking.hidden = !answer.reasoning;
    grow(this.#thought, answer.reasoning);
    const thinks = !answer.content && !answer.calls.length && !answer.finish;
    this.#summary.textContent = thinks ? `Thinking, ${seconds.toFixed(0)} s` : "Thoughts";
    if (this.#content.dataset.text !== answer.content) {
      this.#content.dataset.text = answer.content;
      this.#content.replaceChildren(...formatted(answer.content));
    }
    answer.calls.forEach((call, index) => this.#updateCall(call, index));
  }

  /** Say how an answer ended, with the buttons that can follow. */
  end({ notes, error, buttons }) {
    this.#meta.replaceChildren(
      ...(error ? [make("span", { className: "error", text: error, role: "alert" })] : []),
      ...notes.map((text) => make("span", { text })),
      ...buttons,
    );
  }

  /** Ask for the results of calls: a field in each card. */
  askForResults(calls) {
    calls.forEach((call, index) => {
      const label = `Result of ${call.name}`;
      const field = make("input", { placeholder: label, ariaLabel: label });
      const form = make("form", {}, field, make("button", { text: "Give", type: "submit" }));
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        form.replaceWith(make("pre", { text: field.value }));
        this.#onResult(call, field.value);
      });
      this.#cards[index].element.append(form);
    });
  }

  #updateCall(call, index) {
    let card = this.#cards[index];
    if (!card) {
      const name = make("h3", { text: `Calls ${call.name}` });
      const body = make("pre");
      card = this.#cards[index] = {
        body, element: make("section", { className: "call" }, name, body),
      };
      this.#calls.append(card.element);
    }
    card.body.textContent = pretty(call.arguments);
  }
}

function grow(element, text) {
  if (element.textContent.length !== text.length) element.textContent = text;
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

/** Text with ``` fences as nodes: code stands in blocks of its own. */
export function formatted(text) {
  return text.split(/^```/m).map((part, index) => {
    if (index % 2 === 0) return document.createTextNode(part.replace(index ? /^\s*\n/ : "", ""));
    const code = part.slice(part.indexOf("\n") + 1).replace(/\n$/, "");
    return make("pre", { text: code });
  });
}
