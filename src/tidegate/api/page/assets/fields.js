// Between a form and a JSON body. Names are dotted paths; `data-kind` says what an input's text becomes.
const inputs = (form) => [...form.querySelectorAll("[data-kind]")];

const READ = {
  number: Number,
  integer: Number,
  yes_no: (text) => text === "true",
  lines: (text) => text.split("\n").map((line) => line.trim()).filter(Boolean),
  json: JSON.parse,
};

const SHOW = {
  lines: (value) => value.join("\n"),
  json: (value) => JSON.stringify(value),
};

/** The form's body. Throws the input whose JSON is broken, after telling the browser so. */
export function readForm(form) {
  const body = {};
  for (const input of inputs(form)) {
    const text = input.value.trim();
    if (!text && none(form, input)?.checked) put(body, input.name.split("."), []);
    if (text) put(body, input.name.split("."), read(input, text));
  }
  return body;
}

/** The box that says that a list is empty, which is not the same as not given. */
function none(form, input) {
  return form.querySelector(`[data-none="${CSS.escape(input.name)}"]`);
}

function read(input, text) {
  try {
    return READ[input.dataset.kind]?.(text) ?? text;
  } catch (error) {
    input.setCustomValidity("This is not JSON: " + error.message);
    input.addEventListener("input", () => input.setCustomValidity(""), { once: true });
    input.reportValidity();
    throw error;
  }
}

function put(body, path, value) {
  for (const step of path.slice(0, -1)) body = body[step] ??= {};
  body[path.at(-1)] = value;
}

/** Fills the form with a body; inputs that the body does not name are emptied. */
export function fillForm(form, body) {
  for (const input of inputs(form)) {
    const value = input.name.split(".").reduce((part, step) => part?.[step], body);
    const empty = none(form, input);
    if (empty) empty.checked = Array.isArray(value) && !value.length;
    input.value = value == null ? "" : (SHOW[input.dataset.kind]?.(value) ?? String(value));
  }
}

/** Marks the field that an error names, and goes there. */
export function markField(form, name) {
  for (const input of inputs(form)) {
    const wrong = Boolean(name) && (input.name === name || input.name === name.replace(/^\//, "").replaceAll("/", "."));
    if (wrong) {
      input.setAttribute("aria-invalid", "true");
      input.focus();
    } else {
      input.removeAttribute("aria-invalid");
    }
  }
}
