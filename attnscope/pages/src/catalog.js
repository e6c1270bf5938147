// An atlas, or any record about heads: what is known of each head, as columns of numbers and words to search in.
import { breathe, countText, manifest, unpackBlock } from "./data.js";
import { atlasHooks, ofAtlas, state } from "./state.js";

/** A column of the table of heads: its name in expressions, how it is called, and its values by head. */
class Column {
  constructor({ values, low, high, baseline, ...facts }) {
    Object.assign(this, facts);
    const numbers = (some) => Float64Array.from(some || values.map(() => NaN), (value) => value ?? NaN);
    [this.values, this.lows, this.highs, this.baselines] = [values, low, high, baseline].map(numbers);
  }

  /** Its label, with the unit where the label does not say it. */
  get title() {
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

export class Catalog {
  /**
   * @param record what Python says of the heads: `run`, `corpus`, `heads`, `columns`, and of an atlas `meanings`, `deciles`,
   *     and `tokens` and `pairs` by head
   * @param detail (number of a head) => promise of its card; null where the record has none
   */
  constructor(record, detail) {
    this.record = record;
    this.detail = detail;
    this.cards = new Map();
    this.run = record.run;
    this.corpus = record.corpus;
    this.baseline = "uniform";
    const kinds = new Set(record.heads.map(({ kind }) => kind));
    this.heads = record.heads.map((head, at) => ({
      ...head,
      at,
      name: `${kinds.size > 1 ? `${head.kind} ` : ""}L${head.layer}H${head.head}`,
      words: head.words || "",
      tokens: record.tokens?.[at] || [],
      pairs: record.pairs?.[at] || [],
    }));
    this.hasRoles = this.heads.some(({ roles }) => roles.length);
    this.byName = new Map(this.heads.map((head) => [head.name, head.at]));
    const places = ["layer", "head"].map((name) => ({ name, label: name, meaning: "", values: record.heads.map((head) => head[name]) }));
    this.table = [...places, ...record.columns].map((column) => new Column(column));
    this.columns = new Map(this.table.filter(({ hidden }) => !hidden).map((column) => [column.name, column]));
    const other = this.columns.has("relative_entropy") ? "relative_entropy" : [...this.columns.keys()][2] || "head";
    this.sides = this.columns.has("kl_explained") ? ["nats", "kl_explained"] : ["layer", other];
  }

  /** The head with most to show: what its line explains of it, else the first. */
  get first() {
    const [nats, explained] = ["nats", "kl_explained"].map((name) => this.columns.get(name)?.values);
    if (!nats || !explained) return 0;
    const shows = (at) => nats[at] * explained[at] || 0;
    return this.heads.reduce((best, { at }) => (shows(at) > shows(best) ? at : best), 0);
  }

  namesOf(kind) {
    return [...this.columns.values()].filter((column) => column.kind === kind).map(({ name }) => name);
  }

  /** What the filter asks; see `filterOf`. Pairs are without the marks of word pieces. */
  get facts() {
    const lower = (texts) => texts.map((text) => text.toLowerCase());
    const roleText = ({ name }) => `${name} ${name.replaceAll("_", " ")}`;
    this.filterFacts ||= {
      fields: new Map(this.table.map(({ name, values }) => [name, values])),
      flags: new Set(this.table.filter(({ kind }) => kind === "role").map(({ name }) => name)),
      texts: {
        name: lower(this.heads.map(({ name }) => name)),
        kind: this.heads.map(({ kind }) => kind),
        role: this.heads.map(({ roles }) => roles.map(roleText).join("\n") || "unclassified"),
        description: lower(this.heads.map(({ words }) => words)),
        token: lower(this.heads.map(({ tokens }) => tokens.join("\n"))),
      },
      pairs: this.heads.map(({ pairs }) => pairs.map(([query, key, ...lift]) => [bare(query), bare(key), ...lift])),
    };
    return this.filterFacts;
  }

  /** The head's card; the same promise each time. */
  card(at) {
    if (!this.cards.has(at)) {
      this.cards.set(at, this.detail(at));
      this.cards.get(at)?.catch(() => this.cards.delete(at)); // to be tried again
    }
    return this.cards.get(at);
  }
}

/** A token as the filter searches for it: in lower case, without the mark of a word piece. */
export function bare(token) {
  return token.toLowerCase().replace(/^(##|\u00b7)(?=.)/, "");
}

export class Example {
  /** @param counts how many keys each token keeps */
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
    const [start, stop] = [this.starts[query], this.starts[query + 1]];
    return Array.from(this.keys.subarray(start, stop), (key, at) => [key, this.codes[start + at] / 255]);
  }

  /** Who attends to a token, the largest first. */
  column(key) {
    const queries = [];
    for (let query = 0; query < this.length; query++)
      for (let at = this.starts[query]; at < this.starts[query + 1]; at++)
        if (this.keys[at] === key) queries.push([query, this.codes[at] / 255]);
    return queries.sort((a, b) => b[1] - a[1]);
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

async function cardOfBlock(number) {
  const [card, bytes] = await unpackJson(number);
  let at = 0;
  const take = (n) => bytes.subarray(at, (at += n));
  const counts = card.examples.map(({ labels }) => take(labels.length));
  const sizes = counts.map((count) => count.reduce((sum, n) => sum + n, 0));
  const [keys, codes] = [sizes.map(take), sizes.map(take)];
  const examples = card.examples.map((facts, number) => {
    const places = facts.places.flatMap(([first, n]) => Array.from({ length: n }, (_, more) => first + more));
    return new Example(facts, places, facts.special, counts[number], keys[number], codes[number]);
  });
  return { ...card, examples };
}

/** What is shown of heads; empty until it is read. */
export const catalogs = { current: null };

/** What is to be changed so that a head is looked at, and none of its examples. */
export const atHead = (head) => ({ head, ex: -1, q: -1 });

export function headOf() {
  const { heads, byName, first } = catalogs.current;
  return heads[byName.get(state.head) ?? first];
}

/** The columns that the scatter shows: from left to right, and up. */
export function sidesOf() {
  const { columns, sides } = catalogs.current;
  return [columns.get(state.ax || sides[0]), columns.get(state.ay || sides[1])];
}

/** What the colour of heads is: a column; null = their role. */
export function colourColumn() {
  const { columns, hasRoles } = catalogs.current;
  return columns.get(state.ac || (hasRoles ? "role" : "layer")) || null;
}

/** Whether there are fewer texts than deciles: examples of deciles are then all texts, lowest score first. */
export function areFew(examples) {
  const { complete, interrupted = complete === false } = catalogs.current.corpus;
  return !interrupted && examples.filter(({ why }) => why === "decile").length < 10;
}

function nameOfExample({ why, rank, few }) {
  return { top: `top ${rank + 1}`, decile: few ? "text" : `decile ${rank + 1}` }[why];
}

/** Makes an example of a head a text, for the views of maps; `manifest.texts` then has it. */
async function exampleAsText(head, number) {
  const { examples } = await catalogs.current.card(head.at);
  const example = examples[number];
  const name = `${head.name}/${number}`;
  if (!example || manifest.texts.some((text) => text.example === name)) return;
  const special = [...example.special];
  const isResting = head.kind === "decoder" && example.places[0] === 0 && !example.special.has(0);
  const labels = example.labels.map((label, at) => (example.afterGap(at) ? `\u2026 ${label}` : label));
  const [offsets, none] = [labels.flatMap(() => [-1, -1]), { segments: null, groups: null, words: null, pair: null }];
  const queries = { labels, offsets, special, ...(isResting && { hidden: [0, ...special] }), ...none, text: "", given: -1 };
  const weights = example.weights();
  const rows = labels.map((_, query) => example.row(query).map(([, weight]) => weight));
  const sumOf = (numbers) => numbers.reduce((sum, number) => sum + number, 0);
  const focus = [sumOf(rows.map((row) => row[0] || 0)) / (rows.length || 1)];
  const heads = [[head.layer, head.head]];
  manifest.texts.push({
    example: name,
    text: textOfExample(example),
    title: `${head.name}, ${nameOfExample({ ...example, few: areFew(examples) })}: ${example.source}`,
    run: catalogs.current.run,
    changes: [],
    part: !example.excerpt || example.length < example.n_tokens,
    maps: [{ kind: head.kind, heads, full: [], focus, queries, keys: null, chunks: [], weights: () => weights }],
    within: 1 / 510 + 0.00005,
    kept: { missing: rows.map((row) => Math.max(0, 1 - sumOf(row))), least: rows.map((row) => row.at(-1) || 0) },
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
  if (!labels.some((other) => other.startsWith("\u00b7"))) return [before, label];
  return label.startsWith("\u00b7") && label.length > 1 ? [before, label.slice(1)] : [before === " " ? "" : before, label];
}

function textOfExample(example) {
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
  const isPiece = (label) => (spaced ? !/^[\u00b7\u23ce]/.test(label) : /^##./.test(label));
  const within = (at) => at > 0 && !special.has(at) && !special.has(at - 1) && isPiece(labels[at]);
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
  const pieces = piecesOf(example).slice(from, to);
  const text = quoted || pieces.map((parts, at) => (at ? parts.join("") : parts[1])).join("").trim();
  const label = query < 0 ? "" : labels[query].replace(/^\u00b7(?=.)/, "");
  return { text, label: /[,@\s]/.test(label) ? "" : label };
}

async function readHeads() {
  if (catalogs.current || !manifest.heads) return;
  const { landing, cards } = manifest.heads;
  const [record] = await unpackJson(landing);
  await breathe();
  catalogs.current = new Catalog(record, cards.length ? (at) => cardOfBlock(cards[at]) : null);
}

atlasHooks.prepare = async () => {
  await readHeads();
  if (!catalogs.current?.detail || state.ex < 0 || ofAtlas() || !Number.isInteger(state.ex)) return;
  await exampleAsText(headOf(), state.ex);
};

atlasHooks.mend = () => {
  if (!catalogs.current) return;
  const { columns, byName } = catalogs.current;
  if (!byName.has(state.head)) state.head = "";
  for (const name of ["ax", "ay"]) if (!columns.has(state[name])) state[name] = "";
  if (state.ac !== "role" && !columns.has(state.ac)) state.ac = "";
  if (!/^(-?[\d.]+(e[-+]?\d+)?,){3}-?[\d.]+(e[-+]?\d+)?$/.test(state.br)) state.br = "";
  const sort = state.o.replace("-", "");
  if (!["name", "role", "words"].includes(sort) && !columns.has(sort)) state.o = "";
  if (!["top", "decile"].includes(state.tab)) state.tab = "top";
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
  const { focus } = (await catalogs.current.card(headOf().at)).examples[number];
  const q = state.ex === number && state.q >= 0 ? state.q : focus; // another text's query means nothing here
  return { v: view, ex: number, h: `${headOf().layer}.${headOf().head}`, hs: "", side: "q", q, k: -1, z: "", y: 0, m: 0 };
}

/** The example that is chosen, else the first: in a view of maps. */
atlasHooks.example = (view) => openExample(Math.max(0, state.ex), view);

atlasHooks.about = () => {
  const { run, corpus, heads } = catalogs.current;
  const counts = [
    `${heads.length} heads`,
    corpus.n_texts ? `${countText(corpus.n_texts)} texts` : "",
    corpus.n_tokens ? `${countText(corpus.n_tokens)} tokens` : "",
    (corpus.sources || []).slice(0, 3).join(", "),
  ];
  const title = [run.model, counts.filter(Boolean).join(", ")].filter(Boolean).join(" \u00b7 ");
  return { run, title, text: String(run.model || "heads"), changes: [] };
};
