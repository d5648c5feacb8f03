// What share of the traffic each arm has, over time, and how whoever has the token changes it.

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
  const form = weightForm();
  let chart = null;
  return (seen) => {
    const { series, now } = seen,
      since = sinceStart(series),
      open = now?.changes_weights === true && now.phase === "traffic";
    at("[data-weights]").hidden = !series.weights.length && !open;
    at("[data-weight-history]").hidden = !series.weights.length;
    form(seen, open);
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

// The form is made once for the arms that there are. What is typed stays until it was sent, and the token not longer.
function weightForm() {
  const form = at("[data-weight-form]"),
    fields = at("[data-weight-fields]"),
    token = at("[data-weight-token]"),
    button = at("[data-weight-form] button"),
    said = at("[data-weight-said]");
  let inputs = new Map(),
    typed = false;
  const asked = () => Object.fromEntries([...inputs].map(([name, { input }]) => [name, input.valueAsNumber]));
  function showShares() {
    const shares = sharesOf(asked());
    for (const [name, { output }] of inputs) output.textContent = isNumber(shares[name]) ? pct(shares[name]) : DASH;
  }
  fields.addEventListener("input", () => {
    typed = true;
    said.textContent = "";
    showShares();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    said.textContent = "Asking the run…";
    try {
      const answer = await fetch("weights", {
        method: "POST",
        credentials: "omit",
        headers: { "Content-Type": "application/json", Authorization: `Bearer ${token.value.trim()}` },
        body: JSON.stringify({ weights: asked() }),
      });
      const told = await answer.json();
      if (!answer.ok) throw new Error(told.error);
      said.textContent = `From now on: ${Object.entries(sharesOf(told.weights)).map(([name, share]) => `${name} ${pct(share)}`).join(", ")}.`;
      token.value = "";
      typed = false;
    } catch (error) {
      said.textContent = error instanceof TypeError || !error.message ? "The run does not answer." : error.message;
    }
    button.disabled = false;
  });
  return (seen, open) => {
    form.hidden = !open;
    if (!open) return;
    const weights = weightsNow(seen),
      names = Object.keys(weights);
    if (names.join("\n") !== [...inputs.keys()].join("\n")) {
      const order = armNames(seen);
      inputs = new Map(
        names.map((name) => [name, { input: el("input", { type: "number", min: 0, step: 1, required: true, inputmode: "numeric" }), output: el("output", {}) }]),
      );
      fields.replaceChildren(
        ...[...inputs].map(([name, { input, output }]) => el("label", {}, armTag(Math.max(0, order.indexOf(name)), name), input, output)),
      );
      typed = false;
    }
    if (typed) return;
    for (const [name, { input }] of inputs) if (input.value !== String(weights[name])) input.value = weights[name];
    showShares();
  };
}
