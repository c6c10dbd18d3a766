// A passage on its page, in place: what the link leads to is fetched, and its pictures are put below the link. Without this file it is a page of its own.
const LATER_MS = 1000;

document.addEventListener("click", async (event) => {
  const link = event.target.closest?.("a.place");
  if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const item = link.closest("li");
  let shown = item.querySelector(".shown");
  if (!shown) {
    link.setAttribute("aria-busy", "true");
    shown = await fetchShown(link.href);
    link.removeAttribute("aria-busy");
    if (!shown) return location.assign(link.href);
    item.append(shown);
    shown.hidden = true;
  }
  shown.hidden = !shown.hidden;
  link.setAttribute("aria-expanded", String(!shown.hidden));
  // What could not be shown may be another time.
  if (shown.hidden && !shown.querySelector("img")) shown.remove();
});

/** A flight that has just ended may be known to another worker a moment later: it is asked for once more. */
async function fetchShown(address, again = true) {
  try {
    const response = await fetch(address, { credentials: "same-origin" });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const shown = page.querySelector(".shown");
    if (shown) return document.adoptNode(shown);
    if (response.status !== 404 || !again) return null;
  } catch {
    return null;
  }
  await new Promise((resolve) => setTimeout(resolve, LATER_MS));
  return fetchShown(address, false);
}
