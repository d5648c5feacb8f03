// Padding: for each arm, the real part of the positions it computed, overall and by kind of step.

function padding(host, data) {
  const arms = data.padding.filter((arm) => isNumber(arm.waste_pct) || isNumber(arm.padded_tokens));
  if (!arms.length) return empty(host, "No step was recorded, so padding is not known.");
  const plot = el("div");
  host.append(plot);
  responsive(plot, (width) => {
    const wide = width > 560,
      wasted = (waste) => `${share(waste)}${wide ? " padding" : ""}`,
      every = arms.flatMap((arm) => [
        arm.waste_pct,
        arm.prefill_waste_pct,
        arm.decode_waste_pct,
        arm.encode_waste_pct,
      ]),
      left = 58,
      right = 10 + every.reduce((most, waste) => Math.max(most, textWidth(wasted(waste), "strong")), 0),
      bar = 18,
      rowHeight = 25;
    const parts = arms.map((arm) =>
      [
        ["all", arm.waste_pct],
        ["prefill", arm.prefill_waste_pct],
        ["decode", arm.decode_waste_pct],
        ["encode", arm.encode_waste_pct],
      ].filter(([part, waste], _, all) => isNumber(waste) && (part === "all" || all.some(([, some]) => some > 0))),
    );
    const heights = parts.map((list) => 30 + list.length * rowHeight + 12);
    const height = heights.reduce((a, b) => a + b, 0);
    const x = scale([0, 100], [left, width - right]);
    const root = svg("svg", {
      class: "plot",
      viewBox: `0 0 ${width} ${height}`,
      height,
      role: "group",
      "aria-label": "Padding by arm",
    });
    const stops = [],
      said = [];
    let top = 0;
    arms.forEach((arm, i) => {
      const name = data.arms[arm.arm]?.name ?? DASH,
        hatch = `hatch-${i}`;
      root.append(
        svg(
          "defs",
          { class: armClass(arm.arm) },
          svg(
            "pattern",
            {
              id: hatch,
              class: armClass(arm.arm),
              width: 7,
              height: 7,
              patternUnits: "userSpaceOnUse",
              patternTransform: "rotate(45)",
            },
            line(0, 0, 0, 7, "hatch"),
          ),
        ),
      );
      const positions =
        wide && isNumber(arm.tokens) ? `${count(arm.tokens)} real of ${count(arm.padded_tokens)} positions` : "";
      root.append(
        svg(
          "g",
          { class: armClass(arm.arm) },
          marker(arm.arm ?? 0, 8, top + 15),
          label(20, top + 19, short(name, width - 36 - textWidth(positions)), "start", "strong"),
        ),
        label(width, top + 19, positions, "end"),
      );
      parts[i].forEach(([part, waste], row) => {
        const at = top + 30 + row * rowHeight,
          real = 100 - waste;
        const stop = svg("g", {
          class: armClass(arm.arm),
          role: "img",
          "aria-label": `${name}, ${part}: ${pct(real)} real, ${share(waste)} padding`,
        });
        stop.append(
          rect(x(0), at, x(real) - x(0), bar, { class: "real" }),
          rect(x(real), at, x(100) - x(real), bar, { fill: `url(#${hatch})` }),
          rect(x(0), at, x(100) - x(0), bar, { class: "outline halo" }),
        );
        root.append(
          label(left - 8, at + 13, part, "end"),
          stop,
          label(width - right + 8, at + 13, wasted(waste), "start", "strong"),
        );
        stops.push(stop);
        said.push([
          el("p", {}, el("b", {}, `${name}, ${part}`)),
          el("p", {}, `${pct(real)} real, ${share(waste)} padding`),
        ]);
      });
      top += heights[i];
    });
    walkable(stops, (i) => said[i]);
    plot.replaceChildren(root);
  });
}
