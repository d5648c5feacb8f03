// The chart of a search: latency against load on two log axes, a point for each step.

// A log range around the values, at least `least` times as high as low.
function spreadOf(values, least) {
  const low = Math.min(...values),
    high = Math.max(...values);
  const margin = Math.max(1.12, Math.sqrt(least / (high / low)));
  return [low / margin, high * margin];
}

function latencyByLoad(host, data) {
  const { steps: all, label: name, limit_ms: limit } = data.knees,
    steps = (all ?? []).filter((row) => isNumber(row.ms) && row.ms > 0 && isNumber(row.rate) && row.rate > 0);
  if (!steps.length) return empty(host, "No step has a latency to show.");
  const used = new Set(steps.map((row) => row.arm)),
    shown = data.arms.map((arm, index) => (used.has(index) ? el("span", { class: armClass(index) }, swatch(index), arm.name) : null));
  const plot = el("div");
  host.append(el("div", { class: "legend" }, shown), plot);
  const rates = steps.map((row) => row.rate),
    values = [...steps.flatMap((row) => [row.ms, row.low_ms, row.high_ms]), limit].filter((value) => isNumber(value) && value > 0);
  responsive(plot, (width) => {
    const height = 320,
      top = 26,
      base = height - 40,
      right = width - 12;
    const ticks = logTicks(spreadOf(values, 4), 8),
      left = 12 + ticks.reduce((most, tick) => Math.max(most, textWidth(ms(tick))), 0);
    const x = scale(spreadOf(rates, 2), [left, right], true),
      y = scale(spreadOf(values, 4), [base, top], true);
    const root = svg("svg", {
      class: "plot",
      viewBox: `0 0 ${width} ${height}`,
      height,
      role: "group",
      "aria-label": `${name} against load`,
    });
    for (const tick of ticks) root.append(line(left, y(tick), right, y(tick), "grid"), label(left - 6, y(tick) + 4, ms(tick), "end"));
    for (const tick of ticksApart(logTicks([x.invert(left), x.invert(right)], 12), x, figure, width))
      root.append(line(x(tick), base, x(tick), base + 4, "axis"), labelWithin(width, x(tick), base + 18, figure(tick), "middle"));
    root.append(line(left, base, right, base, "axis"), label(right, height - 4, "requests/s a replica", "end"));
    if (isNumber(limit))
      root.append(line(left, y(limit), right, y(limit), "limit"), labelWithin(width, right, y(limit) - 5, `SLO ${ms(limit)}`, "end", "limit-text"));
    // Steps of one start of an arm are joined by a faint line.
    for (const trial of new Set(steps.map((row) => row.trial)))
      for (const arm of used) {
        const own = steps.filter((row) => row.trial === trial && row.arm === arm);
        if (own.length > 1)
          root.append(svg("g", { class: armClass(arm) }, svg("path", { class: "line faint", d: pathOf(own.map((row) => [x(row.rate), y(row.ms)])) })));
      }
    const stops = steps.map((row) => stepMark(data, row, x(row.rate), y, top));
    root.append(...stops);
    walkable(stops, (i) => el("p", {}, `${name} of ${stops[i].getAttribute("aria-label")}`));
    plot.replaceChildren(root);
  });
}

// A step: its latency, with its interval, and a triangle above where something compiled in it.
function stepMark(data, row, across, y, top) {
  const { low_ms: low, high_ms: high } = row,
    middle = y(row.ms),
    limits = `interval ${ms(low)} to ${isNumber(high) ? ms(high) : "beyond the data"}`,
    compiled = row.compiles ? `; ${count(row.compiles)} compiled in it, ${sec(row.compile_s)}` : "";
  return svg(
    "g",
    {
      class: armClass(row.arm),
      role: "img",
      "aria-label": `${data.arms[row.arm]?.name ?? DASH}, trial ${row.trial}: ${ms(row.ms)} at ${figure(row.rate)}\u00a0requests/s, ${limits}; ${count(row.requests)} requests${compiled}`,
    },
    isNumber(low) && low > 0 ? line(across, y(low), across, middle, "whisker") : null,
    isNumber(high)
      ? line(across, middle, across, y(high), "whisker")
      : svg("path", { class: "whisker", fill: "none", d: `M${(across - 3.5).toFixed(1)} ${(middle - 7).toFixed(1)}l3.5-5 3.5 5` }),
    svg("circle", { class: "halo", cx: across.toFixed(1), cy: middle.toFixed(1), r: 9 }),
    marker(row.arm ?? 0, across, middle),
    compiled ? svg("path", { class: "need-mark", d: `M${(across - 5).toFixed(1)} ${top - 14}h10l-5 9z` }) : null,
  );
}
