// Forest plot: each comparison's ratio to the control with its interval, against 1 and against the margin.

const TONES = { PASS: "tone-pass", FAIL: "tone-fail", INCONCLUSIVE: "tone-inconclusive" };
const SIGNS = { PASS: "✔ PASS", FAIL: "✘ FAIL", INCONCLUSIVE: "? INCONCLUSIVE" };
const NEAR_ONE = [0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 2.5, 3, 4, 5];

function forest(host, data) {
  const rows = data.comparisons.filter((row) => isNumber(row.ratio) && row.ratio > 0);
  if (!rows.length) return empty(host, "No arm was compared with the control.");
  const title = (row) =>
    `${data.arms[row.arm]?.name ?? DASH} · ${row.label}${row.phase !== DASH ? ` · ${row.phase}` : ""}`;
  const longest = rows.reduce((most, row) => Math.max(most, textWidth(title(row), "strong")), 0) + 36;
  const plot = el("div");
  host.append(plot);
  responsive(plot, (width) => {
    // Wide: names left of the plot, numbers right of it. Narrow: both on a line of their own above each interval.
    const narrow = width < 560 + longest,
      rowHeight = narrow ? 74 : 36,
      band = narrow ? 26 : rowHeight,
      top = 26;
    const left = narrow ? 8 : longest,
      right = narrow ? 8 : 276,
      height = top + rows.length * rowHeight + 26,
      base = height - 22;
    const ends = rows
      .flatMap((row) => [row.low, row.high, row.ratio, 1 + (row.margin ?? 0)])
      .filter((value) => isNumber(value) && value > 0);
    const domain = [Math.min(0.8, ...ends) * 0.9, Math.max(1.25, ...ends) * 1.1];
    const x = scale(domain, [left, width - right], true);
    const root = svg("svg", {
      class: "plot",
      viewBox: `0 0 ${width} ${height}`,
      height,
      role: "group",
      "aria-label": `Ratios to ${rows[0].control}`,
    });
    const ticks =
      domain[1] / domain[0] < 8
        ? NEAR_ONE.filter((tick) => tick >= domain[0] && tick <= domain[1])
        : logTicks(domain, 12);
    const factor = (tick) => `×${figure(tick)}`;
    for (const tick of ticksApart([...new Set([1, ...ticks])], x, factor))
      root.append(labelWithin(width, x(tick), height - 6, factor(tick), "middle"));
    const faster = Math.max(x(1) - 6, textWidth("◂ faster"));
    root.append(label(faster, 14, "◂ faster", "end"), label(faster + 12, 14, "slower ▸", "start"));

    const stops = [],
      said = [];
    rows.forEach((row, i) => {
      const bottom = top + (i + 1) * rowHeight,
        from = bottom - band,
        middle = from + band / 2,
        text = narrow ? bottom - band - 26 : middle + 4;
      const name = data.arms[row.arm]?.name ?? DASH,
        allowed = 1 + (row.margin ?? 0);
      const numbers = `${times(row.ratio)} [${times(row.low).replace("×", "")}, ${times(row.high).replace("×", "")}]`;
      for (const tick of ticks) root.append(line(x(tick), from, x(tick), bottom, "grid"));
      if (isNumber(row.margin))
        root.append(
          rect(x(allowed), from, width - right - x(allowed), band, { class: "worse" }),
          line(x(allowed), from, x(allowed), bottom, "limit"),
        );
      root.append(
        line(x(1), from, x(1), bottom, "unity"),
        svg("g", { class: armClass(row.arm) }, marker(row.arm ?? 0, 8, text - 4)),
        label(20, text, short(title(row), narrow ? width - 28 : longest - 28), "start", "strong"),
        label(narrow ? 20 : width - 130, narrow ? text + 18 : text, numbers, narrow ? "start" : "end", "strong"),
        label(
          narrow ? width - 8 : width,
          narrow ? text + 18 : text,
          row.gate ? (SIGNS[row.verdict] ?? DASH) : "no gate",
          "end",
          row.gate ? `strong ${TONES[row.verdict] ?? ""}` : "",
        ),
      );
      const stop = svg("g", {
        class: armClass(row.arm),
        role: "img",
        "aria-label": `${name} ${row.label}: ${numbers}, ${row.gate ? (row.verdict ?? DASH) : "no gate"}. ${row.reason}`,
      });
      const low = isNumber(row.low) && row.low > 0 ? x(row.low) : null,
        high = isNumber(row.high) ? x(row.high) : null;
      const [start, end] = [low ?? left, high ?? width - right];
      stop.append(
        rect(start - 6, middle - 11, end - start + 12, 22, { class: "halo", rx: 4 }),
        line(start, middle, end, middle, "whisker"),
        low === null ? arrow(start, middle, -1) : line(start, middle - 5, start, middle + 5, "whisker"),
        high === null ? arrow(end, middle, 1) : line(end, middle - 5, end, middle + 5, "whisker"),
        marker(row.arm ?? 0, x(row.ratio), middle, {
          transform: `translate(${x(row.ratio).toFixed(1)} ${middle}) scale(1.3)`,
        }),
      );
      root.append(stop);
      stops.push(stop);
      said.push([
        el("p", {}, el("b", {}, `${title(row)}: ${numbers}`)),
        el("p", {}, row.reason),
        el(
          "p",
          {},
          row.gate
            ? `p of worse ${figure(row.p_worse)}, p of non-inferiority ${figure(row.p_noninferior)} at a margin of ${pct(isNumber(row.margin) ? row.margin * 100 : null)}`
            : `p of worse ${figure(row.p_worse)}; no gate rests on it`,
        ),
        el(
          "p",
          {},
          `${row.method}, ${count(row.blocks)} blocks, ${count(row.trials)} trials${isNumber(row.needed_s) ? `; decided by about ${sec(row.needed_s)}` : ""}`,
        ),
      ]);
    });
    root.append(line(left, base, width - right, base, "axis"));
    walkable(stops, (i) => said[i]);
    plot.replaceChildren(root);
  });
}

// The end of an interval that goes on beyond the plot.
const arrow = (x, y, way) =>
  svg("path", { class: "whisker", fill: "none", d: `M${x - 6 * way} ${y - 5}l${6 * way} 5l${-6 * way} 5` });
