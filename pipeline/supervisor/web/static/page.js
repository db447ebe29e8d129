// Polls the daemon once a second while the page is visible, and shows its answers; of a run that has ended, once.

import { LineChart, ShareChart, ago, busyShare, byStep, byTime, NAMES, when } from "./charts.js";
import { Feed } from "./rollouts.js";

const INTERVAL_MS = 1000, TIMEOUT_MS = 10000, MOST_POINTS = 4000;
const $ = (id) => document.getElementById(id);
const fixed = (digits) => (value) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const shown = (value, format) => value === null || value === undefined ? "–" : format(value);
const bytes = (count) => {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, count)) / 10));
  return `${(count / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
};
// Losses and norms differ by powers of ten between runs.
const digits = (value) => value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) ? value.toExponential(1) : value.toLocaleString("en", { maximumSignificantDigits: 3 });
// Scores have a common scale, a further number of a reward function has any.
const mean = (value) => (value !== 0 && Math.abs(value) < 1e-3 ? digits : fixed(3))(value);
const percent = (value) => `${digits(100 * value)} %`;
const LEARNING = [
  ["pass_at_1", "Share of right responses to held-out prompts", "share", percent],
  ["loss", "Loss of a step", "loss", digits], ["kl", "KL from the reference in nats a token", "nats", digits],
  ["entropy", "Entropy of the policy in nats a token", "nats", digits], ["response_length", "Mean response length in tokens", "tokens", fixed(1)],
  ["clipped", "Share of the trained tokens whose ratio was clipped", "share", percent],
  ["cut", "Share of the responses that were cut at their longest length", "share", percent],
  ["without_signal", "Share of the groups whose rewards are equal", "share", percent], ["gradient_norm", "Gradient norm of a step before clipping", "norm", digits],
];
const write = (id, text) => { if ($(id).textContent !== text) $(id).textContent = text; };

let points = [];
let latest = null;
let cursor = "";
let answered_ms = 0;

const charts = [
  new LineChart($("chart-reward"), "Mean reward of a step, and its spread", { key: "reward", spread: "reward_spread", format: fixed(3), unit: "reward" }),
  ...LEARNING.map(([key, name, unit, format]) => new LineChart($(`chart-${key}`), name, { key, format, unit })),
  new LineChart($("chart-speed"), "Response tokens a second", { key: "tokens_per_s", format: fixed(0), unit: "tokens/s" }),
  new LineChart($("chart-ready"), "Rows that wait for the trainer", { key: "ready_items", format: fixed(0), unit: "rows", capacity: () => latest?.status.buffer.capacity_items }),
  new LineChart($("chart-staleness"), "Staleness of trained rows in versions", { key: "staleness", format: fixed(2), unit: "versions" }),
  ...["rollout", "trainer", "buffer"].map((role) => new ShareChart($(`chart-${role}`), `Time of the ${role} by activity`, role, $(`legend-${role}`))),
];
const feed = new Feed();

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
  if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
  return answer.json();
}

function showRun({ status, why }) {
  const { buffer } = status;
  write("state", status.state);
  $("state").className = `pill ${status.state}`;
  write("what", `${status.algorithm} · ${status.model.split("/").slice(-2).join("/")}`);
  $("what").title = status.model;
  write("step", shown(status.step, fixed(0)));
  write("step-of", status.max_steps ? `of ${fixed(0)(status.max_steps)} steps` : "steps");
  $("progress").hidden = !status.max_steps;
  $("progress").value = status.max_steps ? Math.min(1, status.step / status.max_steps) : 0;
  write("version", shown(status.policy_version, fixed(0)));
  const ended_s = status.ended_unix_s;
  write("since", ended_s ? "ended" : "up");
  write("uptime", ended_s ? when(ended_s) : ago(status.uptime_s));
  $("links").hidden = Boolean(ended_s);
  write("why", why.join(" ") || "Nothing to report yet.");
  write("reward", shown(status.reward_mean, fixed(3)));
  const change = status.reward_trend;
  write("reward-spread", change === null || change === undefined ? "mean of the last step" : `mean of the last step, ${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(3)} since step ${shown(status.reward_since_step, fixed(0))}`);
  write("reward-functions", Object.entries(status.reward_functions).map(([name, value]) => `${name} ${mean(value)}`).join(", "));
  for (const [key, , , format] of LEARNING) write(key, shown(status.learning[key], format));
  showEvaluation(status.evaluation);
  write("speed", shown(status.tokens_per_s, fixed(0)));
  write("ready", shown(buffer.ready_items, fixed(0)));
  write("ready-of", buffer.capacity_items ? `of ${fixed(0)(buffer.capacity_items)} rows ready, ${fixed(0)(buffer.leased_items)} leased` : "rows ready");
  write("staleness", shown(status.staleness_mean_versions, fixed(2)));
  write("run", `run ${status.run}, ${status.run_id}`);
  write("checkpoint", status.checkpoint && `checkpoint ${status.checkpoint}`);
  document.title = status.reward_mean === null || status.reward_mean === undefined ? `${status.state} · rlhfd` : `${status.reward_mean.toFixed(3)} at step ${status.step} · rlhfd`;
  const lost = buffer.unaccounted;
  $("lost").hidden = !lost;
  if (lost) write("lost", `${lost} rows are unaccounted for: please report this.`);
  const rows = status.processes.map((process) => [
    process.name, process.state, NAMES[process.activity] ?? process.activity, process.pid ?? "–", device(process), process.restarts,
    process.pid ? bytes(process.resident_bytes) : "–", process.pid ? ago(process.uptime_s) : "–", engine(process),
  ]);
  showRows($("processes"), rows);
  $("all-processes").hidden = !rows.length;
}

function showEvaluation(evaluation) {
  $("held-out").hidden = !evaluation;
  if (!evaluation) return;
  // Not from the values of a step: version 0 is evaluated before the first one.
  write("pass_at_1", shown(evaluation.pass_at_1, percent));
  // With k = 1 both are one number.
  const of_k = evaluation.k === 1 ? "" : `, pass@${evaluation.k} ${shown(evaluation.pass_at_k, percent)}`;
  const passed = evaluation.version === null ? "not evaluated yet" : `right at version ${fixed(0)(evaluation.version)}${of_k}`;
  write("held-out-of", passed + (evaluation.prompts ? `; ${fixed(0)(evaluation.done)} of ${fixed(0)(evaluation.prompts)} prompts` : ""));
}

/** The number of a process's GPU with its name, or cpu; of a worker whose actor runs on a node of a cluster, the node. */
function device(process) {
  if (process.node) return `node ${process.node}`;
  return process.device && process.device !== process.devices ? `${process.devices}: ${process.device}` : process.devices;
}

/** The work in hand of a worker's engine, its cache and its speed. */
function engine(process) {
  if (!process.engine) return "–";
  const { running, waiting, cache_ratio, preemptions, prefix_hit_ratio, tokens_in_per_s, tokens_out_per_s } = process.engine;
  return [
    `${fixed(0)(running)} run`, `${fixed(0)(waiting)} wait`, cache_ratio ? `cache ${fixed(0)(100 * cache_ratio)} %` : "",
    preemptions ? `${fixed(0)(preemptions)} preempted` : "", prefix_hit_ratio ? `prefix hits ${fixed(0)(100 * prefix_hit_ratio)} %` : "",
    `${fixed(0)(tokens_in_per_s)} tokens/s in, ${fixed(0)(tokens_out_per_s)} out`,
  ].filter(Boolean).join(", ");
}

/** Updates cell by cell: replacing a row would lose the text selection in it. */
function showRows(body, rows) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  for (const [at, row] of rows.entries()) {
    const line = body.rows[at] ?? body.insertRow();
    for (const [column, value] of row.entries()) {
      const cell = line.cells[column] ?? line.insertCell();
      if (column === 1) {
        const pill = cell.firstElementChild ?? cell.appendChild(document.createElement("span"));
        pill.className = `pill ${value}`;
        pill.textContent = value;
      } else {
        if ([3, 5, 6, 7].includes(column)) cell.className = "number";
        if (cell.textContent !== String(value)) cell.textContent = value;
      }
    }
  }
}

function showCharts() {
  if (!points.length) return;
  const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;
  const seconds = Number(chosen("range"));
  const all = byTime(points), last = all.at(-1);
  // Before the first response the charts would be empty.
  const first = all.find((point) => point.tokens_per_s > 0) ?? all[0];
  let start = Math.max(seconds ? last.to - seconds : 0, first.from), end = last.to;
  let seen = all.filter((point) => point.to > start || (point.to === point.from && point.to >= start));
  // The time of the left edge; a pause within the first point counts as before it.
  const start_s = Math.max(seen[0].start_s, seen[0].end_s - (seen[0].to - start));
  const { state, ended_unix_s } = latest.status;
  const steps = last.step ? [`, step ${seen[0].step}`, `, step ${last.step}`] : ["", ""];
  let from = `${ended_unix_s ? when(start_s) : `${ago(last.end_s - start_s)} ago`}${steps[0]}`;
  let to = `${ended_unix_s || state === "paused" ? when(last.end_s) : "now"}${steps[1]}`;
  if (chosen("axis") === "step") {
    seen = byStep(seen);
    [start, end] = [seen[0].from, seen.at(-1).to];
    [from, to] = [`step ${seen[0].step}`, `step ${seen.at(-1).step}`];
  }
  for (const chart of charts) chart.draw(seen, start, end, from, to);
  for (const role of ["rollout", "trainer", "buffer"]) {
    write(`${role}-busy`, shown(busyShare(seen, role, start), (busy) => `${Math.round(busy * 100)} %`));
  }
}

const nameOf = ({ status }) => `${status.run} ${status.run_id}`;

/** Shows the newest answers; returns whether they are the last ones. */
async function look() {
  try {
    const after_s = points.length && points.length < MOST_POINTS ? points.at(-1).end_s : 0;
    let answer = await ask(`/api/live?after_s=${after_s}`);
    if (latest && nameOf(answer) !== nameOf(latest)) {
      // Another run at the same address, or the same name after `start --fresh`.
      [points, cursor] = [[], ""];
      feed.clear();
      if (after_s) answer = await ask("/api/live?after_s=0");
    }
    latest = answer;
    if (points.length && after_s) points.push(...latest.history);
    else points = latest.history;
    showRun(latest);
    showCharts();
    const rollouts = await ask(`/api/samples?cursor=${encodeURIComponent(cursor)}`);
    if (rollouts.hidden) feed.hide(rollouts.hidden);
    else { cursor = rollouts.cursor; feed.add(rollouts.samples); }
    answered_ms = Date.now();
    return latest.status.state === "ended";
  } catch (error) {
    const since = answered_ms ? ` since ${new Date(answered_ms).toLocaleTimeString()}` : "";
    write("state", "no answer");
    $("state").className = "pill gone";
    write("why", `The daemon has not answered${since}. This page keeps asking, and shows the last known values.`);
    return false;
  }
}

let wake = () => {};
document.addEventListener("visibilitychange", () => wake());

async function watch() {
  for (;;) {
    if (!document.hidden && await look()) return;
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, INTERVAL_MS);
    });
  }
}

for (const choice of document.querySelectorAll("input[name=range], input[name=axis]")) choice.addEventListener("change", showCharts);
watch();
