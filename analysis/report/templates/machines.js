// The machines over time: latency above, and below it on the same axis what devices and hosts did.

const PANEL = 64;
const PANEL_GAP = 30;
const DEVICE_PANELS = [
  ["sm_mhz", "SM clock", (value) => `${count(value)}\u00a0MHz`],
  ["power_w", "Power", (value) => `${count(value)}\u00a0W`],
  ["temperature_c", "Temperature", (value) => `${count(value)}\u00a0°C`],
  ["utilisation_pct", "Utilisation", pct],
];
const HOST_LINES = [
  ["busy_pct", "busy"],
  ["pressure_memory_pct", "waiting for memory"],
  ["steal_pct", "stolen"],
];

function machines(host, data) {
  const rows = data.machines?.rows ?? [];
  if (!rows.length) return empty(host, "Nothing was sampled of the machines.");
  panelsOverTime(host, rows, (state, width) => machineView(data, rows, state, width));
}

// Panels over one time axis, a trial at a time.
function panelsOverTime(host, rows, viewOf) {
  const known = [...new Set(rows.map((row) => row.trial))].sort((a, b) => a - b);
  const state = { trial: known[0], cursor: null };
  const plot = el("div");
  const picker = el(
    "select",
    { onchange: (event) => ((state.trial = Number(event.target.value)), draw()) },
    known.map((trial) => el("option", { value: trial }, String(trial))),
  );
  if (known.length > 1) host.append(el("div", { class: "controls" }, el("label", {}, "Trial ", picker)));
  host.append(plot);
  const draw = responsive(plot, (width) => {
    const view = viewOf(state, width);
    const root = panelFrame(state, view);
    for (const panel of view.panels) root.append(drawnPanel(view, panel));
    const stops = view.lanes.flatMap((lane) => drawnLane(root, view, lane));
    walkable(stops, (i) => el("p", {}, stops[i].getAttribute("aria-label")));
    panelReader(root, view, state);
    plot.replaceChildren(root, panelLegend(view));
  });
}

function machineView(data, rows, state, width) {
  const own = rows.filter((row) => row.trial === state.trial);
  const devices = own.filter((row) => row.kind === "device"),
    hosts = own.filter((row) => row.kind === "host");
  const latency = own
    .filter((row) => row.kind === "arm")
    .map((row) => ({ name: row.label, arm: row.arm, points: row.t_s.map((t, i) => [t, row.e2e_p99_ms?.[i]]) }));
  const bin = data.machines.bin_s || 1,
    stretch = data.machines.stretch_s || bin;
  const several = new Set(hosts.map((row) => row.host)).size > 1;
  const lineOf = (row, key, extra) => ({ points: row.t_s.map((t, i) => [t, row[key]?.[i]]), ...extra });
  const panels = [
    { title: `p99 E2E by ${sec(stretch)}`, show: ms, log: true, lines: latency, bin: stretch },
    ...DEVICE_PANELS.map(([key, title, show]) => ({
      title,
      show,
      lines: devices.map((row) => lineOf(row, key, { name: row.label, arm: row.arm })),
    })),
    ...hosts.map((row) => ({
      title: several ? `Host ${row.host}` : "Host",
      show: pct,
      lines: HOST_LINES.map(([key, name], style) => lineOf(row, key, { name, style })),
    })),
  ].map((panel) => ({ bin, ...panel }));
  const lanes = devices.flatMap((row) =>
    [
      ["throttled", "throttled", "Throttled", (value) => `${pct(100 * value)} of the samples`],
      ["foreign", "foreign", "Processes of others", (value) => `${figure(value)} at most`],
    ]
      .filter(([key]) => row[key]?.some((value) => value > 0))
      .map(([key, kind, title, show]) => ({ kind, title: `${title}: ${row.label}`, row, key, show })),
  );
  return panelView({ name: "The machines", panels, lanes, bin, width, seconds: data.duration_s });
}

// Panels, lanes and scales of one trial. A line is { name, arm, style, points: [[t, value]] }.
function panelView({ name, panels: all, lanes, bin, width, seconds }) {
  const panels = all
    .map((panel) => ({ ...panel, lines: panel.lines.filter((one) => one.points.some(([, value]) => isNumber(value))) }))
    .filter((panel) => panel.lines.length);
  const ends = panels.flatMap((panel) => panel.lines.flatMap((one) => one.points.map(([t]) => t + panel.bin)));
  const domain = [0, ends.reduce((a, b) => Math.max(a, b), seconds || 1)];
  let top = 22;
  for (const panel of panels) {
    const values = panel.lines.flatMap((one) => one.points.map(([, value]) => value)).filter(isNumber);
    const most = values.reduce((a, b) => Math.max(a, b)),
      least = values.reduce((a, b) => Math.min(a, b));
    const range = panel.log ? [Math.max(1e-3, least) * 0.8, Math.max(1e-3, most) * 1.3] : [0, most * 1.12 || 1];
    Object.assign(panel, { top, bottom: top + PANEL, y: scale(range, [top + PANEL, top], panel.log), range });
    panel.ticks = panel.log ? logTicks(range, 3) : linearTicks(range, 2).map((tick) => tick + 0);
    top += PANEL + PANEL_GAP;
  }
  for (const lane of lanes) {
    lane.top = top - 16;
    top += 38;
  }
  const left = Math.max(
    58,
    ...panels.flatMap((panel) => panel.ticks.map((tick) => textWidth(panel.show(tick)) + 10)),
  );
  const right = width - 14;
  return { name, panels, lanes, domain, bin, left, right, width, height: top + 8, x: scale(domain, [left, right]) };
}

function panelFrame(state, view) {
  const { x, left, right, width, height } = view;
  const said = view.panels.map((panel) => panel.title).join(", ");
  const root = svg("svg", {
    class: "plot",
    viewBox: `0 0 ${width} ${height}`,
    height,
    tabindex: "0",
    role: "group",
    "aria-label": `${view.name} over time, trial ${state.trial}: ${said}. Arrows read values.`,
  });
  const seconds = (tick) => `${figure(tick)} s`;
  for (const tick of ticksApart(linearTicks(view.domain, Math.max(3, width / 100)), x, seconds)) {
    root.append(labelWithin(width, x(tick), height - 8, seconds(tick), "middle"));
    for (const panel of view.panels) root.append(line(x(tick), panel.top, x(tick), panel.bottom, "grid"));
  }
  for (const panel of view.panels) {
    root.append(label(left, panel.top - 7, panel.title, "start", "strong"));
    for (const tick of panel.ticks)
      root.append(
        line(left, panel.y(tick), right, panel.y(tick), "grid"),
        label(left - 8, panel.y(tick) + 4, panel.show(tick), "end"),
      );
    root.append(line(left, panel.bottom, right, panel.bottom, "axis"));
  }
  return root;
}

function drawnPanel(view, panel) {
  const group = svg("g", {});
  panel.lines.forEach((one, place) => {
    const named = isNumber(one.arm);
    const cls = named ? armClass(one.arm) : isNumber(one.style) ? `host-${one.style}` : "idle";
    const known = one.points.filter(([, value]) => isNumber(value)).map(([t, value]) => ({ t: t + panel.bin / 2, value }));
    const own = svg("g", { class: cls });
    for (const run of runs(known, 4 * panel.bin))
      own.append(svg("path", { class: "line", d: pathOf(run.map((at) => [view.x(at.t), panel.y(at.value)])) }));
    let last = view.left - 60 + 40 * place;
    for (const at of named ? known : []) {
      if (view.x(at.t) - last < 120) continue;
      own.append(marker(one.arm, (last = view.x(at.t)), panel.y(at.value)));
    }
    group.append(own);
  });
  return group;
}

// Stretches in which a device was throttled, or used by others too, as bars that the keyboard walks.
function drawnLane(root, view, lane) {
  const { x, left, right, bin } = view;
  root.append(
    label(left, lane.top + 11, lane.title, "start"),
    rect(left, lane.top + 16, right - left, 14, { class: "lane", rx: 3 }),
  );
  const marks = lane.row.t_s.map((t, i) => ({ t, value: lane.row[lane.key][i] })).filter((at) => at.value > 0);
  return runs(marks, 1.5 * bin).map((run) => {
    const from = run[0].t,
      until = run.at(-1).t + bin,
      most = run.reduce((a, b) => Math.max(a, b.value), 0);
    const said = `${lane.title}, from ${sec(from)} to ${sec(until)}, ${lane.show(most)}`;
    const size = Math.max(3, x(until) - x(from));
    const bar = svg(
      "g",
      { role: "img", "aria-label": said },
      rect(x(from), lane.top + 16, size, 14, { class: `trouble ${lane.kind} halo-bar`, rx: 2 }),
    );
    root.append(bar);
    return bar;
  });
}

// A cross through all panels that shows every value at a time: by pointer, or by the arrow keys.
function panelReader(root, view, state) {
  const { x, left, right, width, height, domain, bin } = view;
  const cross = line(left, 14, left, height - 22, "cross");
  cross.setAttribute("visibility", "hidden");
  const read = (t, px, py) => {
    for (const end of ["x1", "x2"]) cross.setAttribute(end, x(t));
    cross.setAttribute("visibility", "visible");
    const parts = view.panels.flatMap((panel) => [
      el("p", {}, el("b", {}, panel.title)),
      ...panel.lines.map((one) => {
        const near = one.points.find(([from]) => from <= t && t < from + panel.bin);
        const value = panel.show(near?.[1]);
        if (isNumber(one.arm)) return tip.row(one.arm, one.name, value);
        return el("div", { class: "tip-row" }, el("span", {}, one.name), el("b", {}, value));
      }),
    ]);
    tip.show(px, py, el("p", {}, `At ${sec(t)}, trial ${state.trial}`), parts);
  };
  const hide = () => {
    tip.hide();
    cross.setAttribute("visibility", "hidden");
  };
  const bottom = view.panels.at(-1)?.bottom ?? 0;
  const surface = rect(left, 14, right - left, bottom - 14, { class: "hit" });
  surface.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect();
    const t = x.invert(((event.clientX - box.left) / box.width) * width);
    read(Math.min(domain[1], Math.max(domain[0], t)), event.clientX, event.clientY);
  });
  surface.addEventListener("pointerleave", hide);
  root.append(cross, surface);
  root.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!move) return;
    const at = state.cursor ?? (domain[0] + domain[1]) / 2;
    state.cursor = Math.min(domain[1], Math.max(domain[0], at + move * Math.max(bin, (domain[1] - domain[0]) / 100)));
    const box = root.getBoundingClientRect();
    read(state.cursor, box.left + (x(state.cursor) / width) * box.width, box.top + 40);
    event.preventDefault();
  });
  root.addEventListener("blur", hide);
}

function panelLegend(view) {
  const entries = [];
  for (const panel of view.panels) {
    for (const one of panel.lines) {
      if (entries.some(([key]) => key === `${one.name} ${one.arm ?? ""}`)) continue;
      const cls = isNumber(one.arm) ? armClass(one.arm) : isNumber(one.style) ? `host-${one.style}` : "idle";
      const sample = svg(
        "svg",
        { class: "sample", viewBox: "0 0 26 12", "aria-hidden": "true" },
        svg("path", { class: "line", d: "M1 6H25" }),
        isNumber(one.arm) ? marker(one.arm, 13, 6) : null,
      );
      entries.push([`${one.name} ${one.arm ?? ""}`, el("span", { class: cls }, sample, one.name)]);
    }
  }
  return el(
    "p",
    { class: "muted legend" },
    entries.map(([, node]) => node),
  );
}
