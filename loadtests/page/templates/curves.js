// Curves over time that grow: the drawing is made anew, the picture and the focus on it stay.

// `y`: { log, zero, whole, format }; `xText` says a position. `update` takes { label, lines, areas, bands, limit, unity, x, tip }:
// lines [{ arm, parts: [[[x, y], …], …], faint, steps }], areas [{ arm, points: [[x, low, high], …] }],
// bands [{ arm, from, to }], tip(x) the rows to show, xs the positions that arrows walk.
function curves(host, { height, y: rule, xText, compact }) {
  const root = svg("svg", { class: "plot", tabindex: "0", role: "img", height });
  host.replaceChildren(root);
  let width = 0,
    shown = null,
    cursor = null,
    place = null;

  function draw() {
    if (!shown || !width) return;
    root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    root.setAttribute("aria-label", shown.label);
    const drawable = (value) => isNumber(value) && (!rule.log || value > 0);
    const values = shown.lines.flatMap((one) => one.parts.flat().map((point) => point[1]));
    const ends = [...values, shown.limit, shown.unity].filter(drawable);
    if (!ends.length) return root.replaceChildren(labelWithin(width, width / 2, height / 2, shown.none ?? "no values yet", "middle"));
    const spread = shown.areas?.flatMap((area) => area.points.flatMap((point) => point.slice(1))).filter(drawable) ?? [];
    const domain = yDomain(ends, spread, rule);
    const ticks = (rule.log ? logTicks : linearTicks)(domain, compact ? 3 : 5).filter((tick) => !(rule.whole && tick % 1));
    const left = Math.max(...ticks.map((tick) => textWidth(rule.format(tick))), 20) + 8,
      right = 10,
      top = compact ? 8 : 12,
      base = height - 20;
    const x = scale(shown.x, [left, width - right]),
      y = scale(domain, [base, top], rule.log),
      clip = (value, otherwise) => Math.max(top, Math.min(base, drawable(value) ? y(value) : otherwise));
    place = { x, left, right: width - right, top, base };
    const parts = [];
    for (const band of shown.bands ?? [])
      parts.push(rect(x(band.from), top, Math.max(1.5, x(band.to) - x(band.from)), base - top, { class: `band ${armClass(band.arm)}` }));
    if (drawable(shown.limit) && !shown.lowest) parts.push(rect(left, top, width - right - left, clip(shown.limit) - top, { class: "worse" }));
    for (const tick of ticks) parts.push(line(left, y(tick), width - right, y(tick), "grid"), label(left - 6, y(tick) + 4, rule.format(tick), "end"));
    const times = ticksApart(timeTicks(shown.x, compact ? 4 : width / 110), x, xText);
    for (const tick of times) parts.push(labelWithin(width, x(tick), height - 4, xText(tick), "middle"));
    parts.push(line(left, base, width - right, base, "axis"));
    for (const area of shown.areas ?? []) {
      const up = area.points.map(([at, , high]) => [x(at), clip(high, top)]),
        down = area.points.map(([at, low]) => [x(at), clip(low, base)]).reverse();
      if (area.points.length > 1) parts.push(svg("path", { class: `range ${armClass(area.arm)}`, d: `${pathOf([...up, ...down])}Z` }));
      else if (up.length) parts.push(svg("g", { class: armClass(area.arm) }, line(up[0][0], up[0][1], down[0][0], down[0][1], "whisker")));
    }
    if (drawable(shown.unity)) parts.push(line(left, y(shown.unity), width - right, y(shown.unity), "unity"));
    if (drawable(shown.limit)) parts.push(line(left, clip(shown.limit), width - right, clip(shown.limit), "limit"));
    for (const one of shown.lines) {
      const group = svg("g", { class: armClass(one.arm) });
      for (const part of one.parts) {
        const points = part.filter((point) => drawable(point[1])).map(([at, value]) => [x(at), clip(value)]);
        if (!points.length) continue;
        group.append(svg("path", { class: one.faint ? "line faint" : "line", d: pathOf(one.steps ? stepped(points) : points) }));
      }
      const last = one.parts.at(-1)?.at(-1);
      if (last && drawable(last[1]) && !one.faint) group.append(marker(one.arm, x(last[0]), clip(last[1])));
      parts.push(group);
    }
    const cross = svg("g", { "data-cross": true });
    parts.push(cross);
    root.replaceChildren(...parts);
    if (cursor !== null && document.activeElement === root) point(cursor);
  }

  function point(at) {
    cursor = at;
    const cross = root.querySelector("[data-cross]");
    if (!cross || !place) return;
    cross.replaceChildren(line(place.x(at), place.top, place.x(at), place.base, "cross"));
    const box = root.getBoundingClientRect(),
      ratio = box.width / width;
    tip.show(box.left + place.x(at) * ratio, box.top + place.top, el("p", {}, el("b", {}, xText(at))), shown.tip?.(at) ?? []);
  }
  function leave() {
    cursor = null;
    root.querySelector("[data-cross]")?.replaceChildren();
    tip.hide();
  }
  const nearest = (at) => shown.xs.reduce((best, one) => (Math.abs(one - at) < Math.abs(best - at) ? one : best), shown.xs[0]);
  root.addEventListener("pointermove", (event) => {
    if (!place || !shown?.xs.length) return;
    const box = root.getBoundingClientRect();
    point(nearest(place.x.invert(((event.clientX - box.left) / box.width) * width)));
  });
  root.addEventListener("pointerleave", leave);
  root.addEventListener("blur", leave);
  root.addEventListener("keydown", (event) => {
    if (!shown?.xs.length) return;
    const here = cursor === null ? shown.xs.length : shown.xs.indexOf(nearest(cursor)),
      last = shown.xs.length - 1;
    const next = { ArrowLeft: Math.max(0, here - 1), ArrowRight: Math.min(last, here + 1), Home: 0, End: last }[event.key];
    if (event.key === "Escape") leave();
    if (next === undefined) return;
    point(shown.xs[Math.min(last, next)]);
    event.preventDefault();
  });
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 1) return;
    width = Math.max(160, entry.contentRect.width);
    draw();
  }).observe(host);
  width = Math.max(160, host.clientWidth);
  return {
    update(next) {
      shown = next;
      draw();
    },
  };
}

// Wide enough for values, limit and 1; an interval may reach beyond, and is cut there.
function yDomain(ends, spread, rule) {
  let low = Math.min(...ends),
    high = Math.max(...ends);
  if (rule.log) {
    const factor = Math.max(high / low, 1.15) ** 0.6;
    low = Math.max(Math.min(low, ...spread), low / factor) / 1.06;
    high = Math.min(Math.max(high, ...spread), high * factor) * 1.06;
    return [low, high];
  }
  const range = high - low || Math.abs(high) || 1;
  high = Math.min(Math.max(high, ...spread), high + range * 0.6) + range * 0.08;
  low = rule.zero ? Math.min(0, low) : Math.max(Math.min(low, ...spread), low - range * 0.6) - range * 0.08;
  return [low, rule.whole ? Math.max(1, high) : high]; // for two ticks
}

const stepped = (points) => points.flatMap((point, i) => (i ? [[point[0], points[i - 1][1]], point] : [point]));

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
function timeTicks([low, high], wanted) {
  const step = TIME_STEPS.find((one) => (high - low) / one <= wanted) ?? TIME_STEPS.at(-1);
  const ticks = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) ticks.push(at);
  return ticks;
}

// [[x, y], …] cut where a value is missing or where `separates` says that two points do not belong together.
function partsOf(points, separates) {
  const parts = [];
  let before = null;
  for (const one of points) {
    if (!isNumber(one[1])) before = null;
    else {
      if (!before || separates?.(before, one)) parts.push([]);
      parts.at(-1).push(one);
      before = one;
    }
  }
  return parts;
}

const clock = (seconds) => {
  const whole = Math.max(0, Math.round(seconds)),
    two = (value) => String(value).padStart(2, "0");
  return whole < 3600 ? `${Math.floor(whole / 60)}:${two(whole % 60)}` : `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
};
const span = (seconds) => {
  if (!isNumber(seconds)) return DASH;
  if (seconds < 120) return `${Math.round(seconds)}\u00a0s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes}\u00a0min` : `${figure(seconds / 3600)}\u00a0h`;
};
const bytes = (value) => {
  if (!isNumber(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < units.length - 1) {
    value /= 1024;
    at++;
  }
  return `${figure(value)}\u00a0${units[at]}`;
};
const fine = (value) => (isNumber(value) ? `×${value < 10 ? value.toFixed(3) : figure(value)}` : DASH);
const UNITS = { ratio: fine, ms, s: sec, pct, count, rps: (value) => (isNumber(value) ? `${figure(value)}\u00a0/s` : DASH), bytes };
const quantity = (value, unit) => (UNITS[unit] ?? figure)(value);
