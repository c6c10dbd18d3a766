// Asks a capability and shows what comes, as it comes. Text of models and documents is only ever set as text, never as HTML.
import { createParser } from "./eventsource-parser.js";
import { fillForm, markField, readForm } from "./fields.js";
import { Run } from "./run.js";

export function openForm(form) {
  const stop = form.querySelector(".stop");
  let asking = null;

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (asking) return;
    let body;
    try {
      body = readForm(form);
    } catch {
      return;
    }
    asking = new AbortController();
    form.classList.add("asking");
    stop.hidden = false;
    markField(form, "");
    const run = new Run(form);
    try {
      await ask(form.dataset.path, body, run, asking.signal);
    } catch (error) {
      if (asking.signal.aborted) run.stopped();
      else run.failed({ code: "connection_lost", message: "The connection was lost.", hint: `Is Tidegate still running? (${error.message})` });
    } finally {
      asking = null;
      form.classList.remove("asking");
      stop.hidden = true;
    }
  });
  stop.addEventListener("click", () => {
    asking?.abort();
    form.querySelector(".main").focus();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  for (const example of form.querySelectorAll(".example")) {
    example.addEventListener("click", () => {
      fillForm(form, JSON.parse(example.dataset.body));
      form.querySelector("[data-kind]").focus();
    });
  }
}

async function ask(path, body, run, signal) {
  const response = await fetch("/api/v1/" + path, {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
    body: JSON.stringify(body),
    credentials: "same-origin",
    signal,
  });
  const type = response.headers.get("Content-Type") ?? "";
  if (!type.startsWith("text/event-stream")) return whole(response, run);
  const parser = createParser({
    onEvent: ({ event, data }) => run.take(event ?? "message", JSON.parse(data)),
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) parser.feed(piece.value);
  run.ended();
}

async function whole(response, run) {
  let body;
  try {
    body = await response.json();
  } catch {
    body = {};
  }
  if (response.ok) return run.take("answer", body);
  const retry = response.headers.get("Retry-After");
  run.failed({
    code: "http_" + response.status,
    message: "The gateway answered with status " + response.status + ".",
    ...body.error,
    ...(response.status === 401 ? { hint: "Your session is over: reload this page and sign in again." } : {}),
    ...(retry ? { retry_after: retry } : {}),
  });
}
