// Charts of a series over time as SVG: a line with its spread, or shares stacked to one.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 1000, HEIGHT = 100;

export const ORDER = [
  "generate", "environment", "train", "logprob", "ref_logprob", "value", "reward", "seal", "publish", "fetch_weights",
  "start", "other",
  "wait_ticket_full", "wait_ticket_staleness", "asleep", "wait_card", "wait_data",
];
export const NAMES = {
  ref_logprob: "reference log-prob", logprob: "log-prob", fetch_weights: "fetch weights", wait_data: "wait for work",
  wait_ticket_full: "buffer is full", wait_ticket_staleness: "staleness bound",
  asleep: "engine asleep", wait_card: "wait for the card",
};
export const isWait = (activity) => activity.startsWith("wait_") || activity === "asleep";

function element(name, className, parent) {
  const made = document.createElementNS(NS, name);
  if (className) made.setAttribute("class", className);
  parent?.append(made);
  return made;
}

function label(className, parent) {
  const made = document.createElement("span");
  made.className = className;
  parent.append(made);
  return made;
}

export const ago = (seconds) =>
  seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min`
  : seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;

/** Yields the consecutive points that have a value, split at gaps in the record. */
function* segments(points, known) {
  let segment = [];
  let end = null;
  for (const point of points) {
    // Points of one start of the daemon follow each other without a gap.
    const isGap = end !== null && point.start_s - end > 1;
    if (isGap && segment.length) { yield segment; segment = []; }
    end = point.end_s;
    if (known(point)) segment.push(point);
  }
  if (segment.length) yield segment;
}

class Chart {
  /** @param {HTMLElement} host @param {string} name label for screen readers */
  constructor(host, name) {
    this.host = host;
    this.name = name;
    this.points = [];
    this.svg = element("svg", "", host);
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("aria-hidden", "true");
    host.tabIndex = 0;
    host.setAttribute("role", "img");
    this.cross = element("line", "cross", null);
    for (const part of ["top", "bottom", "from", "to", "read"]) this[part] = label(part, host);
    this.read.hidden = true;
    this.at = null;
    host.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.#look(this.start_s + ((event.clientX - box.left) / box.width) * (this.end_s - this.start_s));
    });
    for (const leaving of ["pointerleave", "blur"]) host.addEventListener(leaving, () => this.#look(null));
    host.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined || !this.points.length) return;
      event.preventDefault();
      const last = this.points.length - 1;
      const now = this.at === null ? last : this.#nearest(this.at);
      const next = Math.min(last, Math.max(0, now + step));
      this.#look((this.points[next].start_s + this.points[next].end_s) / 2);
    });
  }

  draw(points, start_s, end_s) {
    this.points = points;
    this.start_s = start_s;
    this.end_s = Math.max(end_s, start_s + 1);
    const box = this.svg;
    box.replaceChildren();
    for (const share of [0, 0.5, 1]) {
      const line = element("line", "grid", box);
      for (const [key, value] of Object.entries({ x1: 0, x2: WIDTH, y1: HEIGHT * share, y2: HEIGHT * share })) line.setAttribute(key, value);
    }
    this.shapes(box);
    box.append(this.cross);
    const steps = points.length && points.at(-1).step ? [`, step ${points[0].step}`, `, step ${points.at(-1).step}`] : ["", ""];
    this.from.textContent = `${ago(this.end_s - this.start_s)} ago${steps[0]}`;
    this.to.textContent = `now${steps[1]}`;
    this.host.setAttribute("aria-label", `${this.name}: ${points.length ? this.text(points.at(-1)) : "no data yet"}`);
    this.#look(this.at);
  }

  x(time_s) { return (((time_s - this.start_s) / (this.end_s - this.start_s)) * WIDTH).toFixed(1); }
  middle(point) { return this.x(Math.max(this.start_s, (point.start_s + point.end_s) / 2)); }
  #nearest(time_s) {
    let best = 0;
    for (const [index, point] of this.points.entries())
      if (Math.abs((point.start_s + point.end_s) / 2 - time_s) < Math.abs((this.points[best].start_s + this.points[best].end_s) / 2 - time_s)) best = index;
    return best;
  }
  #look(time_s) {
    this.at = time_s;
    const shown = time_s !== null && this.points.length > 0;
    this.read.hidden = !shown;
    this.cross.setAttribute("visibility", shown ? "visible" : "hidden");
    if (!shown) return;
    const point = this.points[this.#nearest(time_s)];
    const x = this.middle(point);
    for (const [key, value] of Object.entries({ x1: x, x2: x, y1: 0, y2: HEIGHT })) this.cross.setAttribute(key, value);
    this.read.textContent = `${new Date(point.end_s * 1000).toLocaleTimeString()}  ${this.text(point)}`;
  }
}

/** One value over time; with `spread`, a band of as much above and below. */
export class LineChart extends Chart {
  constructor(host, name, { key, spread, format, unit, least = 0, capacity }) {
    super(host, name);
    Object.assign(this, { key, spread, format, unit, least, capacity });
  }
  text(point) {
    if (point[this.key] === undefined) return `step ${point.step}`;
    const spread = this.spread && point[this.spread] !== undefined ? ` ± ${this.format(point[this.spread])}` : "";
    return `${this.format(point[this.key])}${spread}, step ${point.step}`;
  }
  shapes(box) {
    const known = (point) => point[this.key] !== undefined;
    const values = this.points.filter(known).map((point) => point[this.key]);
    const reach = this.spread ? this.points.filter(known).flatMap((p) => [p[this.key] + (p[this.spread] ?? 0), p[this.key] - (p[this.spread] ?? 0)]) : values;
    let low = Math.min(this.least, ...reach), high = Math.max(this.capacity?.() ?? 0, ...reach);
    if (!(high > low)) high = low + 1;
    // Rewards between 0 and 1 get the axis 0 to 1: no reward reaches a spread beyond it.
    if (this.spread && values.length && Math.min(...values) >= 0 && Math.max(...values) <= 1) { low = 0; high = 1; }
    this.top.textContent = values.length ? `${this.format(high)} ${this.unit}` : this.unit;
    this.bottom.textContent = values.length ? this.format(low) : "";
    const y = (value) => (HEIGHT * (1 - (Math.min(high, Math.max(low, value)) - low) / (high - low))).toFixed(2);
    for (const segment of segments(this.points, known)) {
      const path = segment.map((point, at) => `${at ? "L" : "M"}${this.middle(point)},${y(point[this.key])}`);
      if (this.spread) {
        const upper = segment.map((p) => `${this.middle(p)},${y(p[this.key] + (p[this.spread] ?? 0))}`);
        const lower = segment.map((p) => `${this.middle(p)},${y(p[this.key] - (p[this.spread] ?? 0))}`).reverse();
        element("path", "band", box).setAttribute("d", `M${[...upper, ...lower].join("L")}Z`);
      }
      // One point has no line: a dot, which is a line without length and with round ends.
      if (segment.length === 1) path.push(path[0].replace("M", "L"));
      element("path", segment.length === 1 ? "line dot" : "line", box).setAttribute("d", path.join(""));
    }
  }
}

/** Time of the processes of a role by activity, stacked to one. */
/** Returns the share of each activity of a role over all points from `start_s` on; null if none is known. */
export function meanShares(points, role, start_s) {
  const spent = {};
  let seconds = 0;
  for (const point of points) {
    const shares = Object.entries(point.shares?.[role] ?? {});
    if (!shares.length) continue;
    const seen = point.seconds * (point.end_s - Math.max(start_s, point.start_s)) / (point.end_s - point.start_s || 1);
    seconds += seen;
    for (const [name, share] of shares) spent[name] = (spent[name] ?? 0) + share * seen;
  }
  return seconds ? Object.fromEntries(Object.entries(spent).map(([name, sum]) => [name, sum / seconds])) : null;
}

export class ShareChart extends Chart {
  constructor(host, name, role, legend) {
    super(host, name);
    this.role = role;
    this.legend = legend;
  }
  text(point) {
    const shares = point.shares[this.role] ?? {};
    const named = Object.entries(shares).sort((a, b) => b[1] - a[1]).slice(0, 3);
    return named.map(([name, share]) => `${NAMES[name] ?? name} ${Math.round(share * 100)} %`).join(", ");
  }
  shapes(box) {
    const known = (point) => Object.keys(point.shares?.[this.role] ?? {}).length > 0;
    const seen = new Set(this.points.filter(known).flatMap((point) => Object.keys(point.shares[this.role])));
    const names = [...ORDER.filter((name) => seen.has(name)), ...[...seen].filter((name) => !ORDER.includes(name))];
    for (const segment of segments(this.points, known)) {
      let below = segment.map(() => 0);
      for (const name of names) {
        const above = segment.map((point, at) => below[at] + (point.shares[this.role][name] ?? 0));
        // Steps, not slopes: a share applies to its whole time span.
        const edge = (heights) => segment.flatMap((point, at) => [point.start_s, point.end_s].map((s) => `${this.x(Math.max(this.start_s, s))},${(HEIGHT * (1 - heights[at])).toFixed(2)}`));
        element("path", `area a-${name}`, box).setAttribute("d", `M${[...edge(above), ...edge(below).reverse()].join("L")}Z`);
        below = above;
      }
    }
    this.top.textContent = "100 % of the time";
    this.bottom.textContent = "0";
    const whole = meanShares(this.points, this.role, this.start_s) ?? {};
    const worth = names.filter((name) => this.points.some((point) => (point.shares?.[this.role]?.[name] ?? 0) >= 0.01));
    this.legend.replaceChildren(...worth.map((name) => {
      const entry = document.createElement("li");
      entry.className = `a-${name}`;
      entry.textContent = `${NAMES[name] ?? name} ${Math.round((whole[name] ?? 0) * 100)} %`;
      return entry;
    }));
  }
}
