// Latency distribution: outlines of the histograms above, quantiles with intervals below, on one log axis.

function distribution(host, data) {
  const metrics = Object.keys(data.distribution).filter((metric) =>
    data.distribution[metric].some((arm) => arm.counts.length || arm.ecdf.length),
  );
  if (!metrics.length) return empty(host, "No distribution was recorded.");
  const state = { metric: metrics.includes("e2e") ? "e2e" : metrics[0], hidden: new Set() };
  const names = data.metrics;
  const plot = el("div");
  host.append(
    el(
      "div",
      { class: "controls" },
      segments(
        "Metric",
        metrics.map((metric) => [metric, names[metric] ?? metric]),
        state.metric,
        (value) => {
          state.metric = value;
          draw();
        },
      ),
      el("span", { class: "spacer" }),
      armToggles(data.arms, state.hidden, () => draw()),
    ),
    plot,
  );

  const draw = responsive(plot, (width) => {
    const arms = data.distribution[state.metric]
      .map((arm, index) => ({ ...arm, index }))
      .filter((arm) => !state.hidden.has(arm.index));
    const spread = arms
      .flatMap((arm) => [
        ...arm.counts.flatMap((n, i) => (n > 0 ? [arm.edges_ms[i], arm.edges_ms[i + 1]] : [])),
        ...arm.ecdf.flatMap(([, value, low, high]) => [value, low, high]),
      ])
      .filter((value) => isNumber(value) && value > 0);
    if (!spread.length) return plot.replaceChildren(el("p", { class: "empty" }, "No arm is shown."));
    const domain = [spread.reduce((a, b) => Math.min(a, b)) * 0.85, spread.reduce((a, b) => Math.max(a, b)) * 1.15];
    const quantiles = [...new Set(arms.flatMap((arm) => arm.ecdf.map(([q]) => q)))].sort((a, b) => a - b);
    const left = 58,
      right = 16,
      top = 8,
      high = 150,
      step = 13,
      rowHeight = Math.max(26, arms.length * step + 12);
    const base = top + high,
      ladderTop = base + 10,
      height = ladderTop + quantiles.length * rowHeight + 28;
    const x = scale(domain, [left, width - right], true);
    const root = svg("svg", {
      class: "plot",
      viewBox: `0 0 ${width} ${height}`,
      height,
      role: "group",
      "aria-label": `Distribution of ${names[state.metric] ?? state.metric} by arm`,
    });
    const ticks = logTicks(domain, width / 70);
    for (const tick of ticks) root.append(line(x(tick), top, x(tick), height - 24, "grid"));
    for (const tick of ticksApart(ticks, x, ms, width)) root.append(labelWithin(width, x(tick), height - 8, ms(tick), "middle"));
    root.append(line(left, base, width - right, base, "axis"), label(left - 8, top + 14, "share", "end"));

    const shares = arms.map((arm) => outline(arm, x));
    const most = shares.flat().reduce((a, [, share]) => Math.max(a, share), 0) || 1;
    shares.forEach((steps, i) => {
      if (!steps.length) return;
      const y = (share) => base - (share / most) * (high - 12);
      const points = steps.flatMap(([from, share, to]) => [
        [from, y(share)],
        [to, y(share)],
      ]);
      const closed = [[points[0][0], base], ...points, [points.at(-1)[0], base]];
      root.append(
        svg(
          "g",
          { class: armClass(arms[i].index) },
          svg("path", { class: "area", d: `${pathOf(closed)}Z` }),
          svg("path", { class: "line", d: pathOf(closed) }),
        ),
      );
    });

    const stops = [],
      said = [];
    quantiles.forEach((q, row) => {
      const at = ladderTop + row * rowHeight,
        name = `p${figure(q * 100)}`,
        limit = data.limits[`${name.replace(".", "_")}_${state.metric}_ms`];
      root.append(
        label(left - 8, at + rowHeight / 2 + 4, name, "end", "strong"),
        line(left, at + rowHeight, width - right, at + rowHeight, "grid"),
      );
      if (isNumber(limit) && limit > domain[0] && limit < domain[1])
        root.append(
          line(x(limit), at + 2, x(limit), at + rowHeight - 2, "limit"),
          labelWithin(width, x(limit) + 4, at + 12, `SLO ${ms(limit)}`, "start", "limit-text"),
        );
      arms.forEach((arm, i) => {
        const middle = at + 6 + step * (i + 0.5) + Math.max(0, (rowHeight - 12 - arms.length * step) / 2);
        const found = arm.ecdf.find(([quantile]) => quantile === q);
        if (!found || !isNumber(found[1])) return;
        const [, value, lowEnd, highEnd] = found;
        const open = isNumber(highEnd)
          ? null
          : svg("path", { class: "whisker", fill: "none", d: `M${x(value) + 7} ${middle - 3.5}l5 3.5-5 3.5` });
        const stop = svg("g", {
          class: armClass(arm.index),
          role: "img",
          "aria-label": `${data.arms[arm.index].name} ${name}: ${ms(value)}, interval ${ms(lowEnd)} to ${ms(highEnd)}`,
        });
        stop.append(
          line(
            x(isNumber(lowEnd) ? lowEnd : value),
            middle,
            isNumber(highEnd) ? x(highEnd) : x(value),
            middle,
            "whisker",
          ),
          open,
          svg("circle", { class: "halo", cx: x(value), cy: middle, r: 9 }),
          marker(arm.index, x(value), middle),
        );
        root.append(stop);
        stops.push(stop);
        said.push([
          el("p", {}, el("b", {}, `${name} of ${data.arms[arm.index].name}`)),
          el("p", {}, `${ms(value)}, interval ${ms(lowEnd)} to ${isNumber(highEnd) ? ms(highEnd) : "beyond the data"}`),
        ]);
      });
    });
    walkable(stops, (i) => said[i]);
    plot.replaceChildren(root);
  });
}

// Histogram bins as [from px, share of requests per px, to px], merged until each is wide enough to see.
function outline(arm, x) {
  const total = arm.counts.reduce((a, b) => a + b, 0);
  if (!total) return [];
  const steps = [];
  let from = null,
    held = 0;
  const first = arm.counts.findIndex((n) => n > 0),
    last = arm.counts.findLastIndex((n) => n > 0);
  for (let i = first; i <= last; i++) {
    from ??= arm.edges_ms[i];
    held += arm.counts[i];
    const size = x(arm.edges_ms[i + 1]) - x(Math.max(from, 1e-6));
    if (size >= 9 || i === last) {
      steps.push([x(from), held / total / Math.max(size, 1), x(arm.edges_ms[i + 1])]);
      from = null;
      held = 0;
    }
  }
  return steps;
}
