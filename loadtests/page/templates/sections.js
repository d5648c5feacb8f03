// The parts of the page besides the tiles. Each takes what is known and changes its own place.

const at = (selector) => document.querySelector(selector);

// The text as nodes, in which each term of the glossary has its definition as its tooltip.
const TERMS = new RegExp(data.terms, "i");
const explained = (text) => {
  const pieces = text.split(TERMS); // text, term, plural, text, …
  return pieces.map((piece, i) => {
    if (i % 3 === 0) return piece;
    return i % 3 === 1 ? el("abbr", { title: data.glossary[piece.toLowerCase()] ?? data.glossary.pn }, piece + pieces[i + 1]) : null;
  });
};
const fact = (name, value, note) => el("div", {}, el("dt", {}, explained(name)), el("dd", {}, value, note ? el("small", {}, ` ${note}`) : null));

// The text as nodes, in which what stands between two backticks is code.
const withCode = (text) => text.split(/`([^`]*)`/).map((part, place) => (place % 2 ? el("code", {}, part) : part));

// The children of `host` become these, and nodes that are alike stay: so do the focus, the place to which a table was
// scrolled, what is marked, and where a screen reader reads.
function renew(host, ...children) {
  const fresh = el("div", {}, ...children);
  patchChildren(host, fresh);
}

function patchChildren(host, fresh) {
  const before = [...host.childNodes],
    after = [...fresh.childNodes];
  after.forEach((node, i) => (i < before.length ? patch(before[i], node) : host.append(node)));
  for (const node of before.slice(after.length)) node.remove();
}

function patch(node, fresh) {
  if (node.nodeName !== fresh.nodeName) return node.replaceWith(fresh);
  if (node.nodeType === Node.TEXT_NODE) {
    if (node.data !== fresh.data) node.data = fresh.data;
    return;
  }
  for (const { name } of [...node.attributes]) if (!fresh.hasAttribute(name)) node.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  patchChildren(node, fresh);
}

// --- what state the run is in -----------------------------------------------------------------------------------------

const WORDS = { starting: "Starting", load: "Under load", closing: "Stopping", judging: "Judging" };
const TONES_OF = { PASS: "pass", FAIL: "fail", INCONCLUSIVE: "inconclusive" };

// { word, tone, icon, line } of the run as it is.
function stateOf({ now, interim, run, lost }) {
  const gone = "The run does not answer: it may have ended, or have been killed.";
  if (!now && lost) return { word: "No connection", tone: "none", icon: "lost", line: gone };
  if (!now) return { word: "Connecting", tone: "none", icon: "running", line: "The run has not reported anything yet." };
  if (now.ended) {
    const { verdict, headline, error, interrupted, report } = now.ended;
    if (verdict) return { word: verdict, tone: TONES_OF[verdict], icon: verdict, line: headline || "The run has ended." };
    const why = error || (interrupted ? "It was interrupted." : report ? "" : "Nothing was judged.");
    return { word: error ? "Broke" : "Ended", tone: error ? "fail" : "none", icon: error ? "FAIL" : "running", line: `The run has ended. ${why}` };
  }
  if (lost)
    return { word: "No connection", tone: "none", icon: "lost", line: `${gone} The figures below are the last known ones.` };
  const line = [traffic(now), deaths(now), decisions(interim, run, now), now.decided ? "" : failing(interim)].filter(Boolean).join(" ");
  if (now.decided)
    return { word: now.decided, tone: TONES_OF[now.decided], icon: now.decided, line: `${WORDS[now.state]}: ${line}` };
  return { word: WORDS[now.state] ?? "Running", tone: "running", icon: "running", line };
}

function traffic(now) {
  if (now.state === "load" && isNumber(now.t_s) && isNumber(now.duration_s) && now.t_s <= now.duration_s) {
    const of = now.trials > 1 ? ` in trial ${now.trial} of ${now.trials}` : "";
    return `${clock(now.t_s)} of ${clock(now.duration_s)} of traffic${of}.`;
  }
  const said = `${now.phase} ${now.detail}`.trim();
  return said ? `${said[0].toUpperCase()}${said.slice(1)}.` : "";
}

function decisions(interim, run, now) {
  const controls = new Set((run?.arms ?? []).filter((arm) => arm.control).map((arm) => arm.name));
  const arms = Object.entries(interim?.arms ?? {}).filter(([name]) => !controls.has(name));
  if (!arms.length) return "";
  const decided = arms.filter(([, arm]) => arm.decision === "PASS" || arm.decision === "FAIL");
  const failed = decided.filter(([, arm]) => arm.decision === "FAIL").map(([name]) => name);
  const open = arms.filter(([, arm]) => arm.decision !== "PASS" && arm.decision !== "FAIL").map(([, arm]) => arm.outlook_s);
  const outlooks = open.filter(isNumber);
  const said = [`${decided.length} of ${arms.length} arms decided${failed.length ? `, ${failed.join(" and ")} failed` : ""}.`];
  if (open.length && outlooks.length === open.length) said.push(outlook({ outlook_s: Math.max(...outlooks) }, { interim, now }));
  return said.join(" ");
}

const deadOf = (now) => (now?.replicas ?? []).filter((one) => one.stage === "dead").map((one) => one.name);
function deaths(now) {
  const dead = deadOf(now);
  return dead.length ? `${dead.join(" and ")} ${dead.length > 1 ? "are" : "is"} dead.` : "";
}

// Which arms fail gates as things stand, where nothing is decided.
function failing(interim) {
  const failed = new Map();
  for (const gate of interim?.gates ?? []) if (gate.verdict === "FAIL") failed.set(gate.arm, (failed.get(gate.arm) ?? 0) + 1);
  return failed.size ? `As it stands, ${[...failed].map(([arm, number]) => `${arm} fails ${number} ${number > 1 ? "gates" : "gate"}`).join(", ")}.` : "";
}

function showState(seen) {
  const { now } = seen,
    state = stateOf(seen);
  const section = at("#state");
  section.className = `verdict verdict-${state.tone}`;
  const host = at("[data-state-icon]");
  if (host.dataset.stateIcon !== state.icon) {
    host.dataset.stateIcon = state.icon;
    host.replaceChildren(icon(state.icon));
  }
  const title = at("#state-title");
  if (title.textContent !== state.word) title.textContent = state.word;
  renew(at("[data-headline]"), withCode(state.line)); // an error may name a command
  if (!now) return state;
  linked(seen.lost ? "lost" : now.ended ? "ended" : "live");
  const advance = at("[data-advance]");
  const known = isNumber(now.t_s) && now.duration_s > 0 && now.t_s > 0;
  advance.hidden = !known;
  if (known) advance.value = Math.min(1, (now.trial - 1 + Math.min(1, now.t_s / now.duration_s)) / now.trials);
  showFacts(seen);
  return state;
}

function showFacts({ now, interim, run, series }) {
  const inflight = Object.values(last(series.load)?.arms ?? {}).reduce((sum, arm) => sum + (arm.inflight ?? 0), 0);
  const outlooks = Object.values(interim?.arms ?? {}).filter((arm) => !arm.decision).map((arm) => arm.outlook_s).filter(isNumber);
  const late = isNumber(now.lag_ms) && isNumber(run?.max_lag_ms) && now.lag_ms > run.max_lag_ms;
  renew(
    at("[data-facts]"),
    fact("Phase", now.phase || DASH, now.detail),
    fact("Since the start", isNumber(now.at_ns) && isNumber(now.began_ns) ? clock((now.at_ns - now.began_ns) / 1e9) : DASH, now.trials > 1 ? `trial ${now.trial} of ${now.trials}` : ""),
    fact("Requests of all arms", count(now.finished), now.planned ? `of ${count(now.planned)}${now.failed ? `, ${count(now.failed)} failed` : ""}` : now.failed ? `${count(now.failed)} failed` : ""),
    fact("In flight", count(inflight)),
    fact("Generator lag", ms(now.lag_ms), isNumber(run?.max_lag_ms) ? `p99, ${late ? "above the limit of" : "limit"} ${ms(run.max_lag_ms)}` : "p99"),
    likely(now, interim, run, outlooks),
  );
}

// When the run is likely decided: as its interim analyses predict, or at its end where it is judged once.
function likely(now, interim, run, outlooks) {
  const analysed = isNumber(interim?.seconds) ? `interim analysis ${count(interim.number)} at ${clock(interim.seconds)}` : "";
  if (now.decided) return fact("Decision", now.decided, analysed);
  if (!run?.judged_once) {
    const outlook_s = Math.max(...outlooks), // -Infinity without any
      whole_s = tooLong(outlook_s, { interim, now });
    return fact("Likely decision", whole_s ? "not in this run" : isNumber(outlook_s) ? `in ${span(outlook_s)}` : DASH, analysed);
  }
  const left = now.duration_s * (now.trials - now.trial + 1) - (now.t_s ?? 0);
  return fact("Decision", now.state === "load" && left > 0 ? `in ${span(left)}` : "at the end", "once, when the traffic has ended");
}

// Whether answers have first tokens, as far as any answer shows: a vector has none.
function streaming(series) {
  const arms = series.load.flatMap((one) => Object.values(one.arms ?? {}));
  return arms.some((arm) => isNumber(arm.ttft_p99_ms)) || !arms.some((arm) => isNumber(arm.e2e_p99_ms));
}

// --- arms at a glance -------------------------------------------------------------------------------------------------

function showCards(seen) {
  const { run, now, interim, compiles, series } = seen;
  if (!run?.arms.length || !now) return;
  const load = last(series.load),
    shares = sharesOf(weightsNow(seen));
  renew(
    at("[data-cards]"),
    run.arms.map((arm, index) => {
      const own = load?.arms?.[arm.name] ?? {},
        built = compiles?.[arm.name],
        decided = interim?.arms?.[arm.name];
      const replicas = now.replicas.filter((one) => armOf(one.name, run.arms) === arm.name);
      const dead = replicas.some((one) => one.stage === "dead");
      const streams = streaming(series);
      const stages = [...new Set(replicas.map((one) => one.text || one.stage))];
      const pairs = [
        ...(streams ? [["p99 TTFT", ms(own.ttft_p99_ms), "last 10 s"]] : []),
        ["p99 E2E", ms(own.e2e_p99_ms), "last 10 s"],
        ["In flight", count(own.inflight), ""],
        ["Done", count(own.finished), own.failed ? `${count(own.failed)} failed` : ""],
        ["Compiles while serving", arm.reports_compiles ? count(built?.serving ?? 0) : DASH, built?.serving ? sec(built.serving_s) : ""],
        ...(isNumber(shares[arm.name]) ? [["Share", pct(shares[arm.name]), "of the traffic"]] : []),
        [replicas.length > 1 ? "Replicas" : "Replica", dead ? el("span", { class: "warned" }, stages.join(", ")) : stages.join(", ") || DASH, ""],
      ];
      return el(
        "article",
        { class: `card ${armClass(index)}` },
        el(
          "header",
          {},
          el("h2", {}, armTag(index, arm.name)),
          el("p", {}, arm.control ? chip(null, "control") : chip(decided?.decision, decided?.decision ?? "not decided"), arm.preset && arm.preset !== arm.name ? el("small", {}, ` ${arm.preset}`) : null),
        ),
        el("dl", {}, pairs.map(([name, value, note]) => fact(name, value, note))),
      );
    }),
  );
}

// --- latency, load and weights over time ------------------------------------------------------------------------------

// Seconds since the first traffic; trials stand one after the other.
const sinceStart = (series) => {
  const first = series.load[0]?.at_ns ?? series.interims[0]?.at_ns ?? 0;
  return (ns) => (ns - first) / 1e9;
};

function overTime(chart, seen, { label: text, parts, bands, none, at: valueOf = valueAt }) {
  const { series, run } = seen,
    since = sinceStart(series);
  const names = armNames(seen);
  const end = Math.max(1, ...series.load.slice(-1).map((one) => since(one.at_ns)));
  const lines = names.flatMap((name, arm) => parts(name).map((part) => ({ arm, faint: part.faint, steps: part.steps, parts: partsOf(part.points, part.separates) })));
  chart.update({
    label: text,
    none,
    x: [0, end],
    xs: series.load.map((one) => since(one.at_ns)),
    lines,
    bands: bands ?? [],
    tip: (at) => names.map((name, arm) => tip.row(arm, name, parts(name).map((part) => part.show(valueOf(part.points, at))).join(" / "))),
  });
}

const valueAt = (points, at) => points.find((point) => Math.abs(point[0] - at) < 1e-6)?.[1];
const armNames = ({ run, series }) => {
  const names = (run?.arms ?? []).map((arm) => arm.name);
  for (const name of Object.keys(last(series.load)?.arms ?? {})) if (!names.includes(name)) names.push(name);
  return names;
};

function latencyChart() {
  let chart = null,
    metric = "ttft",
    seen = null,
    offered = "";
  const controls = at("[data-latency-controls]");
  function draw() {
    const { series, run } = seen,
      since = sinceStart(series);
    const streams = streaming(series);
    if (!streams) metric = "e2e";
    const key = JSON.stringify([streams, armNames(seen)]);
    if (key !== offered) {
      offered = key;
      const choices = Object.entries(data.metrics).filter(([name]) => streams || name === "e2e");
      controls.replaceChildren(
        segments("Metric", choices, metric, (value) => {
          metric = value;
          draw();
        }),
        el("span", { class: "legend" }, armNames(seen).map((name, arm) => armTag(arm, name))),
      );
    }
    chart ??= curves(at('[data-chart="latency"]'), { height: 300, xText: clock, y: { log: true, format: ms } });
    const trials = new Map(series.load.map((one) => [since(one.at_ns), one.trial]));
    const separates = (before, after) => trials.get(before[0]) !== trials.get(after[0]);
    const values = (name, quantile) => series.load.map((one) => [since(one.at_ns), one.arms?.[name]?.[`${metric}_${quantile}_ms`]]);
    const names = armNames(seen),
      newest = last(series.load)?.arms ?? {};
    const current = names.map((name) => `${name} p50 ${ms(newest[name]?.[`${metric}_p50_ms`])}, p99 ${ms(newest[name]?.[`${metric}_p99_ms`])}`);
    overTime(chart, seen, {
      label: `${data.metrics[metric]} by arm over time, now ${current.join("; ")}`,
      none: "no answer yet",
      parts: (name) => [
        { points: values(name, "p50"), faint: true, separates, show: ms },
        { points: values(name, "p99"), separates, show: ms },
      ],
      bands: series.events
        .filter((event) => event.seconds > 0.02 && since(event.at_ns) >= 0)
        .map((event) => ({ arm: names.indexOf(event.arm), from: since(event.at_ns), to: since(event.at_ns) + event.seconds })),
    });
  }
  return (next) => {
    seen = next;
    draw();
  };
}

function loadCharts() {
  let inflight = null;
  return (seen) => {
    const { series } = seen,
      since = sinceStart(series);
    inflight ??= curves(at('[data-chart="inflight"]'), { height: 180, xText: clock, y: { zero: true, whole: true, format: count } });
    const trials = new Map(series.load.map((one) => [since(one.at_ns), one.trial]));
    const newest = last(series.load)?.arms ?? {};
    const current = armNames(seen).map((name) => `${name} ${count(newest[name]?.inflight)}`);
    overTime(inflight, seen, {
      label: `Requests in flight by arm over time, now ${current.join("; ")}`,
      none: "no traffic yet",
      parts: (name) => [{ points: series.load.map((one) => [since(one.at_ns), one.arms?.[name]?.inflight]), separates: (a, b) => trials.get(a[0]) !== trials.get(b[0]), show: count }],
    });
  };
}

const sharesOf = (weights) => {
  const total = Object.values(weights ?? {}).reduce((sum, weight) => sum + (weight ?? 0), 0);
  return Object.fromEntries(Object.entries(weights ?? {}).map(([name, weight]) => [name, total ? (100 * (weight ?? 0)) / total : null]));
};

// The weights now: the last that were set, or those of the experiment where weights decide.
function weightsNow({ run, series }) {
  if (series.weights.length) return last(series.weights).weights;
  return run?.design === "split" ? Object.fromEntries(run.arms.map((arm) => [arm.name, arm.weight ?? 1])) : {};
}

function weightParts() {
  let chart = null;
  return (seen) => {
    const { series } = seen,
      since = sinceStart(series);
    at("[data-weights]").hidden = !series.weights.length;
    if (!series.weights.length) return;
    chart ??= curves(at('[data-chart="weights"]'), { height: 140, xText: clock, y: { zero: true, format: pct } });
    const newest = last(series.weights),
      end = Math.max(since(last(series.load)?.at_ns ?? newest.at_ns), since(newest.at_ns)),
      shares = series.weights.map((one) => [since(one.at_ns), sharesOf(one.weights)]);
    const current = Object.entries(sharesOf(newest.weights)).map(([name, share]) => `${name} ${pct(share)}`).join("; ");
    const why = `Since ${clock(since(newest.at_ns))}: ${newest.why || "no reason is known"}.`.replace(/\.\.$/, ".");
    at("[data-weight-why]").textContent = why;
    overTime(chart, seen, {
      label: `Shares of the traffic by arm over time, now ${current}. ${why}`,
      parts: (name) => {
        const points = shares.map(([at, share]) => [at, share[name]]);
        return [{ points: [...points, [end, last(points)[1]]], steps: true, show: pct }];
      },
      at: (points, x) => points.findLast((point) => point[0] <= x)?.[1],
    });
  };
}

// --- compiles ---------------------------------------------------------------------------------------------------------

function cells(heads, rows, attributes, caption) {
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el(
      "table",
      attributes,
      el("caption", { class: "visually-hidden" }, caption),
      el("thead", {}, el("tr", {}, heads.map(([text, kind]) => el("th", { scope: "col", class: kind }, explained(text))))),
      ...rows,
    ),
  );
}
const MOST_EVENTS = 60;

function showCompiles(seen) {
  const { series, compiles, run } = seen,
    since = sinceStart(series),
    names = armNames(seen);
  const counted = names.filter((name) => compiles?.[name]);
  renew(
    at("[data-compiles]"),
    (counted.length
      ? [
          cells(
            [["Arm"], ["While serving", "num"], ["They took", "num"], ["Longest", "num"], ["Requests hit", "num"], ["In warm-ups", "num"], ["They took", "num"]],
            [
              el(
                "tbody",
                {},
                counted.map((name) => {
                  const own = compiles[name];
                  const shown = [count(own.serving), sec(own.serving_s), sec(own.longest_s), count(own.hit), count(own.warmup), sec(own.warmup_s)];
                  return el("tr", {}, el("th", { scope: "row" }, armTag(names.indexOf(name), name)), shown.map((value) => el("td", { class: "num" }, value)));
                }),
              ),
            ],
            { class: "counts" },
            "Compiles by arm",
          ),
        ]
      : []),
  );
  const newest = series.events.slice(-MOST_EVENTS).reverse();
  if (!newest.length) return;
  renew(
    at("[data-events]"),
    cells(
      [["When", "num"], ["Arm"], ["Kind"], ["Took", "num"], ["Requests", "num"], ["Shape"]],
      newest.map((event) =>
        el(
          "tbody",
          {},
          el(
            "tr",
            {},
            el("td", { class: "num" }, clock(since(event.at_ns))),
            el("th", { scope: "row" }, armTag(Math.max(0, names.indexOf(event.arm)), event.arm)),
            el("td", {}, explained(kindName(event.kind))),
            el("td", { class: "num" }, sec(event.seconds)),
            el("td", { class: "num" }, count(event.hit)),
            el("td", { class: "reason" }, el("code", {}, event.shape || DASH)),
          ),
          el("tr", {}, el("td", {}), el("td", { class: "reason", colspan: 5 }, event.reason || "no reason is known")),
        ),
      ),
      { class: "events" },
      "Compiles while serving, the newest first",
    ),
  );
}

function showUnderWay(seen) {
  const { now } = seen,
    names = armNames(seen);
  const going = (now?.replicas ?? []).filter((one) => one.compiling);
  renew(
    at("[data-under-way]"),
    going.map(({ compiling: { arm, shape, start_ns } }) =>
      el("p", {}, el("strong", {}, "Compiling now: "), armTag(Math.max(0, names.indexOf(arm)), arm), ` since ${sec((now.at_ns - start_ns) / 1e9)} `, shape ? el("code", {}, shape) : null),
    ),
  );
}

// --- checks -----------------------------------------------------------------------------------------------------------

const checkName = (check) => (check.arm ? `${check.check} (${check.arm})` : check.check);

function showChecks({ interim }) {
  if (!interim?.checks?.length) return;
  const bad = interim.checks.filter((check) => !check.ok);
  const good = interim.checks.filter((check) => check.ok);
  const rows = bad.map((check) =>
    el(
      "tr",
      {},
      el("td", {}, chip("INCONCLUSIVE", "limits")),
      el("th", { scope: "row" }, checkName(check)),
      el("td", { class: "reason" }, check.reason, check.remedy ? [" ", ...withCode(check.remedy)] : null),
    ),
  );
  const worst = bad.length
    ? cells([["Check"], ["Name"], ["Reason"]], [el("tbody", {}, rows)], { class: "checks" }, "Checks that limit the run")
    : el("p", { class: "empty" }, "No check limits this run.");
  const open = at("[data-checks] details")?.open;
  const title = el("summary", {}, `${good.length} of ${interim.checks.length} checks pass`);
  const fold = el("details", { class: "fold", open }, title, el("p", {}, `${good.map(checkName).join(", ")}.`));
  renew(at("[data-checks]"), worst, good.length ? fold : null);
}

// --- machines ---------------------------------------------------------------------------------------------------------

function spark(values) {
  const known = values.filter(isNumber);
  if (known.length < 3) return null;
  // A tenth of what there is fills the height at least: what hardly moves is drawn as hardly moving.
  const high = Math.max(...known),
    low = Math.min(...known, high - 0.1 * Math.abs(high || 1));
  const x = scale([0, values.length - 1], [1, 95]),
    y = scale([low, high], [20, 2]);
  return svg(
    "svg",
    { class: "spark", viewBox: "0 0 96 22", "aria-hidden": "true" },
    ...partsOf(values.map((value, i) => [x(i), value])).map((part) => svg("path", { class: "line", d: pathOf(part.map(([px, value]) => [px, y(value)])) })),
  );
}

function showMachines({ series }) {
  const samples = series.machines.slice(-300),
    newest = last(samples)?.things;
  if (!newest) return;
  const names = Object.keys(newest);
  const history = (name, key) => samples.map((sample) => sample.things[name]?.[key]);
  const cell = (name, key, show, limitKey) => {
    const own = newest[name],
      limit = own[limitKey];
    if (!isNumber(own[key])) return el("td", { class: "num" }, DASH);
    return el("td", { class: "num" }, show(own[key]), isNumber(limit) ? el("small", {}, ` of ${show(limit)}`) : null, spark(history(name, key)));
  };
  const mhz = (value) => `${count(value)}\u00a0MHz`,
    watts = (value) => `${count(value)}\u00a0W`,
    degrees = (value) => `${count(value)}\u00a0°C`;
  renew(
    at("[data-machines]"),
    cells(
      [["Machine"], ["Clock", "num"], ["Busy", "num"], ["Power", "num"], ["Memory", "num"], ["Temperature", "num"], ["Throttling or steal"]],
      [
        el(
          "tbody",
          {},
          names.map((name) => {
            const own = newest[name],
              device = own.kind === "device";
            const held = device
              ? [...own.throttle.map((reason) => reason.replaceAll("_", " ")), ...(own.foreign_processes ? [`${count(own.foreign_processes)} ${own.foreign_processes === 1 ? "process" : "processes"} of others`] : [])]
              : isNumber(own.steal_pct) ? [`${pct(own.steal_pct)} stolen`] : [];
            return el(
              "tr",
              {},
              el("th", { scope: "row" }, device ? name : "host", device ? null : el("small", {}, ` ${count(own.cpus)} ${own.cpus === 1 ? "processor" : "processors"}`)),
              cell(name, "sm_mhz", mhz),
              cell(name, device ? "utilisation_pct" : "busy_pct", pct),
              cell(name, "power_w", watts, "power_limit_w"),
              cell(name, "memory_bytes", bytes, "memory_limit_bytes"),
              cell(name, "temperature_c", degrees),
              el("td", { class: (device ? held.length : own.steal_pct >= 1) ? "warned" : "" }, held.join(", ") || (device ? "none" : DASH)),
            );
          }),
        ),
      ],
      { class: "machines-now" },
      "The machines now",
    ),
  );
}

// --- notes ------------------------------------------------------------------------------------------------------------

function showNotes({ now: { notes } }) {
  if (!notes?.length) return;
  renew(at("[data-notes]"), notes.slice().reverse().map((note) => el("li", {}, withCode(note))));
}
