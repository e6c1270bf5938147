// What the page holds: texts, tokens, and attention weights that are unpacked when they are needed.

const MOST_CODES = 96e6; // unpacked weights kept at once: 192 MB
const MOST_VALUES = 24e6; // derived ones, as shown: 96 MB
const THUMBNAIL_SIDE = 96; // as packing.py has it
const LEAST_LEFT = 0.01; // what a row must give to tokens that are not hidden, to be shown without those that are

/** What the page was made with. */
export const manifest = JSON.parse(document.getElementById("manifest").textContent);

const BREATH_MS = 8; // work goes on for so long before the browser may draw
let lastBreath = -BREATH_MS;

/** Lets the browser draw and answer before work goes on, where it has not just done so. */
export async function breathe() {
  if (performance.now() - lastBreath < BREATH_MS) return;
  await (globalThis.scheduler?.yield ? scheduler.yield() : new Promise((done) => setTimeout(done, 0)));
  lastBreath = performance.now();
}

/** Promises by name; the ones not asked for lately go when they hold too much. */
class Cache {
  constructor(most) {
    this.most = most;
    this.clear();
  }

  clear() {
    this.entries = new Map();
    this.size = 0;
  }

  get(name, size, make) {
    const { entries } = this;
    let entry = entries.get(name);
    if (entry) entries.delete(name);
    else {
      entry = { promise: make(), size };
      this.size += size;
      entry.promise.catch(() => entries.delete(name));
    }
    entries.set(name, entry);
    for (const [old, { size: freed }] of entries) {
      if (this.size <= this.most || old === name) break;
      entries.delete(old);
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

export async function inflate(bytes, format = "deflate") {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream(format));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The bytes of one of the page's blocks. */
export async function unpackBlock(number) {
  const packed = bytesOf(document.getElementById(`d${number}`).textContent);
  await breathe();
  return inflate(packed);
}

function* numbers(bytes, at, count) {
  for (let i = 0; i < count; i++) yield bytes[at + i] | (bytes[at + count + i] << 8);
}

/** Which tokens go where special tokens are hidden: these, and of a decoder the first one too. */
function hiddenOf(tokens) {
  return tokens.hidden ?? tokens.special;
}

/** The tokens along one side of a map, as they are shown: all of them from `before` on, without hidden ones, or word by word. */
class Axis {
  constructor(tokens, hide, words, before = 0) {
    this.tokens = tokens;
    const special = new Set(tokens.special);
    const hidden = new Set(hiddenOf(tokens));
    const byWord = words && tokens.groups;
    const groups = [];
    let at = 0;
    (byWord ? tokens.groups : tokens.labels.map(() => 1)).forEach((size, number) => {
      const cut = hide && hidden.has(at) ? 1 : 0; // of a word of several pieces, the others stay
      if (at >= before && cut < size) {
        const isWord = size > 1 || (byWord && !special.has(at));
        const rest = tokens.labels.slice(at + 1, at + size).join("").replaceAll("##", "");
        const label = cut ? rest : isWord ? tokens.words[number] : tokens.labels[at];
        groups.push({ first: at + cut, size: size - cut, label, special: special.has(at) });
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
export function packedMap(text, map) {
  const { maps, looking } = manifest.texts[text];
  return map === "looking" ? looking : maps[map];
}

const axes = new Map();

/** The axis of the queries ("queries") or keys ("keys") of a map. */
export function axisOf(text, map, side, hide, words) {
  const name = [text, map, side, !!hide, !!words].join();
  if (!axes.has(name)) {
    const { queries, keys, before } = packedMap(text, map);
    axes.set(name, side === "queries" ? new Axis(queries, hide, words, before) : new Axis(keys || queries, hide, words));
  }
  return axes.get(name);
}

function bothSides(text, map) {
  const { queries, keys } = packedMap(text, map);
  return [queries, keys || queries];
}

export const hasSpecial = (text, map) => bothSides(text, map).some(({ special }) => special.length);

const isMerged = (text) => manifest.texts[text].changes.includes("words");

/** Whether hiding special tokens, or merging words, can change a map at all. */
export function canHide(text, map) {
  const sides = bothSides(text, map);
  const isSome = sides.some((tokens) => hiddenOf(tokens).length);
  const isNotAll = sides.every((tokens) => hiddenOf(tokens).length < tokens.labels.length);
  return isSome && isNotAll && !isMerged(text); // words are merged after special tokens are hidden, never before
}

export function canMerge(text, map) {
  return bothSides(text, map).every(({ groups }) => groups !== null) && !isMerged(text);
}

const unpackedHeads = new Cache(MOST_CODES);
const shownMaps = new Cache(MOST_VALUES);

/** Unpacks the heads of a chunk: codes by (query, key), and what a row's codes are multiplied with. */
async function unpack(text, map, [block, heads]) {
  const [queries, keys] = bothSides(text, map);
  const [n_queries, n_keys] = [queries.labels.length, keys.labels.length];
  const bytes = await unpackBlock(block);
  await breathe();
  const each = n_queries * n_keys;
  const high = heads.length * each;
  const order = [...numbers(bytes, 2 * high, heads.length * n_keys)];
  const scales = hiddenOf(keys).length
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
function encode(packed, weights) {
  const worth = stepsOf(packed);
  const hidden = new Set(hiddenOf(packed.keys || packed.queries));
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

async function unpackHead(text, map, index) {
  const packed = packedMap(text, map);
  if (packed.weights) return encode(packed, packed.weights(index));
  const chunk = packed.chunks.find(([, heads]) => heads.includes(index));
  const [block, heads] = chunk;
  const [n_queries, n_keys] = bothSides(text, map).map(({ labels }) => labels.length);
  const size = heads.length * n_queries * n_keys;
  const all = await unpackedHeads.get(`${text},${map},${block}`, size, () => unpack(text, map, chunk));
  return all[heads.indexOf(index)];
}

/** What one code of each key is worth, in a row that is not scaled. */
function stepsOf(packed) {
  const tokens = packed.keys || packed.queries;
  const { step, mostPieces } = packed.step ? packed : manifest;
  const worth = new Float64Array(tokens.labels.length).fill(step);
  let at = 0;
  for (const size of tokens.groups || []) {
    if (size > 1) worth.fill(step / Math.min(size, mostPieces), at, at + size);
    at += size;
  }
  return worth;
}

/** The weights of a head as they are shown, from its codes. */
function decode(packed, { codes, scales }, rows, columns, hide) {
  const n = columns.length;
  const values = new Float32Array(rows.length * n);
  const worth = stepsOf(packed);
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

/** The heads that a spec such as "3.1", "mean", "mean3" or "full3" is made of, as numbers of packed ones; empty if it is not there. */
function partsOf(text, map, spec) {
  const { heads, full } = packedMap(text, map);
  const [, kind, layer] = /^(mean|full)(\d*)$/.exec(spec) || [];
  const trueAt = (isPart, list) => list.flatMap((head, index) => (isPart(head) ? [index] : []));
  if (kind === "mean") return trueAt(([of]) => layer === "" || of === Number(layer), heads);
  if (kind === "full") return trueAt((of) => of === Number(layer), full).map((at) => heads.length + at);
  return trueAt((pair) => pair.join(".") === spec, heads);
}

export function has(text, map, spec) {
  return partsOf(text, map, spec).length > 0;
}

export function nameOf(spec) {
  if (spec === "mean") return "mean of all heads";
  if (spec.startsWith("mean")) return `mean of layer ${spec.slice(4)}`;
  if (spec.startsWith("full")) return `full-width head of layer ${spec.slice(4)}`;
  if (manifest.means?.[spec]) return manifest.means[spec];
  const [layer, head] = spec.split(".");
  return `L${layer}H${head}`;
}

/** A promise of the weights of a head or a mean of heads as shown, by (row, column), with the axes and the largest one. */
export function matrix(text, map, spec, hide, words) {
  hide = hide && canHide(text, map);
  words = words && canMerge(text, map);
  const rows = axisOf(text, map, "queries", hide, words);
  const columns = axisOf(text, map, "keys", hide, words);
  const name = [text, map, spec, hide, words].join();
  return shownMaps.get(name, rows.length * columns.length, async () => {
    const parts = partsOf(text, map, spec);
    if (!parts.length) throw new Error(`no ${spec} in this page`);
    let values = null;
    for (const index of parts) {
      const codes = await unpackHead(text, map, index);
      await breathe();
      const ofHead = decode(packedMap(text, map), codes, rows, columns, hide);
      if (values === null) values = ofHead;
      else for (let at = 0; at < ofHead.length; at++) values[at] += ofHead[at];
    }
    let largest = 0;
    for (let at = 0; at < values.length; at++) {
      values[at] /= parts.length;
      if (values[at] > largest) largest = values[at];
    }
    return { rows, columns, values, largest };
  });
}

/** The small pictures of all heads of a map: bytes by head, row and column. */
const thumbnails = new Map();

/** Whether tokens of a map stand as the model had them: none hidden, none merged. */
export const isWhole = (text, map, hide, words) => !(hide && canHide(text, map)) && !(words && canMerge(text, map));

/** A promise of a head's map for a small picture of it: pooled where the page holds that, else as `matrix`. */
export async function smallMatrix(text, map, spec, hide, words) {
  const packed = packedMap(text, map);
  const index = packed.heads.findIndex((pair) => pair.join(".") === spec);
  if (!Number.isInteger(packed.thumbnails) || index < 0 || !isWhole(text, map, hide, words)) return matrix(text, map, spec, hide, words);
  if (!thumbnails.has(packed)) thumbnails.set(packed, unpackBlock(packed.thumbnails));
  const bytes = await thumbnails.get(packed);
  const sides = ["queries", "keys"].map((side) => axisOf(text, map, side, false, false).length);
  const [rows, columns] = sides.map((length) => ({ length: Math.min(length, THUMBNAIL_SIDE) }));
  const each = rows.length * columns.length;
  const largest = packed.largest[index];
  const values = Float32Array.from(bytes.subarray(index * each, (index + 1) * each), (share) => (share / 255) * largest);
  return { rows, columns, values, largest };
}

/** The rank of a weight in its row, from 1; equal weights share the better rank. */
export function rankOf(shown, row, column) {
  const n = shown.columns.length;
  const value = shown.values[row * n + column];
  let rank = 1;
  for (let at = row * n; at < (row + 1) * n; at++) if (shown.values[at] > value) rank++;
  return rank;
}

export const countText = (count) => count.toLocaleString("en");

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
