// Says whether the list is live. A script of its own, before htmx: a module comes too late for the first connection's event.
{
  const say = (word, state) => {
    const mark = document.getElementById("live");
    if (!mark || mark.dataset.state === state && mark.textContent === word) return;
    mark.textContent = word;
    mark.dataset.state = state;
  };
  document.addEventListener("htmx:sse:after:connection", () => say("live", "on"));
  document.addEventListener("htmx:sse:error", ({ detail }) => say(detail.status === 401 ? "signed out" : "reconnecting", "off"));
  // A new filter replaces the list: the old connection's end must not speak for the new one.
  document.addEventListener("htmx:sse:close", ({ detail }) => detail.reason === "ended" && say("ended", "off"));
}
