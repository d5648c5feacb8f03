// The load of external arms by their own account: latency above, and below it on the same axis what their pages say.

const LOAD_PANELS = [
  ["running", "Running", count],
  ["waiting", "Waiting", count],
  ["cache_pct", "KV cache in use", pct],
  ["preemptions", "Preemptions", count],
];

function serverLoad(host, data) {
  const rows = data.server_load?.rows ?? [];
  if (!rows.length) return empty(host, "No page showed a load.");
  panelsOverTime(host, rows, (state, width) => loadView(data, rows, state, width));
}

function loadView(data, rows, state, width) {
  const own = rows.filter((row) => row.trial === state.trial);
  const bin = data.server_load.bin_s || 1;
  const latency = data.series.map((columns, arm) => ({
    name: data.arms[arm].name,
    arm,
    points: columns.t_s.map((t, i) => [t, columns.e2e_p99_ms[i]]).filter((_, i) => columns.trial[i] === state.trial),
  }));
  const panels = [
    { title: `p99 E2E by ${sec(data.bin_s)}`, show: ms, log: true, lines: latency, bin: data.bin_s || 1 },
    ...LOAD_PANELS.map(([key, title, show]) => ({
      title,
      show,
      bin,
      lines: own.map((row) => ({ name: row.label, arm: row.arm, points: row.t_s.map((t, i) => [t, row[key]?.[i]]) })),
    })),
  ];
  return panelView({ name: "The load of external arms", panels, lanes: [], bin, width, seconds: data.duration_s });
}
