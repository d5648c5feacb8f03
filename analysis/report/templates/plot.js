// What every chart needs: nodes, scales, ticks, axes, the tip, and a way to walk marks by keyboard.
// Text reaches the page through text nodes and attributes alone, so names and reasons are never markup.

const SVG = "http://www.w3.org/2000/svg";
const DASH = "–";
const SHAPES = ["M0-4.5a4.5 4.5 0 1 0 .01 0z", "M-4-4h8v8h-8z", "M0-5l5 9h-10z", "M0-5.5l5.5 5.5-5.5 5.5-5.5-5.5z"];
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function figure(value) {
  if (!isNumber(value)) return DASH;
  if (value === 0) return "0";
  const decimals = Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)))));
  return value.toLocaleString("en-GB", { maximumFractionDigits: decimals });
}
const ms = (value) =>
  !isNumber(value) ? DASH : Math.abs(value) >= 999.5 ? `${figure(value / 1e3)}\u00a0s` : `${figure(value)}\u00a0ms`;
const sec = (value) => (isNumber(value) ? `${figure(value)}\u00a0s` : DASH);
const pct = (value) => (isNumber(value) ? `${figure(value)}\u00a0%` : DASH);
const count = (value) => (isNumber(value) ? value.toLocaleString("en-GB", { maximumFractionDigits: 0 }) : DASH);
const armClass = (index) => `arm-${(index ?? 0) % 8}`;
const kindName = (kind) => data.kinds[kind] ?? String(kind ?? DASH);
const kindLetter = (kind) => (kind in data.kinds ? data.kinds[kind][0].toUpperCase() : "?");

function scale(domain, range, log) {
  const map = log ? (value) => Math.log10(Math.max(value, 1e-9)) : (value) => value;
  const [a, b] = domain.map(map);
  const at = (value) => range[0] + ((map(value) - a) / (b - a || 1)) * (range[1] - range[0]);
  at.invert = (pixel) => {
    const value = a + ((pixel - range[0]) / (range[1] - range[0] || 1)) * (b - a);
    return log ? 10 ** value : value;
  };
  return at;
}

function linearTicks([low, high], wanted) {
  const raw = (high - low) / Math.max(1, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step + 0); // no -0
  return ticks;
}

function logTicks([low, high], wanted) {
  for (const factors of [[1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const factor of factors) {
        const tick = factor * 10 ** power;
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
      }
    }
    // A range within a few times its start holds too few of these.
    if (ticks.length < 2) return linearTicks([low, high], Math.max(5, wanted));
    if (ticks.length <= wanted || factors.length === 1) return ticks;
  }
  return [];
}

const marker = (index, x, y, attributes) =>
  svg("path", {
    class: "mark",
    d: SHAPES[index % SHAPES.length],
    transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`,
    ...attributes,
  });
const swatch = (index) =>
  svg(
    "svg",
    { class: "swatch", viewBox: "-6 -6 12 12", "aria-hidden": "true" },
    svg("path", { d: SHAPES[index % SHAPES.length] }),
  );
const line = (x1, y1, x2, y2, cls) => svg("line", { x1, y1, x2, y2, class: cls });
const label = (x, y, text, anchor, cls) => svg("text", { x, y, "text-anchor": anchor ?? "start", class: cls }, text);
const ruler = document.createElement("canvas").getContext("2d");
// Width of a label in px, as report.css sets its font; figures of one width take a little more than the canvas says.
function textWidth(text, cls) {
  const strong = (cls ?? "").includes("strong");
  ruler.font = `${strong ? "600 12.5px" : "11.5px"} ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text).width * 1.04 + 2;
}
// A label that is moved where it would leave the plot's `width`.
function labelWithin(width, x, y, text, anchor, cls) {
  const size = textWidth(text, cls),
    before = { middle: size / 2, end: size }[anchor] ?? 0;
  return label(Math.max(before, Math.min(x, width - size + before)), y, text, anchor, cls);
}
// Those of `ticks` whose labels keep apart when centred at `at(tick)` within `width`, the first ones first.
function ticksApart(ticks, at, textOf, width = Infinity) {
  const kept = [];
  for (const tick of ticks) {
    const half = textWidth(textOf(tick)) / 2,
      middle = Math.max(half, Math.min(at(tick), width - half));
    if (kept.every(([, other, space]) => Math.abs(other - middle) > space + half + 8)) kept.push([tick, middle, half]);
  }
  return kept.map(([tick]) => tick);
}
const rect = (x, y, width, height, attributes) =>
  svg("rect", { x: x.toFixed(2), y: y.toFixed(2), width: Math.max(0, width).toFixed(2), height, ...attributes });

function pathOf(points) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

function segments(title, options, chosen, choose) {
  const name = `choice-${Math.random().toString(36).slice(2)}`;
  return el(
    "fieldset",
    { class: "segments", "aria-label": title },
    options.map(([value, text]) => {
      const input = el("input", { type: "radio", name, value, onchange: () => choose(value) });
      input.checked = value === chosen;
      return el("label", {}, input, el("span", {}, text));
    }),
  );
}

function armToggles(arms, hidden, changed) {
  return arms.map((arm, index) => {
    const button = el(
      "button",
      { type: "button", class: armClass(index), "aria-pressed": String(!hidden.has(index)) },
      swatch(index),
      arm.name,
    );
    button.addEventListener("click", () => {
      if (!hidden.delete(index)) hidden.add(index);
      button.setAttribute("aria-pressed", String(!hidden.has(index)));
      changed();
    });
    return button;
  });
}

const tip = {
  get node() {
    return document.querySelector(".tip");
  },
  show(x, y, ...children) {
    const node = this.node;
    node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
    node.hidden = false;
    const box = node.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - box.width - 16 : x + 16;
    const top = y + 16 + box.height > innerHeight ? y - box.height - 12 : y + 16;
    node.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
    node.style.top = `${Math.max(8, top)}px`;
  },
  hide() {
    this.node.hidden = true;
  },
  row: (arm, name, value) =>
    el(
      "div",
      { class: "tip-row" },
      el("span", { class: armClass(arm) }, swatch(arm ?? 0), " ", name),
      el("b", {}, value),
    ),
};

// One tab stop for a row of marks: arrows walk them, focus and hover show the same tip.
function walkable(nodes, describe, choose) {
  nodes.forEach((node, i) => {
    node.classList.add("stop");
    node.setAttribute("tabindex", i ? "-1" : "0");
    const show = (x, y) => tip.show(x, y, describe(i));
    const here = () => {
      const box = node.getBoundingClientRect();
      show(box.x + box.width / 2, box.y + box.height);
    };
    node.addEventListener("pointermove", (event) => show(event.clientX, event.clientY));
    node.addEventListener("pointerleave", () => tip.hide());
    node.addEventListener("focus", here);
    node.addEventListener("blur", () => tip.hide());
    if (choose) node.addEventListener("click", () => choose(i));
    node.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step) {
        const next = nodes[(i + step + nodes.length) % nodes.length];
        node.setAttribute("tabindex", "-1");
        next.setAttribute("tabindex", "0");
        next.focus();
        event.preventDefault();
        event.stopPropagation();
      } else if (event.key === "Enter" && choose) choose(i);
      else if (event.key === "Escape") tip.hide();
    });
  });
}

// Draws now and whenever the width changes; `draw` gets the width in px.
function responsive(host, draw) {
  let width = 0;
  const again = () => draw(Math.max(260, width || host.clientWidth || 960));
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 1) return;
    width = entry.contentRect.width;
    again();
  }).observe(host);
  again();
  return again;
}

// A name cut to fit `width` px of strong label text.
function short(name, width) {
  if (textWidth(name, "strong") <= width) return name;
  let most = name.length - 1;
  while (most > 1 && textWidth(`${name.slice(0, most)}…`, "strong") > width) most--;
  return `${name.slice(0, most)}…`;
}

const empty = (host, text) => host.append(el("p", { class: "empty" }, text));
