// The marks of the chart over time: frame, lines with bands and spikes, lanes of compiles, legend.

function timelineFrame(data, state, view) {
  const { x, y, left, right, top, bottom, width, height } = view;
  const names = view.shown.map((index) => data.arms[index].name).join(", ");
  const said = `${state.statistic} ${state.metric.toUpperCase()} over time, ${names}. Arrows read values, plus and minus zoom, 0 resets.`;
  const root = svg("svg", {
    class: "plot",
    viewBox: `0 0 ${width} ${height}`,
    height,
    tabindex: "0",
    role: "group",
    "aria-label": said,
  });
  root.append(svg("defs", {}, svg("clipPath", { id: view.clip }, rect(left, 0, right - left, height))));
  for (const tick of view.yTicks)
    root.append(line(left, y(tick), right, y(tick), "grid"), label(left - 8, y(tick) + 4, ms(tick), "end"));
  const seconds = (tick) => `${figure(tick)} s`;
  for (const tick of ticksApart(linearTicks(view.domain, Math.max(3, width / 100)), x, seconds))
    root.append(labelWithin(width, x(tick), height - 10, seconds(tick), "middle"));
  for (const edge of blockEdges(view.domain, data.block_s))
    root.append(line(x(edge), top, x(edge), bottom, "block-edge"));
  root.append(line(left, bottom, right, bottom, "axis"));
  return root;
}

// Block borders inside the window, unless they would crowd it.
function blockEdges([low, high], each) {
  if (!isNumber(each) || each <= 0 || (high - low) / each > 60) return [];
  return Array.from({ length: Math.floor(high / each) }, (_, k) => (k + 1) * each).filter((edge) => edge > low);
}

function timelineLines(data, state, view) {
  const { x, y, left, right, top, bottom, lines } = view;
  const body = svg("g", { "clip-path": `url(#${view.clip})` });
  for (const event of view.events)
    body.append(
      rect(x(event.offset_s), top, x(endOf(event)) - x(event.offset_s), bottom - top, { class: `band ${armClass(event.arm)}` }),
    );
  for (const stall of view.stalls) {
    const size = Math.max(4, x(endOf(stall)) - x(stall.offset_s));
    const box = rect(x(stall.offset_s), top, size, bottom - top, { class: `stall-mark ${armClass(stall.arm)}` });
    box.append(svg("title", {}, stallName(data, stall)));
    body.append(box);
  }
  if (isNumber(view.limit))
    body.append(
      line(left, y(view.limit), right, y(view.limit), "limit"),
      label(right - 4, y(view.limit) - 5, `SLO ${ms(view.limit)}`, "end", "limit-text"),
    );
  for (const [index, points] of lines) {
    const group = svg("g", { class: armClass(index) });
    const drawn = thinned(points, view);
    for (const run of runs(drawn, Math.max(6 * view.bin, 6, x.invert(12) - x.invert(0)))) {
      const above = run.map((point) => [x(point.t), y(point.high)]);
      const below = run.map((point) => [x(point.t), y(point.low)]).reverse();
      if (drawn !== points) group.append(svg("path", { class: "range", d: `${pathOf([...above, ...below])}Z` }));
      group.append(svg("path", { class: "line", d: pathOf(run.map((point) => [x(point.t), y(point.value)])) }));
    }
    let last = -Infinity;
    for (const point of drawn) {
      if (x(point.t) - last >= (drawn.length > 150 ? 90 : 26))
        group.append(marker(index, (last = x(point.t)), y(point.value)));
    }
    for (const point of points) {
      if (point.failed > 0)
        group.append(svg("path", { class: "fail-mark", d: `M${x(point.t) - 3} ${bottom - 8}l6 6m0-6l-6 6` }));
    }
    body.append(group);
  }
  for (const spike of view.spikes) {
    const points = lines.find(([index]) => index === spike.arm)?.[1] ?? [];
    const inside = points.filter((point) => point.from + 2 * view.bin > spike.offset_s && point.from <= endOf(spike));
    const peak = inside.reduce((a, b) => (!a || b.value > a.value ? b : a), null);
    if (peak)
      body.append(svg("circle", { class: `peak ${armClass(spike.arm)}`, cx: x(peak.t), cy: y(peak.value), r: 8 }));
  }
  const brush = rect(0, top, 0, bottom - top, { class: "brush" });
  const cross = line(0, top, 0, view.lanes + view.laned.length * LANE, "cross");
  cross.setAttribute("visibility", "hidden");
  body.append(brush, cross);
  return { body, brush, cross };
}

const stallName = (data, stall) =>
  `${data.arms[stall.arm].name} stalled at ${sec(stall.offset_s)} for ${sec(stall.seconds)}, no compile event`;

// Where bins are closer than 2 px: for every 4 px the median bin, with its lowest and highest.
function thinned(points, view) {
  if (points.length <= (view.right - view.left) / 2) return points;
  const columns = new Map();
  for (const point of points) {
    const column = Math.floor(view.x(point.t) / 4);
    columns.set(column, [...(columns.get(column) ?? []), point]);
  }
  return [...columns.values()].map((inside) => {
    const ordered = inside.map((point) => point.value).sort((a, b) => a - b);
    const t = inside[Math.floor(inside.length / 2)].t;
    return { t, value: ordered[Math.floor(ordered.length / 2)], low: ordered[0], high: ordered.at(-1) };
  });
}

// Points split where more than `gap` seconds lie between two, so that a line never bridges silence.
function runs(points, gap) {
  const found = [];
  points.forEach((point, i) => {
    if (!i || point.t - points[i - 1].t > gap) found.push([]);
    found.at(-1).push(point);
  });
  return found;
}

function timelineLanes(data, view) {
  const nodes = view.laned.flatMap((index, row) => {
    const top = view.lanes + row * LANE;
    return [
      rect(view.left, top + 16, view.right - view.left, 16, { class: "lane", rx: 3 }),
      label(view.left, top + 11, `${short(data.arms[index].name, view.right - view.left - 80)}: compiles`),
    ];
  });
  const stops = view.events.map((event) => {
    const top = view.lanes + view.laned.indexOf(event.arm) * LANE + 16,
      from = view.x(event.offset_s),
      size = Math.max(4, view.x(endOf(event)) - from);
    const said = `${kindName(event.kind)} of ${data.arms[event.arm].name} at ${sec(event.offset_s)} for ${sec(event.seconds)}, shape ${event.shape}, ${count(event.requests_hit)} requests delayed`;
    const bar = svg(
      "g",
      { class: armClass(event.arm), role: "button", "aria-label": said },
      rect(from, top, size, 16, { class: "bar", rx: 2 }),
    );
    if (size >= 14) bar.append(label(from + size / 2, top + 12, kindLetter(event.kind), "middle", "on-bar"));
    return bar;
  });
  const group = {
    "clip-path": `url(#${view.clip})`,
    role: "group",
    "aria-label": "Compile events: arrows walk them, Enter opens the table row",
  };
  return { stops, nodes: [...nodes, svg("g", group, stops)] };
}

function timelineLegend(events, { thin, stalls }) {
  const kinds = [...new Set(events.map((event) => event.kind))];
  const bars = kinds.map((kind) => `${kindLetter(kind)} ${kindName(kind)}`).join(", ");
  const first = bars ? `Bars: ${bars}.` : "No compile is recorded in this stretch.";
  return el(
    "p",
    { class: "muted" },
    `${first} Dotted lines: blocks. Rings: spikes. Crosses: failed requests.${stalls ? " Dashed boxes: stalls that no compile event explains." : ""}${thin ? " Shades: the range of the bins that are too close to draw; zoom in to see each." : ""}`,
  );
}
