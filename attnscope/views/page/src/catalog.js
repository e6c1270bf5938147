// An atlas, or any record about heads: what is known of each head, as columns of numbers and words to search in.
import { breathe, manifest, unpackBlock } from "./data.js";
import { atlasHooks, ofAtlas, state } from "./state.js";

const EVEN = 0.1; // nats from uniform below which a head spreads evenly
const LITTLE = 0.3; // explained share below which a head is mostly undescribed
const numberOr = (value) => (value === null || value === undefined ? NaN : value);

/** A share in percent. */
export function percent(share) {
  return Number.isFinite(share) ? `${(100 * share).toFixed(0)}%` : "\u2013";
}

/** A number with three digits or so. */
export function shortNumber(value) {
  if (!Number.isFinite(value)) return "\u2013";
  const size = Math.abs(value);
  const text = size >= 99.95 ? size.toFixed(0) : size >= 9.995 ? size.toFixed(1) : size >= 0.0995 || size === 0 ? size.toFixed(2) : size >= 0.00095 ? String(Number(size.toPrecision(2))) : size.toExponential(0);
  return (value < 0 && /[1-9]/.test(text) ? "\u2212" : "") + text;
}

/** A value under uniform attention; what is left of 0 by rounding is 0. */
export function evenNumber(value) {
  return Number.isFinite(value) ? shortNumber(Math.abs(value) < 1e-6 ? 0 : value) : "";
}

function wordsOfTerm(term, parts) {
  const [share, even] = [numberOr(term.share), numberOr(term.even)];
  const avoided = term.weight < 0 && !(share >= even);
  const given =
    term.weight >= 0 && share < even ? ["more, given the other terms"] : term.weight < 0 && share >= even ? ["less, given the other terms"] : [];
  const more = parts.map((part) => `${part.weight >= 0 ? "more" : "less"} ${part.words}`);
  const said = Number.isFinite(share)
    ? [percent(share) + (term.share_of ? ` ${term.share_of}` : ""), `uniform ${percent(even)}`, ...given, ...more]
    : more;
  const named = avoided ? `not ${term.words}` : term.words;
  return said.length ? `${named} (${said.join("; ")})` : named;
}

const HARDLY = 0.02; // share of attention below which a part of a description is not mentioned

function listed(terms) {
  const whole = new Set(terms.filter((term) => !term.part_of).map((term) => term.feature));
  const said = terms
    .filter((term) => !whole.has(term.part_of))
    .map((term) => wordsOfTerm(term, terms.filter((part) => part.part_of === term.feature)));
  return said.join(", ");
}

function termsSaid(terms, explained, summary = "") {
  if (!terms.length) return "undescribed";
  return (summary || listed(terms)) + (explained >= LITTLE ? "" : "; mostly undescribed");
}

/** What a head attends to when it attends; empty = it only rests. */
function attendsOf({ terms, share, nats, explained, summary = "", pairs = [] }) {
  if (share < HARDLY) return "";
  if (nats < EVEN) return "all other tokens evenly";
  const said = termsSaid(terms, explained, summary);
  const such = pairs.map(({ query, key }) => `${query} → ${key}`).join(", ");
  return such && terms.length && !summary ? `${said}, such as ${such}` : said;
}

const avoids = (term) => term.weight < 0 && !(numberOr(term.share) >= numberOr(term.even));

/** How much a head rests, and on what; empty = hardly. */
function restsOf({ terms, active }) {
  if (active.share > 1 - HARDLY) return "";
  const on = terms.filter((term) => numberOr(term.share) >= HARDLY && !term.part_of && !avoids(term)).sort((a, b) => b.share - a.share);
  const named = on.slice(0, 2).map((term) => term.words);
  return `rests ${percent(1 - active.share)}${named.length ? ` on ${named.join(" and ")}` : ""}`;
}

/** The terms that a description sums up, with their shares; empty = its words list them. */
export function detailsOf({ terms, active }) {
  if (!active?.summary) return "";
  return [`terms: ${listed(active.terms)}`, terms.length ? `rests: ${listed(terms)}` : ""].filter(Boolean).join("; ");
}

/** A description in words, as records have it. */
function wordsOfDescription({ terms, nats, explained, active }) {
  if (nats < EVEN) return "spreads evenly";
  if (!active) return termsSaid(terms, explained);
  return [attendsOf(active), restsOf({ terms, active })].filter(Boolean).join("; ");
}

/** What a description predicts, in words: of the attention off the sinks, where a record tells them apart. */
export function predictedOf(description, interval) {
  const { explained, low, high, nats } = description.active?.share >= HARDLY ? description.active : description;
  if (description.nats < EVEN || nats < EVEN) return `${shortNumber(nats)} nats from uniform`;
  return `predicts ${percent(explained ?? NaN)}${interval(low ?? NaN, high ?? NaN, percent)} of what sets it apart from uniform attention (${shortNumber(nats)} nats)`;
}

/** What the other half of the texts has in place of the first term outside sinks; empty = the same. */
export function warningOf({ agrees, content, other_half: other }) {
  if (other) return `other half of the texts: ${other}`;
  return content || agrees !== false ? "" : "other half of the texts: another first term";
}

/** From how many texts and queries heads are described. */
export function sampleOf({ n_texts: drawn, n_queries: queries, n_scored: scored }, corpus) {
  const of = corpus?.n_texts > drawn ? ` of ${corpus.n_texts.toLocaleString("en")}` : "";
  return `described from ${drawn.toLocaleString("en")}${of} texts (${queries.toLocaleString("en")} queries): fitted on ${(drawn - scored).toLocaleString("en")}, scored on ${scored.toLocaleString("en")} others`;
}

/** A description in fewer words: what it attends to, or the terms with their shares. */
function briefOf({ terms: all, nats: nats_of_all, explained: of_all, active }) {
  if (nats_of_all < EVEN) return "spreads evenly";
  if (active?.summary && active.share >= HARDLY) return attendsOf(active);
  const { terms, nats, explained } = active && active.share >= HARDLY ? active : { terms: all, nats: nats_of_all, explained: of_all };
  if (nats < EVEN) return "all other tokens evenly";
  const whole = terms.filter((term) => !term.part_of || !terms.some(({ feature }) => feature === term.part_of));
  const said = whole.map((term) => {
    // The share of what a head avoids is that of the keys themselves: beside "not" it would be read the wrong way round.
    return avoids(term) ? `not ${term.words}` : `${term.words}${Number.isFinite(term.share) ? ` ${percent(term.share)}` : ""}`;
  });
  return said.length ? said.join(", ") + (explained >= LITTLE ? "" : "; mostly undescribed") : "undescribed";
}

/** A column of the table of heads: its name in expressions, how it is called, and its values by head. */
class Column {
  constructor({ values, low, high, uniform, ...facts }) {
    Object.assign(this, facts);
    const numbers = (some) => Float64Array.from(some || values.map(() => NaN), numberOr);
    [this.values, this.lows, this.highs, this.uniforms] = [values, low, high, uniform].map(numbers);
  }

  /** Its title, with the unit where the name does not say it. */
  get title() {
    const whole = { explained: "explained share", nats: "nats from uniform", map_x: "map of distances, x", map_y: "map of distances, y" }[this.name];
    if (whole) return whole;
    return this.unit && this.unit !== "share" && !this.label.includes(this.unit) ? `${this.label} (${this.unit})` : this.label;
  }

  /** What place a head has, the largest value first. */
  rank(at) {
    this.order ||= Float64Array.from(this.values.filter(Number.isFinite)).sort();
    let [low, high] = [0, this.order.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.order[middle] > this.values[at]) high = middle;
      else low = middle + 1;
    }
    return this.order.length - low + 1;
  }
}

/** The heads of a record and what is known of each. */
class Catalog {
  /**
   * @param record the record, as `describe` of it says, with the columns of its `table` of heads, and `tokens` by head where
   *     it has them
   * @param detail (number of a head) => promise of its card; null where the record has none
   */
  constructor(record, detail = null) {
    this.record = record;
    this.detail = detail;
    this.run = record.run || {};
    this.corpus = record.corpus || {};
    this.options = record.options || {};
    const kinds = new Set(record.heads.map(({ kind }) => kind));
    const described = new Map((record.descriptions?.heads || []).map((one) => [`${one.kind}.${one.layer}.${one.head}`, one]));
    this.heads = record.heads.map((head, at) => {
      const description = described.get(`${head.kind}.${head.layer}.${head.head}`) || null;
      return {
        at,
        kind: head.kind,
        layer: head.layer,
        head: head.head,
        name: `${kinds.size > 1 ? `${head.kind} ` : ""}L${head.layer}H${head.head}`,
        roles: head.roles || [],
        description,
        words: description ? wordsOfDescription(description) : head.words || "",
        brief: description ? briefOf(description) : head.words || "",
        tokens: record.tokens?.[at] || [],
        pairs: record.pairs?.[at] || (record.tables?.[at] || []).filter(({ side }) => side === "pairs").map(({ tokens, mass }) => [...tokens, mass]),
        near: head.near || null,
      };
    });
    this.hasRoles = this.heads.some(({ roles }) => roles.length);
    this.byName = new Map(this.heads.map((head) => [head.name, head.at]));
    const places = ["layer", "head"].map((name) => ({ name, label: name, values: record.heads.map((head) => head[name]) }));
    this.table = [...places, ...record.table].map((column) => new Column(column));
    this.columns = new Map(this.table.filter(({ hidden }) => !hidden).map((column) => [column.name, column]));
    const other = this.columns.has("relative_entropy") ? "relative_entropy" : [...this.columns.keys()][2] || "head";
    this.sides = this.columns.has("explained") ? ["nats", "explained"] : ["layer", other];
  }

  /** The columns of a kind: "measure" or "effect". */
  namesOf(kind) {
    return [...this.columns.values()].filter((column) => column.kind === kind).map(({ name }) => name);
  }

  /** What the filter asks; see `filterOf`. */
  get facts() {
    this.asked ||= {
      fields: new Map(this.table.map(({ name, values }) => [name, values])),
      flags: new Set(this.table.filter(({ kind }) => kind === "role").map(({ name }) => name)),
      texts: this.texts,
      pairs: this.pairs,
    };
    return this.asked;
  }

  /** What the filter may search in. */
  get texts() {
    return {
      name: this.heads.map(({ name }) => name.toLowerCase()),
      kind: this.heads.map(({ kind }) => kind),
      role: this.heads.map(({ roles }) => roles.map(({ name }) => `${name} ${name.replaceAll("_", " ")}`).join("\n") || "unclassified"),
      description: this.heads.map(({ words }) => words.toLowerCase()),
      token: this.heads.map(({ tokens }) => tokens.join("\n").toLowerCase()),
    };
  }

  /** The pairs that the filter may search in, by head: [query, key, mass], without the marks of word pieces. */
  get pairs() {
    return this.heads.map(({ pairs }) => pairs.map(([query, key, mass]) => [bare(query), bare(key), mass]));
  }

  /** The head's card; the same promise each time. */
  card(at) {
    this.cards ||= new Map();
    if (!this.cards.has(at)) {
      const card = this.detail(at);
      this.cards.set(at, card);
      card?.catch(() => this.cards.delete(at)); // to be tried again
    }
    return this.cards.get(at);
  }
}

/** A token as the filter searches for it: in lower case, without the mark of a word piece. */
export function bare(token) {
  return token.toLowerCase().replace(/^(##|\u00b7)(?=.)/, "");
}

/** An example with its attention. */
export class Example {
  /**
   * @param facts what the record says of it
   * @param counts how many keys each token keeps
   */
  constructor(facts, places, special, counts, keys, codes) {
    Object.assign(this, facts, { places, special: new Set(special), keys, codes });
    this.starts = new Uint32Array(counts.length + 1);
    counts.forEach((count, at) => (this.starts[at + 1] = this.starts[at] + count));
  }

  get length() {
    return this.labels.length;
  }

  /** Whether tokens of the text are left out before a token. */
  afterGap(at) {
    return at > 0 && this.places[at] !== this.places[at - 1] + 1;
  }

  /** What a token attends to: [token, weight], the largest first. */
  row(query) {
    const found = [];
    for (let at = this.starts[query]; at < this.starts[query + 1]; at++) found.push([this.keys[at], this.codes[at] / 255]);
    return found;
  }

  /** Who attends to a token, the largest first. */
  column(key) {
    const found = [];
    for (let query = 0; query < this.length; query++)
      for (let at = this.starts[query]; at < this.starts[query + 1]; at++)
        if (this.keys[at] === key) found.push([query, this.codes[at] / 255]);
    return found.sort((a, b) => b[1] - a[1]);
  }

  weights() {
    const dense = new Float32Array(this.length ** 2);
    for (let query = 0; query < this.length; query++) for (const [key, weight] of this.row(query)) dense[query * this.length + key] = weight;
    return dense;
  }
}

/** The JSON and the bytes after it of a block. */
async function unpackJson(number) {
  const bytes = await unpackBlock(number);
  const length = new DataView(bytes.buffer).getUint32(0, true);
  return [JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length))), bytes.subarray(4 + length)];
}

/** Loads the block of a head where the page is a folder, and each has a file: a script that becomes the block. */
async function loadBlock(number) {
  const script = document.createElement("script");
  script.id = `d${number}`;
  await new Promise((done, fail) => {
    script.onload = done;
    script.onerror = () => {
      script.remove();
      fail(new Error(`${script.getAttribute("src")} cannot be read`));
    };
    script.src = `${manifest.atlas.folder}/${number}.js`;
    document.head.append(script);
  });
  return script;
}

async function cardOfBlock(number) {
  const file = manifest.atlas.folder ? await loadBlock(number) : null;
  const [card, bytes] = await unpackJson(number);
  file?.remove();
  let at = 0;
  const counts = card.examples.map(({ labels }) => bytes.subarray(at, (at += labels.length)));
  const kept = counts.map((count) => count.reduce((sum, one) => sum + one, 0));
  const keys = kept.map((n) => bytes.subarray(at, (at += n)));
  const codes = kept.map((n) => bytes.subarray(at, (at += n)));
  const examples = card.examples.map((facts, number) => {
    const places = facts.places.flatMap(([first, n]) => Array.from({ length: n }, (_, more) => first + more));
    return new Example(facts, places, facts.special, counts[number], keys[number], codes[number]);
  });
  const sides = card.n_points ? ["queries", "keys", "outputs"] : [];
  const points = sides.length ? Object.fromEntries(sides.map((side) => [side, Int8Array.from(bytes.subarray(at, (at += 3 * card.n_points)), (code) => (code << 24) >> 24)])) : null;
  return { ...card, points, examples };
}

/** What is shown of heads; empty until it is read. */
export const catalogs = { shown: null };

/** Shows a record about heads. */
export function showCatalog(record, detail) {
  catalogs.shown = new Catalog(record, detail);
  return catalogs.shown;
}

/** The head that is shown. */
export function headOf() {
  return catalogs.shown.heads[catalogs.shown.byName.get(state.head) ?? 0];
}

/** The columns that the scatter shows: from left to right, and up. */
export function sidesOf() {
  const { columns, sides } = catalogs.shown;
  return [columns.get(state.ax || sides[0]), columns.get(state.ay || sides[1])];
}

/** What the colour of heads is: a column; null = their role. */
export function colourColumn() {
  const { columns, hasRoles } = catalogs.shown;
  return columns.get(state.ac || (hasRoles ? "role" : "layer")) || null;
}

/** Whether there are fewer texts than deciles: examples of deciles are then all texts, lowest score first. */
export function areFew(examples) {
  const { complete, interrupted = complete === false } = catalogs.shown.corpus;
  return !interrupted && examples.filter(({ why }) => why === "decile").length < 10;
}

/** What an example is called. */
function nameOfExample({ why, rank, few }) {
  return { top: `top ${rank + 1}`, decile: few ? "text" : `decile ${rank + 1}`, failure: `failure ${rank + 1}` }[why];
}

/** Makes an example of a head a text, for the views of maps; `manifest.texts` then has it. */
async function exampleAsText(head, number) {
  const { examples } = await catalogs.shown.card(head.at);
  const example = examples[number];
  const name = `${head.name}/${number}`;
  if (!example || manifest.texts.some((text) => text.example === name)) return;
  const none = example.labels.flatMap(() => [-1, -1]);
  const rests = head.kind === "decoder" && example.places[0] === 0 && !example.special.has(0);
  const hidden = rests && { hidden: [0, ...example.special] };
  const queries = {
    labels: example.labels.map((label, at) => (example.afterGap(at) ? `\u2026 ${label}` : label)), offsets: none, special: [...example.special], ...hidden, segments: null, groups: null, words: null, text: "", pair: null, given: -1,
  };
  const weights = example.weights();
  const largest = Array.from({ length: example.length }, (_, query) => example.row(query)[0]?.[1] || 0);
  const missing = Array.from({ length: example.length }, (_, query) => Math.max(0, 1 - example.row(query).reduce((sum, [, weight]) => sum + weight, 0)));
  const least = Array.from({ length: example.length }, (_, query) => example.row(query).at(-1)?.[1] || 0);
  const focus = largest.reduce((sum, one) => sum + one, 0) / (largest.length || 1);
  manifest.texts.push({
    example: name,
    text: textOfExample(example),
    title: `${head.name}, ${nameOfExample({ ...example, few: areFew(examples) })}: ${example.source}`,
    run: catalogs.shown.run,
    changes: [],
    part: !example.excerpt || example.length < example.n_tokens,
    maps: [{ kind: head.kind, heads: [[head.layer, head.head]], full: [], focus: [focus], queries, keys: null, chunks: [], weights: () => weights }],
    within: 1 / 510 + 0.00005,
    kept: { missing, least },
  });
}

/** An example's text as pieces: [what stands before, what is shown] of each token, in the source's own characters. */
export function piecesOf({ labels, special, places, excerpt, offsets }) {
  const letters = Array.from(excerpt || "");
  let end = 0;
  return labels.map((label, at) => {
    const gap = at > 0 && places[at] !== places[at - 1] + 1 ? " \u2026 " : "";
    const apart = at ? " " : "";
    if (!excerpt) return special.has(at) ? [gap || apart, label] : piecesOfLabel(label, gap || (special.has(at - 1) ? "" : apart), labels);
    const [start, stop] = offsets[at];
    const [before, own] = [letters.slice(end, start).join(""), letters.slice(Math.max(start, end), stop).join("")];
    end = Math.max(end, stop);
    if (special.has(at)) return [before || apart, label];
    return [before, /[^\s\p{C}]/u.test(own) ? own : label + (own.includes("\n") ? own : "")];
  });
}

/** The same of one label, where the source's characters are not known. */
function piecesOfLabel(label, before, labels) {
  if (label.startsWith("##") && label.length > 2) return ["", label.slice(2)];
  if (!labels.some((one) => one.startsWith("\u00b7"))) return [before, label];
  return label.startsWith("\u00b7") && label.length > 1 ? [before, label.slice(1)] : [before === " " ? "" : before, label];
}

/** An example's text, without special tokens. */
export function textOfExample(example) {
  if (example.excerpt) return example.excerpt;
  return piecesOf(example)
    .filter((_, at) => !example.special.has(at))
    .map((parts) => parts.join(""))
    .join("")
    .trim();
}

/** What a command needs to draw an example: the text around a query, in whole words without gaps, and the query's name. */
export function commandOfExample(example, query) {
  const { labels, special } = example;
  const spaced = labels.some((label) => label.startsWith("\u00b7"));
  const within = (at) => at > 0 && !special.has(at) && !special.has(at - 1) && (spaced ? !/^[\u00b7\u23ce]/.test(labels[at]) : /^##./.test(labels[at]));
  const outside = (at) => at < 0 || at >= labels.length || special.has(at);
  const middle = query >= 0 && !special.has(query) ? query : labels.findIndex((_, at) => !special.has(at));
  let [from, to] = [middle, middle + 1];
  while (!outside(from - 1) && !example.afterGap(from)) from--;
  while (!outside(to) && !example.afterGap(to)) to++;
  if (example.afterGap(from)) while (from < middle && within(from)) from++;
  const cut = to < labels.length ? example.afterGap(to) : example.places.at(-1) < example.n_tokens - 1;
  if (cut) while (to - 1 > middle && within(to - 1)) to--; // what may go on: its last word goes, unless it is asked for
  if (cut && to - 1 > middle) to--;
  const { excerpt, offsets } = example;
  const quoted = excerpt ? Array.from(excerpt).slice(offsets[from]?.[0], offsets[to - 1]?.[1]).join("") : "";
  const text = quoted || piecesOf(example).slice(from, to).map((parts, at) => (at ? parts.join("") : parts[1])).join("").trim();
  const label = query < 0 ? "" : (labels[query].replace(/^\u00b7(?=.)/, ""));
  return { text, asked: /[,@\s]/.test(label) ? "" : label };
}

/** Reads the page's atlas. */
async function readAtlas() {
  if (catalogs.shown || !manifest.atlas || manifest.atlas.landing === undefined) return;
  const [record] = await unpackJson(manifest.atlas.landing);
  await breathe();
  showCatalog(record, (at) => cardOfBlock(manifest.atlas.heads[at]));
}

atlasHooks.prepare = async () => {
  await readAtlas();
  const shown = catalogs.shown;
  if (!shown?.detail || state.ex < 0 || ofAtlas() || !Number.isInteger(state.ex)) return;
  await exampleAsText(headOf(), state.ex);
};

atlasHooks.mend = () => {
  const shown = catalogs.shown;
  if (!shown) return;
  const { columns, byName } = shown;
  if (!byName.has(state.head)) state.head = "";
  if (!columns.has(state.ax)) state.ax = "";
  if (!columns.has(state.ay)) state.ay = "";
  if (state.ac !== "role" && !columns.has(state.ac)) state.ac = "";
  if (!/^(-?[\d.]+(e[-+]?\d+)?,){3}-?[\d.]+(e[-+]?\d+)?$/.test(state.br)) state.br = "";
  if (!["name", "role", "words"].includes(state.o.replace("-", "")) && !columns.has(state.o.replace("-", ""))) state.o = "";
  if (!["layers", "measures"].includes(state.g)) state.g = shown.record.grid || "";
  if (!["top", "decile", "failure"].includes(state.tab)) state.tab = "top";
  if (!Number.isInteger(state.ex) || state.ex < -1) state.ex = -1;
  if (ofAtlas()) return;
  const at = manifest.texts.findIndex((text) => text.example === `${headOf().name}/${state.ex}`);
  if (at >= 0) state.t = at;
  else if (!manifest.texts.length || manifest.texts[state.t]?.example !== undefined) {
    const fixed = manifest.texts.findIndex((text) => text.example === undefined);
    if (fixed >= 0) Object.assign(state, { t: fixed, q: -1, k: -1 });
    else state.v = "head";
  }
};

/** What is to be changed so that an example of the head is open as a map. */
export async function openExample(number, view) {
  await exampleAsText(headOf(), number);
  const { focus } = (await catalogs.shown.card(headOf().at)).examples[number];
  const q = state.ex === number && state.q >= 0 ? state.q : focus; // another text's query means nothing here
  return { v: view, ex: number, h: `${headOf().layer}.${headOf().head}`, hs: "", side: "q", q, k: -1, z: "", y: 0, m: 0 };
}

/** The example that is chosen, else the first: in a view of maps. */
atlasHooks.example = (view) => openExample(Math.max(0, state.ex), view);

atlasHooks.head = () => headOf().name;

atlasHooks.about = () => {
  const { run, corpus, heads } = catalogs.shown;
  const counts = [
    `${heads.length} heads`,
    corpus.n_texts ? `${corpus.n_texts.toLocaleString("en")} texts` : "",
    corpus.n_tokens ? `${corpus.n_tokens.toLocaleString("en")} tokens` : "",
    (corpus.sources || []).slice(0, 3).join(", "),
  ];
  const title = [run.model, counts.filter(Boolean).join(", ")].filter(Boolean).join(" \u00b7 ");
  return { run, title, text: String(run.model || "heads"), changes: [] };
};

/** Forgets what is shown, before another record is. */
export function forgetCatalog() {
  catalogs.shown = null;
}
