// A passage on its page, in place: what the link leads to is fetched, and its pictures are put below the link. Without this file it is a page of its own.
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

async function fetchShown(address) {
  try {
    const response = await fetch(address, { credentials: "same-origin" });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    return document.adoptNode(page.querySelector(".shown"));
  } catch {
    return null;
  }
}
