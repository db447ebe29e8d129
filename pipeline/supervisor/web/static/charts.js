// Charts of a series over time or steps as SVG: a line with its spread, or shares stacked to one.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 1000, HEIGHT = 100;

export const ORDER = [
  "generate", "environment", "train", "logprob", "ref_logprob", "value", "reward", "seal", "publish", "fetch_weights",
  "start", "other",
  "wait_ticket_full", "wait_ticket_staleness", "wait_ticket_paused", "asleep", "wait_card", "wait_data",
];
export const NAMES = {
  ref_logprob: "reference log-prob", logprob: "log-prob", fetch_weights: "fetch weights", wait_data: "wait for work",
  wait_ticket_full: "buffer is full", wait_ticket_staleness: "staleness bound",
  wait_ticket_paused: "paused",
  asleep: "engine asleep", wait_card: "wait for the card",
};
const isWait = (activity) => activity.startsWith("wait_") || activity === "asleep";

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

/** Returns a Unix time of today as a time, another one as date and time. */
export function when(unix_s) {
  const date = new Date(unix_s * 1000);
  return date.toDateString() === new Date().toDateString() ? date.toLocaleTimeString() : date.toLocaleString();
}

export const ago = (seconds) =>
  seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min`
  : seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;

/**
 * Returns points with their places on an axis of seconds in which the run was observed: `from`, `to`, and `at` between.
 * Time in which the daemon was down, or the run rested in a pause, is left out: `left_s` before a point, `within_s` in it.
 */
export function byTime(points) {
  let to = 0, end_s = null;
  return points.map((point) => {
    const from = to, seconds = point.seconds ?? 0, span_s = point.end_s - point.start_s;
    const left_s = end_s === null ? 0 : point.start_s - end_s, within_s = span_s - seconds;
    to += seconds;
    end_s = point.end_s;
    // Points of one start of the daemon follow each other without a gap. Within one, a clock that was set is no pause.
    return { ...point, from, to, at: (from + to) / 2, left_s: left_s > 1 ? left_s : 0, within_s: within_s > Math.max(2, span_s / 1000) ? within_s : 0 };
  });
}

/** Returns one point a step, placed on an axis of steps; steps that were taken again hide those before. */
export function byStep(points) {
  const steps = new Map();
  let least = Infinity;
  for (const point of [...points].reverse()) {
    if (point.step > least) continue;
    least = point.step;
    if (!steps.has(least)) steps.set(least, []);
    steps.get(least).unshift(point);
  }
  let from = null;
  return [...steps].reverse().map(([step, group]) => {
    const made = { ...meanOf(group), from: from ?? step - 1, to: step, at: step, left_s: 0, within_s: 0 };
    from = step;
    return made;
  });
}

// An evaluation's value holds from its end on: of a step that has one, the points before it have that of an earlier one.
const NEWEST = new Set(["pass_at_1"]);
const NO_VALUE = new Set(["start_s", "end_s", "seconds", "step", "from", "to", "at", "left_s", "within_s"]);

/** Returns the point of the whole span of some points: each value is their mean, weighed by seconds, or the newest. */
function meanOf(group) {
  if (group.length === 1) return group[0];
  const made = { ...group.at(-1), start_s: group[0].start_s, seconds: group.reduce((sum, point) => sum + (point.seconds ?? 0), 0) };
  for (const key of new Set(group.flatMap(Object.keys))) {
    const known = group.filter((point) => typeof point[key] === "number");
    if (NO_VALUE.has(key) || !known.length) continue;
    if (NEWEST.has(key)) { made[key] = known.at(-1)[key]; continue; }
    const weight = (point) => point.seconds || 1e-9;
    made[key] = known.reduce((sum, point) => sum + weight(point) * point[key], 0) / known.reduce((sum, point) => sum + weight(point), 0);
  }
  const roles = new Set(group.flatMap((point) => Object.keys(point.shares ?? {})));
  made.shares = Object.fromEntries([...roles].map((role) => [role, meanShares(group, role, -Infinity) ?? {}]));
  return made;
}

/** Returns whether values with a mean and a spread may all lie between 0 and 1: the spread of others is larger, as that of -1 and 1. */
export const isWithinOne = (mean, spread) => mean >= 0 && mean <= 1 && spread <= Math.sqrt(mean * (1 - mean)) + 1e-3;

/** Yields the consecutive points that have a value, split where time was left out. */
function* segments(points, known) {
  let segment = [];
  for (const point of points) {
    if (point.left_s && segment.length) { yield segment; segment = []; }
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
    // Of an image a screen reader says the name alone.
    this.said = label("unseen", host.parentElement);
    this.said.setAttribute("role", "status");
    this.at = null;
    host.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.#look(this.start + ((event.clientX - box.left) / box.width) * (this.end - this.start));
    });
    for (const leaving of ["pointerleave", "blur"]) host.addEventListener(leaving, () => this.#look(null));
    host.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined || !this.points.length) return;
      event.preventDefault();
      const last = this.points.length - 1;
      const now = this.at === null ? last : this.#nearest(this.at);
      const next = Math.min(last, Math.max(0, now + step));
      this.#look(this.points[next].at);
      this.said.textContent = this.read.textContent;
    });
  }

  /** Draws placed points between two places of their axis, whose ends have these labels. */
  draw(points, start, end, from, to) {
    this.points = points;
    this.start = start;
    this.end = Math.max(end, start + 1);
    const box = this.svg;
    box.replaceChildren();
    for (const share of [0, 0.5, 1]) {
      const line = element("line", "grid", box);
      for (const [key, value] of Object.entries({ x1: 0, x2: WIDTH, y1: HEIGHT * share, y2: HEIGHT * share })) line.setAttribute(key, value);
    }
    this.shapes(box);
    for (const point of points) {
      // The time before the first point is not shown either way.
      if (point !== points[0] && point.left_s) this.#line("pause", this.x(point.from));
      if (point.within_s) this.#line("pause", this.middle(point));
    }
    box.append(this.cross);
    this.from.textContent = from;
    this.to.textContent = to;
    this.host.setAttribute("aria-label", `${this.name}: ${points.length ? this.text(points.at(-1)) : "no data yet"}`);
    this.#look(this.at);
  }

  x(place) { return (((place - this.start) / (this.end - this.start)) * WIDTH).toFixed(1); }
  middle(point) { return this.x(Math.max(this.start, point.at)); }
  #line(className, x) {
    const line = element("line", className, this.svg);
    for (const [key, value] of Object.entries({ x1: x, x2: x, y1: 0, y2: HEIGHT })) line.setAttribute(key, value);
  }
  #nearest(place) {
    let best = 0;
    for (const [index, point] of this.points.entries())
      if (Math.abs(point.at - place) < Math.abs(this.points[best].at - place)) best = index;
    return best;
  }
  #look(place) {
    this.at = place;
    const shown = place !== null && this.points.length > 0;
    this.read.hidden = !shown;
    this.cross.setAttribute("visibility", shown ? "visible" : "hidden");
    if (!shown) return;
    const point = this.points[this.#nearest(place)];
    const x = this.middle(point);
    for (const [key, value] of Object.entries({ x1: x, x2: x, y1: 0, y2: HEIGHT })) this.cross.setAttribute(key, value);
    const left_s = (point === this.points[0] ? 0 : point.left_s) + point.within_s;
    this.read.textContent = `${when(point.end_s)}  ${this.text(point)}${left_s ? `, ${ago(left_s)} left out` : ""}`;
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
    if (this.spread && values.length && this.points.filter(known).every((p) => isWithinOne(p[this.key], p[this.spread] ?? 0))) { low = 0; high = 1; }
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

/** Returns the share of each activity of a role over all points from a place of their axis on; null if none is known. */
function meanShares(points, role, start) {
  const spent = {};
  let seconds = 0;
  for (const point of points) {
    const shares = Object.entries(point.shares?.[role] ?? {});
    if (!shares.length) continue;
    const seen = point.seconds * (point.to > point.from ? (point.to - Math.max(start, point.from)) / (point.to - point.from) : 1);
    seconds += seen;
    for (const [name, share] of shares) spent[name] = (spent[name] ?? 0) + share * seen;
  }
  return seconds ? Object.fromEntries(Object.entries(spent).map(([name, sum]) => [name, sum / seconds])) : null;
}

/** Returns the share of the time of a role at work, as `meanShares`. */
export function busyShare(points, role, start) {
  const shares = meanShares(points, role, start);
  return shares && Object.entries(shares).reduce((sum, [name, share]) => sum + (isWait(name) ? 0 : share), 0);
}

/** Time of the processes of a role by activity, stacked to one. */
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
        const edge = (heights) => segment.flatMap((point, at) => [point.from, point.to].map((place) => `${this.x(Math.max(this.start, place))},${(HEIGHT * (1 - heights[at])).toFixed(2)}`));
        element("path", `area a-${name}`, box).setAttribute("d", `M${[...edge(above), ...edge(below).reverse()].join("L")}Z`);
        below = above;
      }
    }
    this.top.textContent = "100 % of the time";
    this.bottom.textContent = "0";
    const whole = meanShares(this.points, this.role, this.start) ?? {};
    const worth = names.filter((name) => this.points.some((point) => (point.shares?.[this.role]?.[name] ?? 0) >= 0.01));
    this.legend.replaceChildren(...worth.map((name) => {
      const entry = document.createElement("li");
      entry.className = `a-${name}`;
      entry.textContent = `${NAMES[name] ?? name} ${Math.round((whole[name] ?? 0) * 100)} %`;
      return entry;
    }));
  }
}
