// One asking, on the screen: the answer, its passages, its times.
import { markField } from "./fields.js";

const make = (tag, name, text) => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
};
const span = (ms) => (ms < 10_000 ? `${Math.round(ms).toLocaleString("en")} ms` : `${(ms / 1000).toFixed(1)} s`);
const SELDOM_MS = 100;

export class Run {
  constructor(form) {
    const panel = form.closest(".panel");
    const find = (name) => panel.querySelector(name);
    this.form = form;
    this.box = find(".run");
    this.answer = find(".answer");
    this.problem = find(".problem");
    this.measured = find(".measured");
    this.read = find(".read");
    this.passages = find(".passages");
    this.status = find(".status");
    this.began = performance.now();
    this.first = null;
    this.done = false;
    this.text = null;
    this.box.hidden = false;
    this.box.classList.remove("beside");
    this.read.hidden = this.problem.hidden = true;
    this.answer.replaceChildren();
    this.answer.setAttribute("aria-busy", "true");
    this.answer.dataset.state = "waiting";
    this.passages.replaceChildren();
    this.measured.replaceChildren();
    this.say("Asking");
    this.box.scrollIntoView({ block: "nearest" });
    this.clock = setInterval(() => this.tick(), SELDOM_MS);
    this.tick();
  }

  /** One event of the stream; unknown ones are for later versions of the page. */
  take(event, body) {
    if (event === "rung") this.landed(body);
    else if (event === "passages") this.showPassages(body.passages ?? []);
    else if (event === "token") this.add(body.text ?? "");
    else if (event === "answer") this.finish(body);
    else if (event === "error") this.failed(body.error ?? {});
  }

  /** A rung below the full answer: what it says of itself stands over the answer. */
  landed(landing) {
    if (!landing?.note) return;
    this.problem.replaceChildren(make("p", "", landing.note));
    this.tone("warn");
  }

  tone(tone) {
    this.problem.classList.toggle("bad", tone === "bad");
    this.problem.classList.toggle("warn", tone === "warn");
    this.problem.hidden = false;
  }

  add(piece) {
    if (!piece) return;
    if (!this.text) {
      this.first = performance.now() - this.began;
      this.answer.dataset.state = "streaming";
      this.text = document.createTextNode("");
      this.answer.append(this.text);
      this.say("Answering");
    }
    this.text.appendData(piece);
  }

  finish(body) {
    // What is about the answer is on the flight's page; the rest is the answer.
    const { usage, trace_id, citations, capability_sha256, index_version, ladder, answer, ...rest } = body;
    this.close("Answer complete");
    this.landed(ladder);
    if (citations?.length) this.showPassages(citations, trace_id);
    this.answer.replaceChildren();
    if (typeof answer === "string") this.answer.append(...withMarks(answer, this.passages));
    if (typeof answer !== "string") this.answer.append(table(answer === undefined ? rest : { answer, ...rest }));
    this.figures(usage, trace_id);
  }

  failed(error) {
    this.close("Failed");
    const { code = "error", message = "The request failed.", hint, trace_id, retry_after, param } = error;
    const head = make("p");
    const strong = make("strong");
    strong.append(...withCode(message));
    head.append(strong);
    this.problem.replaceChildren(head);
    if (hint) {
      const said = make("p");
      said.append(...withCode(hint));
      this.problem.append(said);
    }
    if (error.ticket) this.problem.append(make("p", "", `Ticket ${error.ticket}`));
    if (retry_after) this.problem.append(make("p", "", `Try again in ${retry_after} s.`));
    const codes = make("p", "small");
    codes.append(make("code", "", code), trace_id ? " trace " : "", trace_id ? make("code", "", trace_id) : "");
    this.problem.append(codes);
    this.tone("bad");
    this.answer.hidden = !this.answer.textContent;
    this.figures(null, trace_id);
    markField(this.form, param);
  }

  stopped() {
    this.close("Stopped");
    this.figures(null, null);
  }

  /** The stream is over; without an answer or an error, that is an error of its own. */
  ended() {
    if (!this.done) this.failed({ code: "stream_cut", message: "The stream ended before the answer was complete." });
  }

  close(word) {
    this.done = true;
    this.total = performance.now() - this.began;
    clearInterval(this.clock);
    this.answer.hidden = false;
    this.answer.setAttribute("aria-busy", "false");
    this.answer.dataset.state = "done";
    this.say(word);
  }

  say(word) {
    this.status.textContent = word;
  }

  tick() {
    const now = performance.now() - this.began;
    this.show([["First token", this.first === null ? "–" : span(this.first)], ["Total", span(now)]]);
  }

  figures(usage, trace) {
    const rows = [["Total", span(this.total)]];
    if (this.first !== null) rows.unshift(["First token", span(this.first)]);
    if (usage?.completion_tokens) rows.push(["Tokens in, out", `${usage.prompt_tokens}, ${usage.completion_tokens}`]);
    this.show(rows);
    if (trace) {
      const link = make("a", "to-flight", "See where the time went");
      link.href = "/flights/" + encodeURIComponent(trace);
      this.measured.append(link);
    }
  }

  show(rows) {
    this.measured.replaceChildren(...rows.map(([name, value]) => {
      const row = make("div");
      row.append(make("dt", "", name), make("dd", "", value));
      return row;
    }));
  }

  /** `trace`: the flight that read them, once it is over: it leads to the pages that they stand on. */
  showPassages(passages, trace) {
    if (!passages.length) return;
    this.read.hidden = false;
    this.box.classList.add("beside");
    this.passages.replaceChildren(...passages.map((passage) => this.passage(passage, trace)));
  }

  passage(passage, trace) {
    const item = make("li", passage.quoted === false ? "unquoted" : "");
    item.id = `${this.form.dataset.path.replace("/", "-")}-passage-${passage.n}`;
    item.tabIndex = -1;
    const head = make("p", "source");
    head.append(make("span", "n", String(passage.n)), make("span", "title", passage.title || passage.document));
    const where = [passage.page == null ? "" : `page ${passage.page}`, typeof passage.score === "number" ? `nearness ${passage.score.toFixed(2)}` : ""];
    if (passage.quoted) where.push("quoted");
    head.append(make("span", "where", where.filter(Boolean).join(" · ")));
    const text = make("p", "text clip", passage.text);
    const more = make("button", "quiet more", "Show all");
    more.type = "button";
    more.setAttribute("aria-expanded", "false");
    more.addEventListener("click", () => {
      const clipped = text.classList.toggle("clip");
      more.textContent = clipped ? "Show all" : "Show less";
      more.setAttribute("aria-expanded", String(!clipped));
    });
    item.append(head, text, more);
    if (trace && passage.boxes?.length) {
      const link = make("a", "place", "Show it on the page");
      link.href = `/flights/${encodeURIComponent(trace)}/passages/${encodeURIComponent(passage.passage_id)}`;
      item.append(link);
    }
    requestAnimationFrame(() => { more.hidden = text.scrollHeight <= text.clientHeight + 1; });
    return item;
  }
}

/** The answer's text, with [n] as links to the passages that are there. */
function withMarks(answer, passages) {
  return answer.split(/(\s*\[\d{1,2}\])/).map((piece) => {
    const n = /^\s*\[(\d+)\]$/.exec(piece)?.[1];
    const item = n && [...passages.children].find((one) => one.id.endsWith(`-passage-${n}`));
    if (!item) return document.createTextNode(piece);
    const link = make("a", "mark-n", n);
    link.href = "#" + item.id;
    link.setAttribute("aria-label", `passage ${n}`);
    link.addEventListener("click", (event) => {
      event.preventDefault();
      item.scrollIntoView({ block: "nearest" });
      item.focus({ preventScroll: true });
    });
    return link;
  });
}

/** A message of ours, with what stands in backticks as code. */
function withCode(text) {
  const pieces = text.split("`");
  if (pieces.length % 2 === 0) return [text];
  return pieces.map((piece, n) => (n % 2 ? make("code", "", piece) : document.createTextNode(piece)));
}

/** Business fields as a list of names and values. */
function table(body) {
  const list = make("dl", "fields-out");
  for (const [name, value] of Object.entries(body)) {
    const row = make("div");
    row.append(make("dt", "", name.replaceAll("_", " ")), shown(value));
    list.append(row);
  }
  return list;
}

function shown(value) {
  const cell = make("dd");
  if (Array.isArray(value) && value.every((one) => typeof one !== "object")) {
    if (!value.length) cell.append(make("span", "soft", "none"));
    else {
      const list = make("ul");
      list.append(...value.map((one) => make("li", "", String(one))));
      cell.append(list);
    }
  } else if (value !== null && typeof value === "object") {
    cell.append(Array.isArray(value) ? make("pre", "", JSON.stringify(value, null, 2)) : table(value));
  } else {
    cell.textContent = value === null ? "none" : value === true ? "yes" : value === false ? "no" : String(value);
  }
  return cell;
}
