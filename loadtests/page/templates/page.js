// Take each message, draw what changed, announce what became final, and become the report at the end.

const { seen, learn } = knowledge();
const EVERY_MS = 2000; // a chart is drawn again at most so often
const LOST_MS = 4000; // without a message

const parts = [
  { on: ["now", "interim", "run", "load"], every: 0, draw: () => spoken(showState(seen)) },
  { on: ["now", "interim", "run", "load", "events", "weights"], every: 0, draw: showCards },
  { on: ["interim", "run"], every: 0, draw: withIndex(gateTiles(at("[data-tiles]"))) },
  { on: ["interim"], every: 0, draw: showChecks },
  { on: ["load", "events", "run"], every: EVERY_MS, draw: latencyChart() },
  { on: ["events", "run"], every: 0, draw: showCompiles },
  { on: ["now", "run"], every: 0, draw: showUnderWay },
  { on: ["load", "run"], every: EVERY_MS, draw: loadCharts() },
  { on: ["load", "weights", "run"], every: EVERY_MS, draw: weightParts() },
  { on: ["machines"], every: EVERY_MS, draw: showMachines },
  { on: ["now"], every: 0, draw: showNotes },
  { on: ["run"], every: 0, draw: showRun },
  { on: ["interim"], every: 0, draw: showInterims },
].map((part) => ({ ...part, waits: false, drawnAt: -Infinity }));

function withIndex(draw) {
  return () => {
    const names = armNames(seen);
    draw(seen, (name) => Math.max(0, names.indexOf(name)));
  };
}

function showRun({ run }) {
  for (const node of document.querySelectorAll("[data-run]")) node.textContent = run[node.dataset.run];
  for (const node of document.querySelectorAll('#gates, #checks, nav a[href="#gates"], nav a[href="#checks"]')) node.hidden = run.judged_once; // at the end
}

function showInterims({ interim }) {
  const which = `Interim analysis ${count(interim.number)}, after ${span(interim.seconds)} of judged traffic.`;
  at("[data-interims]").textContent = interim.number ? `${which} Intervals and decisions are valid at every interim analysis.` : "";
}

function take(message) {
  redraw(learn(message));
}

function redraw(changed) {
  for (const part of parts) part.waits ||= part.on.some((name) => changed.has(name));
  requestAnimationFrame(drawn); // not while the page is hidden
}

let later = null;
function drawn() {
  const now = performance.now();
  let next = Infinity;
  for (const part of parts) {
    if (!part.waits) continue;
    const rest = part.drawnAt + part.every - now;
    if (rest > 0) {
      next = Math.min(next, rest);
      continue;
    }
    part.waits = false;
    part.drawnAt = now;
    try {
      part.draw(seen);
    } catch (error) {
      console.error(error);
    }
  }
  clearTimeout(later);
  if (next < Infinity) later = setTimeout(() => requestAnimationFrame(drawn), next);
  document.documentElement.dataset.ready = "yes";
}

// --- what a screen reader hears: changes of state, and nothing that changes each second -------------------------------

let saidState = "";
function spoken(state) {
  const { now, interim } = seen;
  const troubled = (interim?.checks ?? []).filter((check) => !check.ok).map((check) => check.check);
  const dead = deadOf(now);
  const key = JSON.stringify([state.word, now?.decided, now?.state, troubled, dead]);
  document.title = `${now?.state === "load" && !now.decided && isNumber(now.t_s) ? clock(now.t_s) : state.word} · ${seen.run?.name ?? "run"} · tailgate`;
  if (key === saidState) return;
  saidState = key;
  const said = [`${state.word}. ${state.line}`];
  if (troubled.length) said.push(`Checks that limit the run: ${troubled.join(", ")}.`);
  at("[data-said]").textContent = said.join(" ");
}

// --- the connection ---------------------------------------------------------------------------------------------------

const link = at("[data-link]"),
  LINKS = { waiting: "connecting", live: "live", lost: "no connection", ended: "ended" };
function linked(state) {
  link.dataset.link = state;
  at("[data-link-text]").textContent = LINKS[state];
}

let source = null,
  silent = null;
function listen() {
  source = new EventSource("events");
  source.onmessage = (event) => {
    const message = JSON.parse(event.data);
    clearTimeout(silent);
    silent = null;
    seen.lost = false;
    linked("live");
    take(message);
    if (message.last) end();
  };
  source.onerror = () => {
    silent ??= setTimeout(lose, LOST_MS);
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, LOST_MS); // it was refused, and does not ask again
  };
}

function lose() {
  seen.lost = true;
  linked("lost");
  redraw(new Set(["now"]));
}

// The report is fetched while the run still serves it, and shown from the browser's own copy.
async function end() {
  source.close();
  if (!seen.now?.ended) return lose(); // the page alone has ended
  linked("ended");
  if (!seen.now?.ended?.report) return;
  try {
    const answer = await fetch("report.html", { cache: "reload" });
    if (!answer.ok) return;
    await answer.text();
    location.replace("report.html");
  } catch (error) {
    console.error(error);
  }
}

at("[data-theme-toggle]").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
addEventListener("scroll", () => tip.hide(), { passive: true });
listen();
