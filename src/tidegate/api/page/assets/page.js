// The page's own behaviour: the tabs and the ask box. The list is htmx's.
import { openForm } from "./ask.js";
import { openTabs } from "./tabs.js";

openTabs(document.querySelector("[role=tablist]"));
document.querySelectorAll("form.question").forEach(openForm);
