// What the chart over time answers to: hover, drag, keys.

function describeEvent(data, event) {
  return [
    el("p", {}, el("b", {}, kindName(event.kind)), ` of ${data.arms[event.arm]?.name ?? DASH}, ${sec(event.seconds)}`),
    el("p", {}, `From ${sec(event.offset_s)} to ${sec(endOf(event))}, ${data.trials[event.trial] ?? `trial ${event.trial ?? DASH}`}`),
    el("p", {}, `Shape: ${event.shape}`),
    el("p", {}, `Requests delayed: ${count(event.requests_hit)}`),
    el("code", {}, document.querySelector(`#event-${event.index} summary`).textContent),
  ];
}

// A function that moves the cross to a time and tells every arm's value there, running compiles and spikes.
function timelineReader(data, state, view, cross) {
  return (t, px, py) => {
    for (const end of ["x1", "x2"]) cross.setAttribute(end, view.x(t));
    cross.setAttribute("visibility", "visible");
    const from = Math.floor(t / view.bin) * view.bin;
    const rows = view.lines.map(([index, points]) => {
      const near = points.find((point) => point.from <= t && t < point.from + view.bin);
      const failed = near?.failed ? `  ${near.failed} failed` : "";
      return tip.row(
        index,
        data.arms[index].name,
        near ? `${ms(near.value)}  n ${count(near.n)}${failed}` : "none due",
      );
    });
    const running = view.events.filter((event) => event.offset_s <= t && t <= endOf(event));
    const still = view.stalls.filter((stall) => stall.offset_s <= t && t <= endOf(stall));
    const spikes = view.spikes.filter((spike) => spike.offset_s <= t && t <= endOf(spike));
    tip.show(
      px,
      py,
      el(
        "p",
        {},
        el(
          "b",
          {},
          `${state.statistic} ${state.metric.toUpperCase()}, due at ${figure(from)} to ${sec(from + view.bin)}`,
        ),
      ),
      rows,
      running.map((event) =>
        el("p", {}, `${data.arms[event.arm].name}: ${kindName(event.kind)}, ${sec(event.seconds)}, ${event.shape}`),
      ),
      still.map((stall) => el("p", {}, stallName(data, stall))),
      spikes.map((spike) =>
        el("p", {}, `${data.arms[spike.arm].name}: spike, ${spike.cause}, ${pct(spike.explained_pct)} explained`),
      ),
    );
  };
}

function timelinePointer({ root, surface, brush, cross, view, zoom, read }) {
  const { x, domain, width } = view;
  const timeOf = (event) => {
    const box = root.getBoundingClientRect();
    return Math.min(domain[1], Math.max(domain[0], x.invert(((event.clientX - box.left) / box.width) * width)));
  };
  let start = null;
  surface.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    start = timeOf(event);
    surface.setPointerCapture(event.pointerId);
  });
  surface.addEventListener("pointermove", (event) => {
    const t = timeOf(event);
    read(t, event.clientX, event.clientY);
    if (start === null) return;
    brush.setAttribute("x", Math.min(x(start), x(t)));
    brush.setAttribute("width", Math.abs(x(t) - x(start)));
  });
  surface.addEventListener("pointerup", (event) => {
    const from = start,
      to = timeOf(event);
    start = null;
    brush.setAttribute("width", 0);
    if (from === null || Math.abs(x(to) - x(from)) <= 6) return;
    tip.hide();
    zoom([Math.min(from, to), Math.max(from, to)]);
  });
  surface.addEventListener("pointercancel", () => {
    start = null;
    brush.setAttribute("width", 0);
  });
  surface.addEventListener("pointerleave", () => {
    tip.hide();
    cross.setAttribute("visibility", "hidden");
  });
  surface.addEventListener("dblclick", () => zoom(null));
}

function timelineKeys({ root, plot, cross, view, state, zoom, read }) {
  const { domain, bin } = view,
    span = domain[1] - domain[0];
  root.addEventListener("keydown", (event) => {
    const at = Math.min(domain[1], Math.max(domain[0], state.cursor ?? domain[0] + span / 2));
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (move) {
      state.cursor = Math.min(domain[1], Math.max(domain[0], at + move * Math.max(bin, span / 100)));
      const box = root.getBoundingClientRect();
      read(state.cursor, box.left + (view.x(state.cursor) / view.width) * box.width, box.top + view.top);
    } else if (factor) zoom([at - (at - domain[0]) * factor, at + (domain[1] - at) * factor]);
    else if (event.key === "0") zoom(null);
    else if (event.key === "Escape") tip.hide();
    else return;
    event.preventDefault();
    if (factor || event.key === "0") plot.querySelector("svg").focus();
  });
  root.addEventListener("blur", () => {
    tip.hide();
    cross.setAttribute("visibility", "hidden");
  });
}
