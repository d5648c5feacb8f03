// Puts the page together. A chart that fails says so in its place; the tables do not depend on any chart.

const data = JSON.parse(document.getElementById("chart-data").textContent);
const charts = { timeline, distribution, padding, forest, testBed, serverLoad, latencyByLoad };
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

const table = document.querySelector("[data-events]");
if (table) {
  const opened = eventTable(table, document.querySelector("[data-event-filters]"), (index) =>
    drawn.timeline?.show(index),
  );
  document.addEventListener("event-chosen", (event) => opened.open(event.detail));
  const follow = () => {
    const found = /^#event-(\d+)$/.exec(location.hash);
    if (found) opened.open(Number(found[1]));
  };
  addEventListener("hashchange", follow);
  follow();
}

document.querySelector("[data-theme-toggle]").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

addEventListener("beforeprint", () => {
  for (const node of document.querySelectorAll("details.arm, details.fold")) node.open = true;
});
addEventListener("scroll", () => tip.hide(), { passive: true });
document.documentElement.dataset.ready = "yes";
