// What is known of the run: what the server sends from the run's files, put together for the parts of the page.

const MOST_SAMPLES = 900,
  MOST_KEPT_EVENTS = 400,
  MOST_MACHINES = 300;
const LOAD_PHASES = ["traffic", "production traffic", "waiting for the last answers"],
  CLOSING_PHASES = ["stopping", "comparing answers", "recorded", "stopped"];
const CALM = ["gpu_idle", "applications_clocks_setting", "display_clock_setting"]; // reasons that slow nothing

// A series of at most MOST_SAMPLES items over the whole run: once it is full every other item goes, and from then on
// only every other one that comes stays. The newest is always there.
function bounded() {
  const items = [];
  let every = 1,
    came = 0;
  function add(item) {
    if (items.length && (came - 1) % every) items.pop(); // it was there only until the next
    items.push(item);
    came++;
    if (items.length < MOST_SAMPLES) return;
    const kept = items.filter((_, i) => i % 2 === 0 || i === items.length - 1);
    items.splice(0, Infinity, ...kept);
    every *= 2;
  }
  return { items, add };
}

// `learn` takes a message of the server and returns the names of what changed.
function knowledge() {
  const seen = {};
  let load, interims, counters;
  function forget() {
    [load, interims, counters] = [bounded(), bounded(), {}];
    const series = { load: load.items, interims: interims.items, events: [], machines: [], weights: [] };
    Object.assign(seen, { run: null, now: null, interim: null, compiles: {}, lost: false, series });
  }
  forget();

  function analysed(line) {
    const gates = line.gates ?? [],
      arms = Object.fromEntries(Object.entries(line.arms ?? {}).map(([name, arm]) => [name, arm ?? {}]));
    seen.interim = { ...line, gates, arms };
    interims.add({ at_ns: line.at_ns, seconds: line.seconds, gates: gates.map(pointOf) });
  }

  // Compiles of the warm-up are counted alone.
  function compiled(row) {
    const own = (seen.compiles[row.arm] ??= { warmup: 0, warmup_s: 0, serving: 0, serving_s: 0, longest_s: 0, hit: 0 }),
      seconds = Math.max(0, (row.end_ns - row.start_ns) / 1e9);
    if (row.phase !== "serving") {
      own.warmup++;
      own.warmup_s += seconds;
      return;
    }
    own.serving++;
    own.serving_s += seconds;
    own.longest_s = Math.max(own.longest_s, seconds);
    own.hit += row.hit;
    seen.series.events.push({ ...row, at_ns: row.start_ns, seconds });
  }

  function sampled(row) {
    const samples = seen.series.machines;
    if (row.kind !== "host" && row.kind !== "device") return;
    if (last(samples)?.at_ns !== row.at_ns) samples.push({ at_ns: row.at_ns, things: {} });
    const throttle = (row.throttle ?? []).filter((reason) => !CALM.includes(reason));
    last(samples).things[row.name] = row.kind === "host" ? hostOf(row, counters) : { ...row, throttle };
  }

  function learn(message) {
    if (message.first) forget();
    const changed = new Set();
    function each(key, name, take) {
      for (const row of message[key] ?? []) {
        take(row);
        changed.add(name);
      }
    }
    if (message.run) {
      seen.run = message.run;
      changed.add("run");
    }
    each("load", "load", load.add);
    each("interim", "interim", analysed);
    each("weights", "weights", (line) => seen.series.weights.push(line));
    each("events", "events", compiled);
    each("machines", "machines", sampled);
    seen.series.events.splice(0, seen.series.events.length - MOST_KEPT_EVENTS);
    seen.series.machines.splice(0, seen.series.machines.length - MOST_MACHINES);
    if (message.now) {
      seen.now = nowOf(message.now, seen);
      changed.add("now");
    }
    return changed;
  }
  return { seen, learn };
}

const last = (list) => (list?.length ? list[list.length - 1] : null);
const pointOf = (gate) => [gate.arm, gate.gate, gate.value, gate.low, gate.high];

// The run as status.json has it, with what follows from that.
function nowOf(status, { run, interim }) {
  const { t_s, finished, failed, lag_ms } = status.load ?? {},
    replicas = Object.entries(status.replicas ?? {}).map(([name, replica]) => ({ name, ...replica }));
  const { phase = "", detail = "", trial = 1, trials = 1 } = status;
  const state = status.ended ? "ended" : stateName(phase, t_s ?? 0);
  return { ...status, phase, detail, trial, trials, t_s, finished, failed, lag_ms, replicas, state, decided: decidedOf(run, interim) };
}

function stateName(phase, t_s) {
  if (LOAD_PHASES.includes(phase)) return "load";
  if (phase === "judging") return "judging";
  // Machines are measured before the traffic and after it, under one name.
  return CLOSING_PHASES.includes(phase) || t_s > 0 ? "closing" : "starting";
}

// The final decision of interim analyses on all judged arms: FAIL of one is FAIL of all.
function decidedOf(run, interim) {
  const controls = (run?.arms ?? []).filter((arm) => arm.control).map((arm) => arm.name);
  const arms = Object.entries(interim?.arms ?? {}).filter(([name]) => !controls.includes(name));
  if (arms.some(([, arm]) => arm.decision === "FAIL")) return "FAIL";
  return arms.length && arms.every(([, arm]) => arm.decision === "PASS") ? "PASS" : null;
}

// Replicas are called after their arms, of which one may be called as another begins: compiled, compiled-padded.
function armOf(replica, arms) {
  const names = arms.map((arm) => arm.name).filter((name) => replica === name || replica.startsWith(`${name}-`));
  return names.sort((a, b) => b.length - a.length)[0];
}

// A sample of a host: how much of the time since the sample before its processors were busy, or stolen.
function hostOf(row, counters) {
  const before = counters[row.name],
    spent_s = before ? (row.at_ns - before.at_ns) / 1e9 : 0;
  counters[row.name] = row;
  const share = (key) => {
    const rose = row[key] - before?.[key];
    return spent_s > 0.05 && spent_s < 60 && rose >= 0 ? Math.min(100, (100 * rose) / (spent_s * (row.cpus || 1))) : null;
  };
  return { ...row, busy_pct: share("cpu_s"), steal_pct: share("steal_s") };
}
