// Latency over time: a line an arm, compiles as bands through the plot and as bars in a lane an arm below it.

const STATISTICS = { ttft: ["p50", "p99"], e2e: ["p50", "p99", "max"] };
const LANE = 38;

function timeline(host, data) {
  const trials = [...data.series.flatMap((series) => series.trial), ...data.events.map((event) => event.trial)];
  const known = [...new Set(trials.filter(isNumber))].sort((a, b) => a - b);
  if (!data.series.some((series) => series.t_s.length)) return empty(host, "No latency over time was recorded.");

  const state = {
    metric: "e2e",
    statistic: "p99",
    log: true,
    trial: known[0],
    hidden: new Set(),
    window: null,
    cursor: null,
  };
  const reset = el("button", { type: "button", disabled: true, onclick: () => zoom(null) }, "Reset zoom");
  const statistics = el("span");
  const plot = el("div");
  const pickTrial = (event) => {
    state.trial = Number(event.target.value);
    zoom(null);
  };
  const trialPicker = el(
    "select",
    { onchange: pickTrial },
    known.map((trial) => el("option", { value: trial }, data.trials[trial] ?? String(trial))),
  );
  host.append(
    el(
      "div",
      { class: "controls" },
      segments(
        "Metric",
        Object.keys(STATISTICS)
          .filter((metric) => metric in data.metrics)
          .map((metric) => [metric, data.metrics[metric]]),
        state.metric,
        (metric) => {
          state.metric = metric;
          if (!STATISTICS[metric].includes(state.statistic)) state.statistic = "p99";
          offerStatistics();
          draw();
        },
      ),
      statistics,
      segments(
        "Scale",
        [
          ["log", "log"],
          ["linear", "linear"],
        ],
        "log",
        (value) => {
          state.log = value === "log";
          draw();
        },
      ),
      known.length > 1 ? el("label", {}, "Trial ", trialPicker) : null,
      el("span", { class: "spacer" }),
      armToggles(data.arms, state.hidden, () => draw()),
      reset,
    ),
    plot,
  );

  function offerStatistics() {
    const options = STATISTICS[state.metric].map((name) => [name, name]);
    statistics.replaceChildren(
      segments("Statistic", options, state.statistic, (value) => {
        state.statistic = value;
        draw();
      }),
    );
  }

  function zoom(window) {
    const [low, high] = extent(data, state.trial),
      bin = data.bin_s || 1;
    const wanted = window && [Math.max(low, window[0]), Math.min(high, Math.max(window[1], window[0] + bin))];
    state.window = wanted && wanted[1] - wanted[0] < (high - low) * 0.999 ? wanted : null;
    reset.disabled = !state.window;
    draw();
  }

  offerStatistics();
  const draw = responsive(plot, (width) => {
    const view = timelineView(data, state, width);
    const root = timelineFrame(data, state, view);
    const { body, brush, cross } = timelineLines(data, state, view);
    const bars = timelineLanes(data, view);
    const surface = rect(view.left, view.top, view.right - view.left, view.bottom - view.top, {
      class: "hit zoomable",
    });
    root.append(body, surface, ...bars.nodes);
    plot.replaceChildren(
      root,
      timelineLegend(view.events, {
        thin: view.lines.some(([, points]) => thinned(points, view) !== points),
        stalls: view.stalls.length > 0,
      }),
    );
    const choose = (i) =>
      host.dispatchEvent(new CustomEvent("event-chosen", { bubbles: true, detail: view.events[i].index }));
    walkable(bars.stops, (i) => describeEvent(data, view.events[i]), choose);
    timelinePointer({ root, surface, brush, cross, view, zoom, read: timelineReader(data, state, view, cross) });
    timelineKeys({ root, plot, cross, view, state, zoom, read: timelineReader(data, state, view, cross) });
  });

  return {
    // Zooms to an event; its trial is chosen first.
    show(index) {
      const event = data.events[index];
      if (!isNumber(event?.offset_s)) return;
      state.trial = event.trial;
      trialPicker.value = String(event.trial);
      const around = Math.max(2, event.seconds ?? 0);
      zoom([event.offset_s - around, event.offset_s + (event.seconds ?? 0) + around]);
      host.scrollIntoView({ block: "center" });
    },
  };
}

// Seconds from the trial's start to its last bin or event.
function extent(data, trial) {
  const bins = data.series.flatMap((series) =>
    series.t_s.filter((_, i) => series.trial[i] === trial).map((t) => t + data.bin_s),
  );
  const events = data.events.filter((event) => event.trial === trial && isNumber(event.offset_s)).map(endOf);
  return [0, [...bins, ...events].reduce((a, b) => Math.max(a, b), Math.max(data.duration_s ?? 0, data.bin_s || 1))];
}

const endOf = (event) => event.offset_s + (event.seconds ?? 0);

// What is visible and where: arms, points, events and spikes inside the window, and both scales.
function timelineView(data, state, width) {
  const bin = data.bin_s || 1,
    domain = state.window ?? extent(data, state.trial);
  const shown = data.arms.map((_, index) => index).filter((index) => !state.hidden.has(index));
  const lines = shown.map((index) => [index, pointsOf(data.series[index], state, bin, domain)]);
  const visible = (event) =>
    event.trial === state.trial &&
    shown.includes(event.arm) &&
    isNumber(event.offset_s) &&
    event.offset_s <= domain[1] &&
    endOf(event) >= domain[0];
  const events = data.events
    .map((event, index) => ({ ...event, index }))
    .filter(visible)
    .sort((a, b) => a.offset_s - b.offset_s);
  const stalls = data.stalls.filter(visible);
  const spikes = data.spikes.filter(
    (spike) => spike.trial === state.trial && state.metric === "e2e" && shown.includes(spike.arm),
  );
  const limit = data.limits[`${state.statistic}_${state.metric}_ms`];

  const laned = shown.filter((index) => data.events.some((event) => event.arm === index));
  const values = [...lines.flatMap(([, points]) => points.map((point) => point.value)), limit].filter(
    (value) => isNumber(value) && value > 0,
  );
  const most = values.reduce((a, b) => Math.max(a, b), 0) || 1,
    least = values.reduce((a, b) => Math.min(a, b), most);
  const range = state.log ? [least * 0.8, most * 1.35] : [0, most * 1.06];
  const yTicks = state.log ? logTicks(range, 9) : linearTicks(range, 5);
  const left = Math.max(58, ...yTicks.map((tick) => textWidth(ms(tick)) + 10)),
    right = width - 14,
    top = 14,
    bottom = top + Math.max(190, Math.min(240, width * 0.36)),
    lanes = bottom + 8;
  return {
    bin,
    domain,
    shown,
    lines,
    events,
    stalls,
    spikes,
    limit,
    laned,
    left,
    right,
    top,
    bottom,
    lanes,
    width,
    height: lanes + laned.length * LANE + 30,
    x: scale(domain, [left, right]),
    y: scale(range, [bottom, top], state.log),
    yTicks,
    clip: `clip-${Math.random().toString(36).slice(2)}`,
  };
}

function pointsOf(series, state, bin, domain) {
  const values = series[`${state.metric}_${state.statistic}_ms`];
  return series.t_s
    .map((from, i) => ({
      from,
      t: from + bin / 2,
      value: values[i],
      n: series.n[i],
      failed: series.failed[i],
      trial: series.trial[i],
    }))
    .filter(
      (point) =>
        point.trial === state.trial &&
        isNumber(point.value) &&
        point.t >= domain[0] - bin &&
        point.t <= domain[1] + bin,
    );
}
