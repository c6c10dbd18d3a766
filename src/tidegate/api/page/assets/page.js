// The page's own behaviour: the tabs, the ask box, and passages on their pages. The list is htmx's.
import { openForm } from "./ask.js";
import "./place.js";
import { openTabs } from "./tabs.js";

openTabs(document.querySelector("[role=tablist]"));
document.querySelectorAll("form.question").forEach(openForm);
