// The feed of rollouts: groups side by side, tokens coloured, search and filter. Text only ever goes into textContent.

const AT_FIRST = 12, MORE = 12, MOST = 200, TOKENS_AT_FIRST = 256;
const $ = (id) => document.getElementById(id);
const COLOURS = {
  advantages: { of: (response, at) => response.advantages.length === 1 ? response.advantages[0] : response.advantages[at], most: 2, words: ["worse than expected", "better"] },
  log_ratios: { of: (response, at) => response.log_ratios[at], most: 2, words: ["less likely than under the reference", "more likely"] },
  log_probs: { of: (response, at) => response.log_probs[at] === undefined ? undefined : -response.log_probs[at], most: 4, words: ["expected", "surprising"] },
};

const number = (value, digits = 3) => value === undefined ? "–" : `${+value.toFixed(digits)}`.replace("-", "−");
// A further number of a reward function may be far below 1.
const figure = (value) => value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1).replaceAll("-", "−") : number(value);

function make(tag, className, text, parent) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  parent?.append(made);
  return made;
}

/** Five depths of a colour; with a square root, so that small values still show. */
function shade(value, mode) {
  if (value === undefined || !value) return "";
  const depth = Math.min(5, Math.ceil(5 * Math.sqrt(Math.abs(value) / COLOURS[mode].most)));
  return `${mode === "log_probs" ? "s" : value > 0 ? "p" : "n"}${depth}`;
}

/** Replaces invisible characters, and those that reorder the text, by visible signs. */
const visible = (text) => text
  .replaceAll("\n", "⏎\n").replaceAll("\t", "→\t")
  .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
  .replace(/[\u007f-\u009f\p{Cf}\p{Zl}\p{Zp}]/gu, "␦");

export class Feed {
  constructor() {
    this.samples = [];
    this.waiting = [];
    this.cards = new Map();
    this.shown = AT_FIRST;
    this.isHeld = false;
    for (const id of ["search", "least", "which"]) $(id).addEventListener("input", () => { this.shown = AT_FIRST; this.draw(); });
    $("colour").addEventListener("input", () => this.recolour());
    $("more").addEventListener("click", () => { this.shown += MORE; this.draw(); });
    $("hold").addEventListener("click", () => {
      this.isHeld = !this.isHeld;
      $("hold").setAttribute("aria-pressed", String(this.isHeld));
      this.add([]);
    });
    this.recolour();
  }

  add(samples) {
    this.waiting.push(...samples);
    $("hold").textContent = !this.isHeld ? "Pause" : this.waiting.length ? `Continue, ${this.waiting.length} new` : "Continue";
    if (this.isHeld || !this.waiting.length) { this.waiting.splice(0, this.waiting.length - MOST); return; }
    const known = new Set(this.samples.map(nameOf));
    this.samples.unshift(...this.waiting.filter((sample) => !known.has(nameOf(sample))).reverse());
    this.waiting = [];
    for (const gone of this.samples.splice(MOST)) this.cards.delete(nameOf(gone));
    this.draw();
  }

  clear() {
    this.samples = [];
    this.waiting = [];
    this.cards.clear();
    this.draw();
  }

  hide(reason) {
    $("feed-note").textContent = reason;
    $("feed-note").hidden = false;
  }

  draw() {
    const found = this.samples.filter(selected());
    const cards = found.slice(0, this.shown).map((sample) => this.#card(sample));
    const feed = $("feed");
    for (const card of [...feed.children]) if (!cards.includes(card)) card.remove();
    for (const [at, card] of cards.entries()) if (feed.children[at] !== card) feed.insertBefore(card, feed.children[at] ?? null);
    $("more").hidden = found.length <= this.shown;
    $("feed-note").hidden = found.length > 0;
    $("feed-note").textContent = this.samples.length ? `None of ${this.samples.length} rollouts matches.` : "No rollout yet.";
  }

  recolour() {
    const mode = $("colour").value;
    for (const card of this.cards.values()) colourCard(card, mode);
    const [low, high] = COLOURS[mode].words;
    const signs = mode === "log_probs" ? ["s1", "s2", "s3", "s4", "s5"] : ["n5", "n3", "n1", "p1", "p3", "p5"];
    const scale = $("scale");
    scale.replaceChildren(low, ...signs.map((sign) => make("i", sign)), high);
  }

  #card(sample) {
    const name = nameOf(sample);
    if (!this.cards.has(name)) {
      const card = cardOf(sample);
      colourCard(card, $("colour").value);
      this.cards.set(name, card);
    }
    return this.cards.get(name);
  }
}

const nameOf = (sample) => `${sample.unix_s}-${sample.worker}-${sample.ticket}`;

function selected() {
  const text = $("search").value.toLowerCase(), least = $("least").valueAsNumber, which = $("which").value;
  return (sample) => {
    const rewards = sample.responses.map((response) => response.reward);
    const isMixed = Math.min(...rewards) !== Math.max(...rewards);
    if (which !== "all" && isMixed !== (which === "mixed")) return false;
    if (!Number.isNaN(least) && !(Math.max(...rewards) >= least)) return false;
    if (!text) return true;
    return [sample.prompt, sample.answer, ...sample.responses.map((r) => r.pieces.join(""))].some((t) => t.toLowerCase().includes(text));
  };
}

function cardOf(sample) {
  const card = make("article", "card rollout new");
  card.tabIndex = 0;
  const facts = make("div", "facts", undefined, card);
  const mean = sample.responses.reduce((sum, response) => sum + response.reward, 0) / sample.responses.length;
  for (const fact of [
    new Date(sample.unix_s * 1000).toLocaleTimeString(), `worker ${sample.worker}`, `ticket ${sample.ticket}`,
    `policy version ${sample.policy_version}`, `prompt of ${sample.prompt_tokens} tokens`,
    ...(sample.answer ? [`answer ${visible(sample.answer)}`] : []),
    ...(sample.responses.length > 1 ? [`mean reward ${number(mean)}`] : []),
    ...(sample.group_size > sample.responses.length ? [`${sample.responses.length} of ${sample.group_size} responses`] : []),
  ]) make("span", "", fact, facts).title = fact.startsWith("ticket ") ? "A ticket permits a worker to roll out some prompts, with memory for their rows." : "";
  const prompt = make("div", "text prompt", visible(sample.prompt), card);
  prompt.dir = "auto";
  const mates = make("div", "mates", undefined, card);
  // The best first; their order in the batch has no meaning.
  for (const response of [...sample.responses].sort((a, b) => b.reward - a.reward)) mates.append(mateOf(response));
  card.setAttribute("aria-label", `Rollout of ticket ${sample.ticket}, best reward ${number(Math.max(...sample.responses.map((r) => r.reward)))}`);
  return card;
}

function mateOf(response) {
  const mate = make("div", "mate");
  const score = make("div", "score", undefined, mate);
  make("b", "", number(response.reward), score);
  const parts = Object.entries(response.parts);
  if (parts.length > 1) for (const [name, value] of parts) make("span", "part", `${name.split(":").at(-1)} ${number(value)}`, score);
  for (const [name, value] of Object.entries(response.numbers || {})) make("span", "part", `${name} ${figure(value)}`, score);
  if (response.advantages.length === 1) make("span", "", `advantage ${number(response.advantages[0], 2)}`, score);
  make("span", "", `${response.tokens} tokens${response.stopped ? "" : ", cut at the limit"}${response.stop ? `, ended with ${response.stop}` : ""}`, score);
  const text = make("div", "text", undefined, mate);
  text.dir = "auto";
  const show = (from, to) => {
    for (let at = from; at < to; at++) {
      const token = make("span", "token", visible(response.pieces[at]), text);
      token.title = response.observed[at] ? "from the environment" : `advantage ${number(COLOURS.advantages.of(response, at))}, log-ratio ${number(COLOURS.log_ratios.of(response, at))}, log p ${number(response.log_probs[at])}`;
      token.reading = [response, at];
    }
  };
  const length = response.pieces.length;
  show(0, Math.min(length, TOKENS_AT_FIRST));
  if (length > TOKENS_AT_FIRST) {
    const rest = make("button", "", `Show all ${length} tokens`, mate);
    rest.addEventListener("click", () => {
      rest.remove();
      show(TOKENS_AT_FIRST, length);
      colourCard(mate, $("colour").value);
      // The button that had the focus is gone.
      text.tabIndex = 0;
      text.focus();
    });
  }
  if (length < response.tokens) make("p", "quiet", `The first ${length} of ${response.tokens} tokens are kept.`, mate);
  const details = make("details", "", undefined, mate);
  make("summary", "", "numbers", details);
  details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) details.append(numbersOf(response)); });
  return mate;
}

function numbersOf(response) {
  const box = make("div", "scroll");
  box.tabIndex = 0;
  const table = make("table", "", undefined, box);
  const head = make("tr", "", undefined, make("thead", "", undefined, table));
  for (const name of ["token", "advantage", "log-ratio", "log p"]) make("th", name === "token" ? "" : "number", name, head).scope = "col";
  const body = make("tbody", "", undefined, table);
  for (const [at, piece] of response.pieces.entries()) {
    const row = make("tr", "", undefined, body);
    make("td", "text", visible(piece), row);
    for (const value of [COLOURS.advantages.of(response, at), COLOURS.log_ratios.of(response, at), response.log_probs[at]]) make("td", "number", number(value), row);
  }
  return box;
}

function colourCard(card, mode) {
  for (const token of card.querySelectorAll(".token")) {
    const [response, at] = token.reading;
    token.className = `token ${response.observed[at] ? "observed" : shade(COLOURS[mode].of(response, at), mode)}`;
  }
}
