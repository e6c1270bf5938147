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

function tokensOfRecord(tokens) {
  const offsets = (tokens.offsets || tokens.labels.map(() => [-1, -1])).flat();
  const segments = tokens.segments?.some(Boolean) ? tokens.segments : null;
  return {
    labels: tokens.labels,
    offsets,
    special: trueAt(tokens.special),
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

function pageText(text, title, run, changes, maps) {
  return { text, title, run, changes: changes || [], maps, within: 0.0001 };
}

const titleOfText = (text, name) => (text || name).slice(0, 120) || "(blank)";

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
  if (kind === "attnscope.pooled") return [await textOfPooled(name, content)];
  if (kind !== "attnscope.compare") return null;
  if (shape === "texts") return textsOfComparison(content, [["weights", tokens[0]], ["other_weights", tokens[1]]]);
  return shape === "pick" ? textsOfComparison(content, [["weights", tokens]]) : null;
}
