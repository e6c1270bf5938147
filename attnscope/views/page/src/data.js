// What the page holds: texts, tokens, and attention weights that are unpacked when they are needed.

const MOST_CODES = 96e6; // unpacked weights kept at once: 192 MB
const MOST_VALUES = 24e6; // derived ones, as shown: 96 MB
const LEAST_LEFT = 0.01; // what a row must give to tokens that are not hidden, to be shown without those that are

/** What the page was made with. */
export const manifest = JSON.parse(document.getElementById("manifest").textContent);

/** Lets the browser draw and answer before work goes on. */
export function breathe() {
  if (globalThis.scheduler?.yield) return scheduler.yield();
  return new Promise((done) => setTimeout(done, 0));
}

/** Promises by name; the ones not asked for lately go when they hold too much. */
class Kept {
  constructor(most) {
    this.most = most;
    this.held = new Map();
    this.size = 0;
  }

  get(name, size, make) {
    let entry = this.held.get(name);
    if (entry) this.held.delete(name);
    else {
      entry = { promise: make(), size };
      this.size += size;
      entry.promise.catch(() => this.held.delete(name));
    }
    this.held.set(name, entry);
    for (const [old, { size: freed }] of this.held) {
      if (this.size <= this.most || old === name) break;
      this.held.delete(old);
      this.size -= freed;
    }
    return entry.promise;
  }
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  return bytes;
}

/** The bytes that were deflated. */
export async function inflated(bytes, format = "deflate") {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream(format));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The bytes of one of the page's blocks. */
export async function unpackBlock(number) {
  const packed = bytesOf(document.getElementById(`d${number}`).textContent);
  await breathe();
  return inflated(packed);
}

function* numbers(bytes, at, count) {
  for (let i = 0; i < count; i++) yield bytes[at + i] | (bytes[at + count + i] << 8);
}

/** Which tokens go where special tokens are hidden: these, and of a decoder the first one too. */
export function hiddenOf(tokens) {
  return tokens.hidden ?? tokens.special;
}

/** The tokens along one side of a map, as they are shown: all of them from `before` on, without hidden ones, or word by word. */
class Axis {
  constructor(tokens, hide, words, before = 0) {
    this.tokens = tokens;
    const special = new Set(tokens.special);
    const hidden = new Set(hiddenOf(tokens));
    const groups = [];
    const sizes = words && tokens.groups ? tokens.groups : tokens.labels.map(() => 1);
    let at = 0;
    sizes.forEach((size, number) => {
      const cut = hide && hidden.has(at) ? 1 : 0; // of a word of several pieces, the others stay
      if (at >= before && cut < size) {
        groups.push({
          first: at + cut,
          size: size - cut,
          label: size > 1 ? tokens.words[number] : tokens.labels[at],
          special: special.has(at),
          merged: words && tokens.groups,
        });
        if (words && tokens.groups && !special.has(at)) groups.at(-1).label = tokens.words[number];
        if (cut) groups.at(-1).label = tokens.labels.slice(at + 1, at + size).join("").replaceAll("##", "");
      }
      at += size;
    });
    this.groups = groups;
    this.labels = groups.map((group) => group.label);
    this.special = groups.map((group) => group.special);
    this.written = groups.map((group) => tokens.given >= 0 && group.first >= tokens.given);
    /** Where each token is shown: the number of its group; -1 = hidden. */
    this.place = new Int32Array(tokens.labels.length).fill(-1);
    groups.forEach((group, number) => this.place.fill(number, group.first, group.first + group.size));
    this.plain = groups.length === tokens.labels.length;
    this.hiddenToken = tokens.labels.map((_, token) => hidden.has(token));
  }

  get length() {
    return this.groups.length;
  }
}

/** A map of a text by its number; "looking" is that of words over patches, whose photos its other maps have as one token. */
export function heldOf(text, map) {
  const { maps, looking } = manifest.texts[text];
  return map === "looking" ? looking : maps[map];
}

const axes = new Map();

/** The axis of the queries ("queries") or keys ("keys") of a map. */
export function axisOf(text, map, side, hide, words) {
  const name = [text, map, side, !!hide, !!words].join();
  if (!axes.has(name)) {
    const held = heldOf(text, map);
    axes.set(name, new Axis((side === "keys" && held.keys) || held.queries, hide, words, side === "queries" ? held.before : 0));
  }
  return axes.get(name);
}

export function hasSpecial(text, map) {
  return ["queries", "keys"].some((side) => axisOf(text, map, side).tokens.special.length > 0);
}

/** Whether hiding special tokens, or merging words, can change a map at all. */
export function canHide(text, map) {
  const sides = ["queries", "keys"].map((side) => axisOf(text, map, side));
  // Words are merged after special tokens are hidden, never before.
  return (
    sides.some((axis) => hiddenOf(axis.tokens).length) &&
    sides.every((axis) => hiddenOf(axis.tokens).length < axis.tokens.labels.length) &&
    !manifest.texts[text].changes.includes("words")
  );
}

export function canMerge(text, map) {
  return (
    ["queries", "keys"].every((side) => axisOf(text, map, side).tokens.groups !== null) &&
    !manifest.texts[text].changes.includes("words")
  );
}

const rawHeads = new Kept(MOST_CODES);
const derived = new Kept(MOST_VALUES);

/** Forgets what was unpacked, before the page shows another record. */
export function forget() {
  axes.clear();
  for (const kept of [rawHeads, derived]) {
    kept.held.clear();
    kept.size = 0;
  }
}

function chunkOf(text, map, index) {
  const held = heldOf(text, map);
  return held.chunks.find(([, heads]) => heads.includes(index));
}

/** Unpacks the heads of a chunk: codes by (query, key), and what a row's codes are multiplied with. */
async function unpack(text, map, [block, heads]) {
  const held = heldOf(text, map);
  const n_queries = held.queries.labels.length;
  const tokens = held.keys || held.queries;
  const n_keys = tokens.labels.length;
  const bytes = await unpackBlock(block);
  await breathe();
  const each = n_queries * n_keys;
  const high = heads.length * each;
  const order = [...numbers(bytes, 2 * high, heads.length * n_keys)];
  const scales = hiddenOf(tokens).length
    ? Uint16Array.from(numbers(bytes, 2 * high + 2 * order.length, heads.length * n_queries))
    : null;
  return heads.map((_, number) => {
    const codes = new Uint16Array(each);
    for (let column = 0; column < n_keys; column++) {
      const key = order[number * n_keys + column];
      let from = number * each + column * n_queries;
      for (let to = key; to < each; to += n_keys, from++) codes[to] = bytes[from] | (bytes[high + from] << 8);
    }
    return { codes, scales: scales && scales.subarray(number * n_queries, (number + 1) * n_queries) };
  });
}

/** Weights by (query, key) as `unpack` gives them, but not rounded. */
function coded(held, weights) {
  const tokens = held.keys || held.queries;
  const worth = steps(held);
  const hidden = new Set(hiddenOf(tokens));
  const n_keys = worth.length;
  const scales = hidden.size ? new Float32Array(weights.length / n_keys) : null;
  const codes = new Float32Array(weights.length);
  for (let query = 0; query * n_keys < weights.length; query++) {
    let left = 0;
    for (let key = 0; key < n_keys; key++) left += hidden.has(key) ? 0 : weights[query * n_keys + key];
    const enough = left >= LEAST_LEFT;
    if (scales && enough) scales[query] = left / manifest.leftUnit;
    for (let key = 0; key < n_keys; key++) {
      const share = !scales || hidden.has(key) ? 1 : enough ? left : LEAST_LEFT;
      codes[query * n_keys + key] = weights[query * n_keys + key] / worth[key] / share;
    }
  }
  return { codes, scales };
}

async function raw(text, map, index) {
  const held = heldOf(text, map);
  if (held.weights) return coded(held, held.weights(index));
  const chunk = chunkOf(text, map, index);
  const size = chunk[1].length * held.queries.labels.length * (held.keys || held.queries).labels.length;
  const all = await rawHeads.get(`${text},${map},${chunk[0]}`, size, () => unpack(text, map, chunk));
  return all[chunk[1].indexOf(index)];
}

/** What one code of each key is worth, in a row that is not scaled. */
function steps(held) {
  const tokens = held.keys || held.queries;
  const { step, mostPieces } = held.step ? held : manifest;
  const worth = new Float64Array(tokens.labels.length).fill(step);
  let at = 0;
  for (const size of tokens.groups || []) {
    if (size > 1) worth.fill(step / Math.min(size, mostPieces), at, at + size);
    at += size;
  }
  return worth;
}

function derive(held, { codes, scales }, rows, columns, hide) {
  const n = columns.length;
  const values = new Float32Array(rows.length * n);
  const worth = steps(held);
  const n_keys = worth.length;
  const hidden = hide && scales !== null;
  // Of a word whose pieces lost nearly all of their row with the special tokens, the others are averaged.
  const pieces = rows.groups.map((group) => (hidden ? 0 : group.size));
  if (hidden) rows.place.forEach((row, query) => (pieces[row] += row >= 0 && scales[query] !== 0));
  for (let query = 0; query < rows.place.length; query++) {
    const row = rows.place[query];
    if (row < 0) continue;
    const scale = scales ? scales[query] * manifest.leftUnit || LEAST_LEFT : 1;
    if (hidden && scales[query] === 0) continue; // too little is left: empty
    const factor = (hidden ? 1 : scale) / pieces[row];
    const whole = 1 / rows.groups[row].size; // keys that can be hidden are stored as they are
    const base = query * n_keys;
    for (let key = 0; key < n_keys; key++) {
      const code = codes[base + key];
      if (code === 0) continue;
      const column = columns.place[key];
      if (column >= 0) values[row * n + column] += code * worth[key] * (columns.hiddenToken[key] ? whole : factor);
    }
  }
  return values;
}

/** The number of a head in a map's list of packed ones; -1 if it is not there. */
function indexOf(held, spec) {
  if (spec.startsWith("full")) {
    const at = held.full.indexOf(Number(spec.slice(4)));
    return at < 0 ? -1 : held.heads.length + at;
  }
  return held.heads.findIndex(([layer, head]) => `${layer}.${head}` === spec);
}

/** The heads that a spec such as "3.1", "mean", "mean3" or "full3" is made of; empty if it is not there. */
function partsOf(text, map, spec) {
  const held = heldOf(text, map);
  if (spec.startsWith("mean")) {
    const layer = spec.slice(4);
    return held.heads.flatMap(([of], index) => (layer === "" || of === Number(layer) ? [index] : []));
  }
  const index = indexOf(held, spec);
  return index < 0 ? [] : [index];
}

export function has(text, map, spec) {
  return partsOf(text, map, spec).length > 0;
}

/** How people write a spec. */
export function nameOf(spec) {
  if (spec === "mean") return "mean of all heads";
  if (spec.startsWith("mean")) return `mean of layer ${spec.slice(4)}`;
  if (spec.startsWith("full")) return `full-width head of layer ${spec.slice(4)}`;
  const [layer, head] = spec.split(".");
  return `L${layer}H${head}`;
}

/**
 * The weights of a head or a mean of heads as shown.
 *
 * @returns {Promise<{rows: Axis, columns: Axis, values: Float32Array, largest: number}>} values by (row, column)
 */
export function matrix(text, map, spec, hide, words) {
  hide = hide && canHide(text, map);
  words = words && canMerge(text, map);
  const rows = axisOf(text, map, "queries", hide, words);
  const columns = axisOf(text, map, "keys", hide, words);
  const name = [text, map, spec, hide, words].join();
  return derived.get(name, rows.length * columns.length, async () => {
    const parts = partsOf(text, map, spec);
    if (!parts.length) throw new Error(`no ${spec} in this page`);
    let values = null;
    for (const index of parts) {
      const packed = await raw(text, map, index);
      await breathe();
      const one = derive(heldOf(text, map), packed, rows, columns, hide);
      if (values === null) values = one;
      else for (let at = 0; at < one.length; at++) values[at] += one[at];
    }
    let largest = 0;
    for (let at = 0; at < values.length; at++) {
      values[at] /= parts.length;
      if (values[at] > largest) largest = values[at];
    }
    return { rows, columns, values, largest };
  });
}

/** The rank of a weight in its row, from 1; equal weights share the better rank. */
export function rankOf(shown, row, column) {
  const n = shown.columns.length;
  const value = shown.values[row * n + column];
  let rank = 1;
  for (let at = row * n; at < (row + 1) * n; at++) if (shown.values[at] > value) rank++;
  return rank;
}

/** A weight as the page shows it. */
export function digits(value, signed = false) {
  const text = Math.abs(value).toFixed(4);
  const zero = !/[1-9]/.test(text);
  return (zero ? "" : value < 0 ? "\u2212" : signed ? "+" : "") + text;
}

/** The roles of a head, strongest first. */
export function rolesOf(kind, spec) {
  return manifest.roles?.heads[kind]?.[spec] || [];
}

/** A text's tokens as a reader sees them: pieces of the text itself with what stands between them. */
export function prose(axis) {
  const { offsets, text, pair, segments } = axis.tokens;
  const letters = [Array.from(text), Array.from(pair || "")];
  const ends = [0, 0];
  let chips = []; // since the last word: where the text spells them they are not said again
  const without = (before) => {
    let from = 0;
    for (const chip of chips) {
      const at = before.indexOf(chip, from);
      if (at >= 0) [before, from] = [before.slice(0, at) + before.slice(at + chip.length), at];
    }
    chips = [];
    return before;
  };
  return axis.groups.map((group) => {
    const segment = segments ? segments[group.first] : 0;
    const start = offsets[2 * group.first];
    const last = group.first + group.size - 1;
    const stop = Math.max(offsets[2 * last + 1], offsets[2 * group.first + 1]);
    if (start < 0 || stop <= start) {
      chips.push(group.label);
      return { before: "", shown: group.label, chip: true };
    }
    const before = without(start > ends[segment] ? letters[segment].slice(ends[segment], start).join("") : "");
    const own = letters[segment].slice(Math.max(start, ends[segment]), stop).join("");
    ends[segment] = Math.max(ends[segment], stop);
    return own ? { before, shown: own, chip: false } : { before, shown: group.label, chip: true };
  });
}
