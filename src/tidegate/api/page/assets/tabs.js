// Tabs as the ARIA practices describe them: arrow keys move, the address keeps the choice.
export function openTabs(list) {
  if (!list) return;
  const tabs = [...list.querySelectorAll("[role=tab]")];
  const choose = (tab, focus) => {
    for (const one of tabs) {
      const chosen = one === tab;
      one.setAttribute("aria-selected", chosen);
      one.tabIndex = chosen ? 0 : -1;
      document.getElementById(one.getAttribute("aria-controls")).hidden = !chosen;
    }
    if (focus) tab.focus();
    history.replaceState(null, "", "#" + tab.id.slice("tab-".length));
  };
  list.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) choose(tab, false);
  });
  list.addEventListener("keydown", (event) => {
    const at = tabs.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    choose(tabs[(to + tabs.length) % tabs.length], true);
  });
  const named = tabs.find((tab) => "#" + tab.id.slice("tab-".length) === location.hash);
  if (named) choose(named, false);
}
