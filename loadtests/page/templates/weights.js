// The share of the traffic that each arm has, over time.

const sharesOf = (weights) => {
  const total = Object.values(weights ?? {}).reduce((sum, weight) => sum + (weight ?? 0), 0);
  return Object.fromEntries(Object.entries(weights ?? {}).map(([name, weight]) => [name, total ? (100 * (weight ?? 0)) / total : null]));
};

// The weights now: the last that were set, or those of the experiment where weights decide.
function weightsNow({ run, series }) {
  if (series.weights.length) return last(series.weights).weights;
  return run?.design === "split" ? Object.fromEntries(run.arms.map((arm) => [arm.name, arm.weight ?? 1])) : {};
}

function weightParts() {
  let chart = null;
  return (seen) => {
    const { series } = seen,
      since = sinceStart(series);
    at("[data-weights]").hidden = !series.weights.length;
    if (!series.weights.length) return;
    chart ??= curves(at('[data-chart="weights"]'), { height: 140, xText: clock, y: { zero: true, format: pct } });
    const newest = last(series.weights),
      end = Math.max(since(last(series.load)?.at_ns ?? newest.at_ns), since(newest.at_ns)),
      shares = series.weights.map((one) => [since(one.at_ns), sharesOf(one.weights)]);
    const told = Object.entries(sharesOf(newest.weights)).map(([name, share]) => `${name} ${pct(share)}`).join("; ");
    const why = `Since ${clock(since(newest.at_ns))}: ${newest.why || "no reason is known"}.`.replace(/\.\.$/, ".");
    at("[data-weight-why]").textContent = why;
    overTime(chart, seen, {
      label: `Shares of the traffic by arm over time, now ${told}. ${why}`,
      parts: (name) => {
        const points = shares.map(([at, share]) => [at, share[name]]);
        return [{ points: [...points, [end, last(points)[1]]], steps: true, show: pct }];
      },
      at: (points, x) => points.findLast((point) => point[0] <= x)?.[1],
    });
  };
}
