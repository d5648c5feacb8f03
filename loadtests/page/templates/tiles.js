// Tiles of the gates: one for each, made once and changed in place, so that focus and place stay.

const icon = (name) => document.querySelector(`template[data-icon="${name}"]`).content.firstElementChild.cloneNode(true);
const CHIPS = { PASS: "chip-pass", FAIL: "chip-fail", INCONCLUSIVE: "chip-inconclusive" };
const chip = (verdict, text) =>
  el("span", { class: `chip ${CHIPS[verdict] ?? "chip-none"}` }, verdict in CHIPS ? icon(verdict) : null, text ?? verdict ?? "open");
const armTag = (index, name) => el("span", { class: `arm-tag ${armClass(index)}` }, swatch(index), name);

// How long the traffic has to be for a decision where that is longer than the run, by more than an estimate shows, else null.
function tooLong(outlook_s, { interim, now }) {
  const whole_s = (interim?.seconds ?? 0) + outlook_s;
  return now?.duration_s > 0 && whole_s > 1.05 * now.duration_s * now.trials ? whole_s : null;
}

function outlook(of, seen) {
  if (isNumber(of.decided_s)) return `Decided after ${span(of.decided_s)}.`;
  if (!isNumber(of.outlook_s)) return "";
  const after = `${span((seen.interim?.seconds ?? 0) + of.outlook_s)} of traffic`;
  return tooLong(of.outlook_s, seen) ? `Likely not in this run: a decision takes about ${after}.` : `Likely decided in about ${span(of.outlook_s)}, after ${after}.`;
}

function evidence(gate) {
  const said = [];
  const of = (has, takes) => `${figure(Math.max(0, has))}${isNumber(takes) ? ` of ${figure(takes)} needed` : ""}`;
  if (isNumber(gate.safety)) said.push(`for a PASS: ${of(gate.safety, gate.needed_safety)}`);
  if (isNumber(gate.harm)) said.push(`for a FAIL: ${of(gate.harm, gate.needed)}`);
  return said.length ? `Evidence (log10) ${said.join("; ")}.` : "";
}

function tile(index) {
  const name = el("h4", {}),
    verdict = el("span", {}),
    value = el("b", {}),
    interval = el("span", { class: "interval" }),
    limit = el("span", { class: "of-limit" }),
    when = el("p", { class: "outlook" }),
    reason = el("p", { class: "reason" }),
    host = el("div", { class: "chart" });
  const head = el("header", {}, name, el("p", { class: "tile-verdict" }, verdict, limit));
  const node = el("article", { class: "tile" }, head, el("p", { class: "tile-figure" }, value, " ", interval), host, when, reason);
  let drawing = null,
    unit = null;
  return {
    node,
    update(gate, points, seen) {
      const label = gate.label ?? gate.gate;
      const show = (number) => quantity(number, gate.unit);
      node.className = `tile tile-${(gate.verdict ?? "none").toLowerCase()}`;
      renew(name, explained(label));
      renew(verdict, chip(gate.verdict));
      value.textContent = show(gate.value);
      const bounded = isNumber(gate.low) || isNumber(gate.high);
      interval.textContent = bounded ? `[${show(gate.low)}, ${show(gate.high)}]`.replaceAll("×", "") : "";
      limit.textContent = isNumber(gate.limit) ? `limit ${show(gate.limit)}` : "";
      when.textContent = outlook(gate, seen);
      when.hidden = !when.textContent;
      reason.textContent = [gate.reason, evidence(gate)].filter(Boolean).join(" ");
      reason.title = reason.textContent;
      if (!drawing || unit !== gate.unit) {
        unit = gate.unit;
        const log = unit === "ratio";
        drawing = curves(host, { height: 132, compact: true, xText: clock, y: { log, zero: !log, whole: unit === "count", format: (tick) => quantity(tick, unit).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "") } });
      }
      const known = points.filter((point) => isNumber(point[1]));
      const first = points.length ? points[0][0] : 0,
        last = points.length ? points.at(-1)[0] : 1;
      const banded = points.filter((point) => isNumber(point[2]) || isNumber(point[3]));
      drawing.update({
        label: `${label}: ${value.textContent} ${interval.textContent}, ${limit.textContent || "no limit"}, ${gate.verdict ?? "not judged"}, over ${points.length} interim analyses`,
        x: [first === last ? 0 : first, last],
        xs: points.map((point) => point[0]),
        lines: [{ arm: index, parts: partsOf(known) }],
        areas: banded.length ? [{ arm: index, points: banded.map(([at, , low, high]) => [at, low, high]) }] : [],
        limit: gate.limit,
        unity: unit === "ratio" ? 1 : null,
        lowest: isNumber(gate.value) && isNumber(gate.limit) && (gate.verdict === "PASS" ? gate.value > gate.limit : gate.verdict === "FAIL" && gate.value < gate.limit),
        tip: (at) => {
          const here = points.find((point) => point[0] === at);
          return here ? [tip.row(index, label, show(here[1])), el("div", { class: "tip-row" }, el("span", {}, "interval"), el("b", {}, `[${show(here[2])}, ${show(here[3])}]`.replaceAll("×", "")))] : [];
        },
      });
    },
  };
}

// (arm, gate) => [[seconds, value, low, high], …] over all interim analyses.
function analysedAt(series) {
  const points = new Map();
  for (const one of series.interims) {
    if (!isNumber(one.seconds)) continue;
    for (const [arm, gate, ...rest] of one.gates) {
      const key = JSON.stringify([arm, gate]);
      if (!points.has(key)) points.set(key, []);
      points.get(key).push([one.seconds, ...rest]);
    }
  }
  return (arm, gate) => points.get(JSON.stringify([arm, gate])) ?? [];
}

function gateTiles(host) {
  const groups = new Map(); // of arms
  return (seen, indexOf) => {
    const { interim, series } = seen;
    if (!interim?.gates?.length) return;
    if (!groups.size) host.replaceChildren();
    const points = analysedAt(series);
    for (const gate of interim.gates) {
      const index = indexOf(gate.arm);
      if (!groups.has(gate.arm)) {
        const head = el("h3", {}),
          said = el("p", { class: "shared" }),
          grid = el("div", { class: "tiles" });
        host.append(el("section", { class: "tile-group", "aria-label": `Gates of ${gate.arm}` }, head, said, grid));
        groups.set(gate.arm, { head, said, grid, tiles: new Map() });
      }
      const group = groups.get(gate.arm);
      if (!group.tiles.has(gate.gate)) {
        const made = tile(index);
        group.tiles.set(gate.gate, made);
        group.grid.append(made.node);
      }
      group.tiles.get(gate.gate).update(gate, points(gate.arm, gate.gate), seen);
    }
    for (const [arm, group] of groups) {
      const decided = interim.arms?.[arm] ?? {};
      renew(group.head, armTag(indexOf(arm), arm), chip(decided.decision, decided.decision ?? "not decided"));
      group.said.textContent = [outlook(decided, seen), decided.reason].filter(Boolean).join(" ");
      group.said.hidden = !group.said.textContent;
    }
  };
}
