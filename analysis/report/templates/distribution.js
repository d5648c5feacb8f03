// Latency distribution: outlines of the histograms of the arms on one log axis.

function distribution(host, data) {
  const metrics = Object.keys(data.distribution).filter((metric) =>
    data.distribution[metric].some((arm) => arm.counts.length),
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
      .flatMap((arm) => arm.counts.flatMap((n, i) => (n > 0 ? [arm.edges_ms[i], arm.edges_ms[i + 1]] : [])))
      .filter((value) => isNumber(value) && value > 0);
    if (!spread.length) return plot.replaceChildren(el("p", { class: "empty" }, "No arm is shown."));
    const domain = [spread.reduce((a, b) => Math.min(a, b)) * 0.85, spread.reduce((a, b) => Math.max(a, b)) * 1.15];
    const left = 58,
      right = 16,
      top = 8,
      high = 150;
    const base = top + high,
      height = base + 38;
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
