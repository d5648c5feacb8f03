// Puts the page together. A chart that fails says so in its place; the tables do not depend on any chart.

const data = JSON.parse(document.getElementById("chart-data").textContent);
const charts = { timeline, distribution, latencyByLoad };
const drawn = {};
for (const [name, draw] of Object.entries(charts)) {
  const host = document.querySelector(`[data-chart="${name}"]`);
  if (!host) continue;
  try {
    drawn[name] = draw(host, data);
  } catch (error) {
    host.replaceChildren(el("p", { class: "broken" }, `This chart could not be drawn: ${error.message}`));
    console.error(error);
  }
}

// What a link or a chart points at may be folded.
function unfold(node) {
  for (let at = node; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
}

const table = document.querySelector("[data-events]");
const opened =
  table &&
  eventTable(table, document.querySelector("[data-event-filters]"), (index) => drawn.timeline?.show(index));
document.addEventListener("event-chosen", (event) => opened?.open(event.detail));
const follow = () => {
  const found = /^#event-(\d+)$/.exec(location.hash);
  if (found) opened?.open(Number(found[1]));
  else if (location.hash) unfold(document.getElementById(location.hash.slice(1)));
};
addEventListener("hashchange", follow);
follow();

document.querySelector("[data-theme-toggle]").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

addEventListener("scroll", () => tip.hide(), { passive: true });
document.documentElement.dataset.ready = "yes";
