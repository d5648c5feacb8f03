// The chart of a search: latency against load, a point for each step.

// A frame on two log axes; `inside` gets the root and both scales, and gives the marks that can be walked and their words.
function onLoad(host, { xs, ys, yText, title, unit }, inside) {
  const spread = (values, least) => {
    const low = Math.min(...values),
      high = Math.max(...values);
    const room = Math.max(1.12, Math.sqrt(least / (high / low)));
    return [low / room, high * room];
  };
  const plot = el("div");
  host.append(plot);
  responsive(plot, (width) => {
    const height = 320,
      top = 26,
      base = height - 40,
      right = 12;
    const rows = spread(ys, 4),
      ticks = logTicks(rows, 8),
      left = 12 + ticks.reduce((most, tick) => Math.max(most, textWidth(yText(tick))), 0);
    const x = scale(spread(xs, 2), [left, width - right], true),
      y = scale(rows, [base, top], true);
    const root = svg("svg", {
      class: "plot",
      viewBox: `0 0 ${width} ${height}`,
      height,
      role: "group",
      "aria-label": title,
    });
    for (const tick of ticks)
      root.append(line(left, y(tick), width - right, y(tick), "grid"), label(left - 6, y(tick) + 4, yText(tick), "end"));
    const loads = logTicks(
      [x.invert(left), x.invert(width - right)],
      12,
    );
    for (const tick of ticksApart(loads, x, figure, width))
      root.append(line(x(tick), base, x(tick), base + 4, "axis"), labelWithin(width, x(tick), base + 18, figure(tick), "middle"));
    root.append(
      line(left, base, width - right, base, "axis"),
      label(width - right, height - 4, unit, "end"),
    );
    const { stops, said } = inside(root, { x, y, left, right: width - right, top, base, width });
    walkable(stops, (i) => said[i]);
    plot.replaceChildren(root);
  });
}

function armLegend(host, data, used) {
  host.append(
    el(
      "div",
      { class: "legend" },
      data.arms.map((arm, index) => (used.has(index) ? el("span", { class: armClass(index) }, swatch(index), arm.name) : null)),
    ),
  );
}

// Points of steps, those of one start of an arm joined by a faint line.
function latencyByLoad(host, data) {
  const { steps: all, label, limit_ms: limit } = data.knees,
    steps = (all ?? []).filter((row) => isNumber(row.ms) && row.ms > 0 && isNumber(row.rate) && row.rate > 0);
  if (!steps.length) return empty(host, "No step has a latency to show.");
  armLegend(host, data, new Set(steps.map((row) => row.arm)));
  const frame = {
    xs: steps.map((row) => row.rate),
    ys: [...steps.flatMap((row) => [row.ms, row.low_ms, row.high_ms]), limit].filter((value) => isNumber(value) && value > 0),
    yText: ms,
    title: `${label} against load`,
    unit: "requests/s a replica",
  };
  onLoad(host, frame, (root, { x, y, left, right, top, width }) => {
    if (isNumber(limit))
      root.append(line(left, y(limit), right, y(limit), "limit"), labelWithin(width, right, y(limit) - 5, `SLO ${ms(limit)}`, "end", "limit-text"));
    for (const trial of new Set(steps.map((row) => row.trial)))
      for (const arm of new Set(steps.map((row) => row.arm))) {
        const own = steps.filter((row) => row.trial === trial && row.arm === arm);
        if (own.length > 1)
          root.append(svg("g", { class: armClass(arm) }, svg("path", { class: "line faint", d: pathOf(own.map((row) => [x(row.rate), y(row.ms)])) })));
      }
    const stops = [],
      said = [];
    for (const row of steps) {
      const name = data.arms[row.arm]?.name ?? DASH,
        { low_ms: low, high_ms: high } = row,
        [across, middle] = [x(row.rate), y(row.ms)],
        numbers = `${ms(row.ms)} at ${figure(row.rate)}\u00a0requests/s, interval ${ms(low)} to ${isNumber(high) ? ms(high) : "beyond the data"}; ${count(row.requests)} requests`,
        compiled = row.compiles ? `${count(row.compiles)} compiled in it, ${sec(row.compile_s)}` : "";
      const stop = svg("g", {
        class: armClass(row.arm),
        role: "img",
        "aria-label": `${name}, trial ${row.trial}: ${numbers}${compiled ? `; ${compiled}` : ""}`,
      });
      stop.append(
        ...(isNumber(low) && low > 0 ? [line(across, y(low), across, middle, "whisker")] : []),
        isNumber(high)
          ? line(across, middle, across, y(high), "whisker")
          : svg("path", { class: "whisker", fill: "none", d: `M${(across - 3.5).toFixed(1)} ${(middle - 7).toFixed(1)}l3.5-5 3.5 5` }),
        svg("circle", { class: "halo", cx: across.toFixed(1), cy: middle.toFixed(1), r: 9 }),
        marker(row.arm ?? 0, across, middle),
        ...(compiled ? [svg("path", { class: "need-mark", d: `M${(across - 5).toFixed(1)} ${top - 14}h10l-5 9z` })] : []),
      );
      root.append(stop);
      stops.push(stop);
      said.push([
        el("p", {}, el("b", {}, `${label} of ${name}, trial ${row.trial}`)),
        el("p", {}, numbers),
        compiled ? el("p", {}, compiled) : null,
      ]);
    }
    return { stops, said };
  });
}
