// Attention in a saved record, as the texts that this app shows.
import { Unreadable } from "./archive.js";

export function need(value, what) {
  if (value === null || value === undefined) throw new Unreadable(`${what} is missing in it`);
  return value;
}

const sizesOf = (shape) => shape.join(" \u00d7 ");
const numbersUpTo = (n) => Array.from({ length: n }, (_, at) => at);
const trueAt = (flags) => (flags || []).flatMap((flag, at) => (flag ? [at] : []));

/** The parts of a head's name: [all, kind, layer, head]; none where it is no such name. */
export const partsOfName = (name) => /^(?:(\w+) )?L(\d+)H(\d+)$/.exec(name) || [];

/** How many tokens each word has, and the words. */
function wordsOf({ words: numbers, labels, text }, offsets, segments) {
  const groups = [];
  numbers.forEach((word, at) => {
    const isSame = at > 0 && word >= 0 && word === numbers[at - 1] && (!segments || segments[at] === segments[at - 1]);
    if (isSame) groups[groups.length - 1]++;
    else groups.push(1);
  });
  const letters = Array.from(text || "");
  let at = 0;
  const words = groups.map((size) => {
    const [first, last] = [at, (at += size) - 1];
    const [from, to] = [offsets[2 * first], offsets[2 * last + 1]];
    const isSpelled = size > 1 && from >= 0 && to > from && !segments?.[first];
    return isSpelled ? letters.slice(from, to).join("") : labels.slice(first, at).join("").replaceAll("##", "");
  });
  return { groups, words };
}

/** @param resting whether the first token is hidden with the special ones, as a decoder's is; see `Tokens.sinks` */
function tokensOfRecord(tokens, resting = false) {
  const offsets = (tokens.offsets || tokens.labels.map(() => [-1, -1])).flat();
  const segments = tokens.segments?.some(Boolean) ? tokens.segments : null;
  const special = trueAt(tokens.special);
  return {
    labels: tokens.labels,
    offsets,
    special,
    ...(resting && special[0] !== 0 && { hidden: [0, ...special] }),
    segments,
    ...(tokens.words ? wordsOf(tokens, offsets, segments) : { groups: null, words: null }),
    text: tokens.text || "",
    pair: tokens.pair || null,
    given: tokens.n_given ?? -1,
  };
}

/** A map of pairs of layer and head; `indexOf(pair)` says which of the arrays, one after the other, is its own. */
function mapOfArray(kind, pairs, indexOf, queries, keys, { shape, data }) {
  const [nQueries, nKeys] = shape.slice(-2);
  const misfit = (what) => new Unreadable(`its weights are of shape ${sizesOf(shape)}, which does not fit its ${what}`);
  if (nQueries !== queries.labels.length || nKeys !== (keys || queries).labels.length || !pairs.length)
    throw misfit("tokens and heads");
  const each = nQueries * nKeys;
  const weights = (number) => {
    const at = indexOf(pairs[number]);
    if ((at + 1) * each > data.length) throw misfit("heads");
    return Float32Array.from(data.subarray(at * each, (at + 1) * each));
  };
  const focus = pairs.map((_, number) => {
    const mine = weights(number);
    let sum = 0;
    for (let at = 0; at < each; at += nKeys) sum += mine.subarray(at, at + nKeys).reduce((most, weight) => Math.max(most, weight), 0);
    return sum / nQueries;
  });
  return { kind, heads: pairs, full: [], focus, queries, keys, chunks: [], weights };
}

/** The same of a block of layers and heads, (layer, head, query, key). */
function mapOfBlock(kind, layers, heads, picked, queries, keys, block) {
  const { shape } = block;
  if (shape.length !== 4 || shape[0] !== layers.length || shape[1] !== heads.length)
    throw new Unreadable(`its weights are of shape ${sizesOf(shape)}, which does not fit its layers and heads`);
  const all = layers.flatMap((layer) => heads.map((head) => [layer, head]));
  const pairs = (picked || all).filter(([layer, head]) => layers.includes(layer) && heads.includes(head));
  const indexOf = ([layer, head]) => layers.indexOf(layer) * heads.length + heads.indexOf(head);
  return mapOfArray(kind, pairs, indexOf, queries, keys, block);
}

function pageText(text, title, run, changes, maps, more = {}) {
  return { text, title, run, changes: changes || [], maps, within: 0.0001, ...more };
}

// Pictures --------------------------------------------------------------------------------------------------------

/** Some of the tokens of a side, `names` in the place of labels. */
function pickTokens(tokens, numbers, names) {
  const isPicked = new Set(numbers);
  const [groups, words] = [[], []];
  let at = 0;
  (tokens.groups || []).forEach((size, number) => {
    if (isPicked.has(at)) {
      groups.push(isPicked.has(at + size - 1) ? size : 1);
      words.push(names.get(at) ?? tokens.words[number]);
    }
    at += size;
  });
  const special = new Set(tokens.special);
  return {
    ...tokens,
    labels: numbers.map((token) => names.get(token) ?? tokens.labels[token]),
    offsets: numbers.flatMap((token) => tokens.offsets.slice(2 * token, 2 * token + 2)),
    special: trueAt(numbers.map((token) => special.has(token))),
    segments: tokens.segments && numbers.map((token) => tokens.segments[token]),
    groups: tokens.groups && groups,
    words: tokens.groups && words,
    given: tokens.given < 0 ? -1 : numbers.filter((token) => token < tokens.given).length,
  };
}

/** Weights of a map with each key's column added to column `to[key]` of so many, and its rows from row `first` on. */
function addUp(map, to, nRows, nColumns, first) {
  const n = map.keys.labels.length;
  return (number) => {
    const whole = new Float32Array(nRows * nColumns);
    map.weights(number).forEach((weight, at) => (whole[(first + Math.floor(at / n)) * nColumns + to[at % n]] += weight));
    return whole;
  };
}

const photoNameOf = ({ source }) => source.replace(/, small$/, "");
const cellsOf = ({ cells }) => cells.flat().filter((cell) => cell >= 0);

/** A map of words with each photo as one key, what stands between its patches as another, and a row for each column. */
function withPicturesAsOne(map, pictures, first) {
  const n = map.keys.labels.length;
  const photos = new Map();
  for (const picture of pictures) photos.set(photoNameOf(picture), [...(photos.get(photoNameOf(picture)) || []), ...cellsOf(picture)]);
  const group = numbersUpTo(n);
  const names = new Map();
  for (const [photo, cells] of photos) {
    const mine = [...new Set(cells)].sort((a, b) => a - b);
    const between = group.slice(mine[0] ?? n, (mine.at(-1) ?? 0) + 1).filter((token) => !mine.includes(token));
    for (const [name, tokens] of [[photo, mine], [`marks of ${photo}`, between]]) {
      if (tokens.length) names.set(tokens[0], name);
      for (const token of tokens) group[token] = tokens[0];
    }
  }
  const picked = [...new Set(group)].sort((a, b) => a - b);
  const placeOf = new Map(picked.map((token, place) => [token, place]));
  const to = group.map((token) => placeOf.get(token));
  const before = to[first];
  const tokens = pickTokens(map.keys, picked, names);
  const weights = addUp(map, to, picked.length, picked.length, before);
  return { ...map, queries: tokens, keys: before ? tokens : null, weights, before };
}

/** What words look at across to photos: each photo as one key, all else as another, empty rows for words before, which no view shows. */
function acrossAsOne(map, pictures, words, first) {
  const group = new Array(map.keys.labels.length).fill("elsewhere");
  for (const picture of pictures) for (const cell of cellsOf(picture)) group[cell] = photoNameOf(picture);
  const names = [...new Set(group)];
  const firsts = names.map((name) => group.indexOf(name));
  const keys = pickTokens(map.keys, firsts, new Map(firsts.map((key, at) => [key, names[at]])));
  const to = group.map((name) => names.indexOf(name));
  const weights = addUp(map, to, words.labels.length, names.length, first);
  return { ...map, queries: words, keys, weights, before: first };
}

/** A part of a map of words with a row for each column: rows that are not there are empty, and no view shows them. */
function withEmptyRows(map, first) {
  const n = map.keys.labels.length;
  const weights = addUp(map, numbersUpTo(n), n, n, first);
  return { ...map, queries: map.keys, keys: first ? map.keys : null, weights, before: first };
}

/** A picture of a record as the page shows it; `cells` says which key each of its patches is, row by row. */
async function photoOf({ grid, source, size }, cells, array, name) {
  const { shape, data: pixels } = need(await array(name), `the array ${name}`);
  const [rows, columns] = grid;
  const [height, width] = shape;
  if (shape.length !== 3 || shape[2] !== 3 || cells.length !== rows * columns) throw new Unreadable("its picture does not fit its patches");
  const seen = `as the model saw it: ${width} \u00d7 ${height} pixels, ${columns} \u00d7 ${rows} patches`;
  return { source, facts: `${source}, ${sizesOf(size)}, ${seen}`, grid, cells, size: [width, height], pixels };
}

/** What the view of photos needs: the pictures, and of pictures among words the map of words over their patches. */
async function picturesOf({ record, array }, maps) {
  const [map, ...more] = maps;
  const keys = map.keys || map.queries;
  if (record.picture) {
    const special = new Set(keys.special);
    const cells = numbersUpTo(keys.labels.length).filter((at) => !special.has(at));
    return { photos: [await photoOf(record.picture, cells, array, "picture")] };
  }
  if (!record.pictures?.length) return {};
  const photos = await Promise.all(record.pictures.map((picture, at) => photoOf(picture, picture.cells.flat(), array, `picture_${at}`)));
  const patches = new Set(photos.flatMap(({ cells }) => cells));
  const looking = { ...map, keys: { ...keys, special: keys.special.filter((token) => !patches.has(token)) } };
  const firsts = record.maps.map(({ part }) => part?.[0] || 0);
  if (map.kind !== "cross") {
    const flat = withPicturesAsOne({ ...map, keys }, record.pictures, firsts[0]);
    return { photos, looking: { ...looking, first: flat.before }, maps: [flat] };
  }
  const others = more.map((other, at) => withEmptyRows(other, firsts[at + 1]));
  const whole = others.find(({ queries }) => queries.labels.length === map.queries.labels.length + firsts[0]);
  const first = whole ? firsts[0] : 0;
  const across = acrossAsOne(map, record.pictures, first ? whole.queries : map.queries, first);
  return { photos, looking: { ...looking, first }, maps: [across, ...others] };
}

// Records ---------------------------------------------------------------------------------------------------------

const titleOfText = (text, name) => (text || name).slice(0, 120) || "(blank)";

async function textOfHeatmap(name, content) {
  const { record, array } = content;
  const { picture, pictures, sound, changes, picked } = record;
  const maps = [];
  for (const [at, map] of need(record.maps, "the description of its maps").entries()) {
    const { kind } = map;
    const block = need((at === 0 && (await array("weights"))) || (await array(`${kind}_weights`)), "the array weights");
    const isPlain = !map.part && !picture && !pictures?.length && !sound && !changes?.includes("hide_special");
    const queries = tokensOfRecord(map.queries, kind === "decoder" && isPlain);
    const keys = kind === "cross" || pictures?.length ? tokensOfRecord(map.keys) : null;
    maps.push(mapOfBlock(kind, map.layers, map.heads, map.picked || picked, queries, keys, block));
  }
  const more = await picturesOf(content, maps);
  return pageText(record.text || "", titleOfText(record.text, name), record.run || record, changes, maps, more);
}

/** The tokens along one side of a pooled map: so many of them are a cell. */
function cellsOfTokens({ labels }, size) {
  const firsts = numbersUpTo(Math.ceil(labels.length / size)).map((cell) => cell * size);
  const nameOfCell = (first) => {
    const some = labels.slice(first, first + size);
    return size === 1 ? some[0] : `${first} ${some.slice(0, 6).join(" ").slice(0, 28)}${some.length > 1 ? "\u2026" : ""}`;
  };
  return tokensOfRecord({ labels: firsts.map(nameOfCell) });
}

/** A pooled record: as a text whose tokens are the cells. */
async function textOfPooled(name, { record, array }) {
  const maps = [];
  for (const [at, map] of need(record.maps, "the description of its maps").entries()) {
    const cells = need(await array(`${at ? `${map.kind}_` : ""}cells`), "the array cells");
    const hasKeys = map.kind === "cross" || map.key_cell !== map.query_cell;
    const keys = hasKeys ? cellsOfTokens(map.keys || map.queries, map.key_cell) : null;
    maps.push(mapOfBlock(map.kind, map.layers, map.heads, record.picked, cellsOfTokens(map.queries, map.query_cell), keys, cells));
  }
  const [{ query_cell, key_cell }] = record.maps;
  const mean = "the share that a query of its row gives to its keys, on average";
  const note = `a cell is ${query_cell} \u00d7 ${key_cell} tokens, and shows ${record.pool === "max" ? "the largest weight in it" : mean}`;
  const run = { ...record, notes: [...(record.notes || []), note] };
  return pageText(record.text || "", titleOfText(record.text, name), run, [], maps);
}

async function textOfArrays(name, { array }) {
  const weights = need(await array("weights"), "the array weights");
  const tokens = need(await array("tokens"), "the array tokens");
  const [keys, model] = [await array("keys"), await array("model")];
  if (weights.shape.length !== 4) throw new Unreadable(`its weights are of shape ${sizesOf(weights.shape)}, not (layer, head, query, key)`);
  const numbers = async (member, n) => Array.from((await array(member))?.data || numbersUpTo(n));
  const [layers, heads] = [await numbers("layers", weights.shape[0]), await numbers("heads", weights.shape[1])];
  const special = new Set((await array("special"))?.data || []);
  const kind = keys ? "cross" : (await array("kind"))?.data[0] || "decoder";
  const axisOfLabels = ({ data }) => {
    const labels = Array.from(data);
    return tokensOfRecord({ labels, special: labels.map((_, at) => special.has(at)) }, kind === "decoder");
  };
  const map = mapOfBlock(kind, layers, heads, null, axisOfLabels(tokens), keys && axisOfLabels(keys), weights);
  return pageText("", name, { model: model?.data[0] || "" }, [], [map]);
}

/** The texts of a comparison, each with its array of weights, one after the other for the heads of the record. */
function textsOfComparison({ record, array }, tokensByArray) {
  const pairs = record.heads.map((name) => partsOfName(name).slice(2).map(Number));
  const texts = tokensByArray.map(async ([name, tokens]) => {
    const weights = need(await array(name), "the array weights");
    const map = mapOfArray(record.kind, pairs, (pair) => pairs.indexOf(pair), tokensOfRecord(tokens), null, weights);
    return pageText(tokens.text, tokens.text, record.run, record.changes, [map]);
  });
  return Promise.all(texts);
}

/** The texts of a record with attention; null = it is of another kind. */
export async function textsOfRecord(name, content) {
  const { schema, shape, tokens } = content.record;
  const kind = schema.split("/")[0];
  if (kind === "attnscope.heatmap") return [await textOfHeatmap(name, content)];
  if (kind === "attnscope.pooled") return [await textOfPooled(name, content)];
  if (kind === "arrays") return [await textOfArrays(name, content)];
  if (kind !== "attnscope.compare") return null;
  if (shape === "texts") return textsOfComparison(content, [["weights", tokens[0]], ["other_weights", tokens[1]]]);
  return shape === "pick" ? textsOfComparison(content, [["weights", tokens]]) : null;
}
