// A saved record as what this app shows: attention on a text, or numbers about heads.
import { Unreadable, arrayOfNpy, jsonOf, membersOf } from "./archive.js";
import { Example } from "./catalog.js";
import { manifest } from "./data.js";

const NEAREST = 12;

function flat(value) {
  const shape = [];
  for (let at = value; Array.isArray(at); at = at[0]) shape.push(at.length);
  const data = value.flat(Infinity);
  return { shape, data: typeof data[0] === "string" ? data : Float64Array.from(data, (one) => (one === null ? NaN : Number(one))) };
}

/** A record as it was saved: what describes it, and its arrays by name. */
async function contentOf(name, bytes) {
  if (bytes[0] === 0x50 && bytes[1] === 0x4b) {
    const members = membersOf(bytes);
    const array = async (member) => (members.has(member) ? arrayOfNpy(await members.get(member)(), member) : null);
    if (!members.has("record")) {
      if (!members.has("weights")) throw new Unreadable("the archive holds no record of attnscope, and no weights and tokens");
      return { record: { schema: "arrays" }, array };
    }
    const { data } = await array("record");
    const text = typeof data[0] === "string" ? data[0] : new TextDecoder().decode(Uint8Array.from(data));
    return { record: jsonOf(text), array };
  }
  let record = null;
  try {
    record = jsonOf(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch {
    throw new Unreadable("it is neither an archive of arrays (.npz) nor JSON, or is cut off");
  }
  if (!record || typeof record.schema !== "string") throw new Unreadable("it is JSON, but no record of attnscope: it names no schema");
  return { record: record.record || record, array: async (member) => (Array.isArray(record[member]) ? flat(record[member]) : null) };
}

function need(value, what) {
  if (value === null || value === undefined) throw new Unreadable(`${what} is missing in it`);
  return value;
}

// Attention on a text -----------------------------------------------------------------------------------------------

/** @param resting whether the first token is hidden with the special ones, as a decoder's is; see `Tokens.sinks` */
function tokensOfRecord(tokens, resting = false) {
  const n = tokens.labels.length;
  const pick = (flags) => (flags || []).flatMap((flag, at) => (flag ? [at] : []));
  const offsets = (tokens.offsets || Array.from({ length: n }, () => [-1, -1])).flat();
  const segments = tokens.segments?.some(Boolean) ? tokens.segments : null;
  let [groups, words] = [null, null];
  if (tokens.words) {
    [groups, words] = [[], []];
    const letters = Array.from(tokens.text || "");
    tokens.words.forEach((word, at) => {
      const more = at > 0 && word >= 0 && word === tokens.words[at - 1] && (!segments || segments[at] === segments[at - 1]);
      if (more) groups[groups.length - 1]++;
      else groups.push(1);
    });
    let at = 0;
    for (const size of groups) {
      const [from, to] = [offsets[2 * at], offsets[2 * (at + size - 1) + 1]];
      words.push(size > 1 && from >= 0 && to > from && !segments?.[at] ? letters.slice(from, to).join("") : tokens.labels.slice(at, at + size).join("").replaceAll("##", ""));
      at += size;
    }
  }
  const special = pick(tokens.special);
  const hidden = resting && special[0] !== 0 ? { hidden: [0, ...special] } : {};
  return { labels: tokens.labels, offsets, special, ...hidden, segments, groups, words, text: tokens.text || "", pair: tokens.pair || null, given: tokens.n_given ?? -1 };
}

/** A map of pairs of layer and head; `placeOf(pair)` says which of the arrays, one after the other, is its own. */
function mapOfArray(kind, pairs, placeOf, queries, keys, { shape, data }) {
  const [nQueries, nKeys] = shape.slice(-2);
  if (nQueries !== queries.labels.length || nKeys !== (keys || queries).labels.length || !pairs.length)
    throw new Unreadable(`its weights are of shape ${shape.join(" \u00d7 ")}, which does not fit its tokens and heads`);
  const each = nQueries * nKeys;
  const weights = (index) => {
    const at = placeOf(pairs[index]);
    if ((at + 1) * each > data.length) throw new Unreadable(`its weights are of shape ${shape.join(" \u00d7 ")}, which does not fit its heads`);
    return Float32Array.from(data.subarray(at * each, (at + 1) * each));
  };
  const focus = pairs.map((_, index) => {
    const mine = weights(index);
    let sum = 0;
    for (let query = 0; query < nQueries; query++) sum += mine.subarray(query * nKeys, (query + 1) * nKeys).reduce((most, one) => Math.max(most, one), 0);
    return sum / nQueries;
  });
  return { kind, heads: pairs, full: [], focus, queries, keys, chunks: [], weights };
}

/** The same of a block of layers and heads, (layer, head, query, key). */
function mapOfBlock(kind, layers, heads, picked, queries, keys, held) {
  const { shape } = held;
  if (shape.length !== 4 || shape[0] !== layers.length || shape[1] !== heads.length)
    throw new Unreadable(`its weights are of shape ${shape.join(" \u00d7 ")}, which does not fit its layers and heads`);
  const pairs = (picked || layers.flatMap((layer) => heads.map((head) => [layer, head]))).filter(([layer, head]) => layers.includes(layer) && heads.includes(head));
  return mapOfArray(kind, pairs, ([layer, head]) => layers.indexOf(layer) * heads.length + heads.indexOf(head), queries, keys, held);
}

/** Some of the tokens of a side, `names` in the place of labels. */
function taken(tokens, kept, names) {
  const has = new Set(kept);
  const [groups, words] = [[], []];
  let at = 0;
  (tokens.groups || []).forEach((size, number) => {
    if (has.has(at)) {
      groups.push(has.has(at + size - 1) ? size : 1);
      words.push(names.get(at) ?? tokens.words[number]);
    }
    at += size;
  });
  const special = new Set(tokens.special);
  return {
    ...tokens,
    labels: kept.map((token) => names.get(token) ?? tokens.labels[token]),
    offsets: kept.flatMap((token) => tokens.offsets.slice(2 * token, 2 * token + 2)),
    special: kept.flatMap((token, place) => (special.has(token) ? [place] : [])),
    segments: tokens.segments && kept.map((token) => tokens.segments[token]),
    groups: tokens.groups && groups,
    words: tokens.groups && words,
    given: tokens.given < 0 ? -1 : kept.filter((token) => token < tokens.given).length,
  };
}

/** A map of words with each photo as one key, what stands between its patches as another, and a row for each column. */
function withPicturesAsOne(map, pictures, first) {
  const n = map.keys.labels.length;
  const photos = new Map();
  for (const { source, cells } of pictures) {
    const photo = source.replace(/, small$/, "");
    photos.set(photo, [...(photos.get(photo) || []), ...cells.flat().filter((cell) => cell >= 0)]);
  }
  const group = Array.from({ length: n }, (_, at) => at);
  const names = new Map();
  for (const [photo, places] of photos) {
    const mine = new Set(places);
    const [low, high] = [places.reduce((a, b) => Math.min(a, b), n), places.reduce((a, b) => Math.max(a, b), 0)];
    const between = group.slice(low, high + 1).filter((token) => !mine.has(token));
    for (const [name, some] of [[photo, [...mine].sort((a, b) => a - b)], [`marks of ${photo}`, between]]) {
      if (some.length) names.set(some[0], name);
      for (const token of some) group[token] = some[0];
    }
  }
  const kept = [...new Set(group)].sort((a, b) => a - b);
  const placeOf = new Map(kept.map((token, place) => [token, place]));
  const to = group.map((token) => placeOf.get(token));
  const weights = (index) => {
    const [whole, some] = [new Float32Array(kept.length ** 2), map.weights(index)];
    some.forEach((weight, at) => (whole[(to[first] + Math.floor(at / n)) * kept.length + to[at % n]] += weight));
    return whole;
  };
  const tokens = taken(map.keys, kept, names);
  return [{ ...map, queries: tokens, keys: to[first] ? tokens : null, weights, before: to[first] }, to[first]];
}

/** What words look at across to photos: each photo as one key, all else as another, empty rows for words before, which no view shows. */
function acrossAsOne(map, pictures, words, first) {
  const n = map.keys.labels.length;
  const group = new Array(n).fill("elsewhere");
  for (const { source, cells } of pictures) for (const cell of cells.flat()) if (cell >= 0) group[cell] = source.replace(/, small$/, "");
  const names = [...new Set(group)];
  const to = group.map((name) => names.indexOf(name));
  const kept = names.map((name) => group.indexOf(name));
  const weights = (index) => {
    const whole = new Float32Array(words.labels.length * names.length);
    map.weights(index).forEach((weight, at) => (whole[(first + Math.floor(at / n)) * names.length + to[at % n]] += weight));
    return whole;
  };
  return { ...map, queries: words, keys: taken(map.keys, kept, new Map(kept.map((key, at) => [key, names[at]]))), weights, before: first };
}

/** A part of a map of words with a row for each column: rows that are not kept are empty, and no view shows them. */
function withEmptyRows(map, first) {
  const n = map.keys.labels.length;
  const weights = (index) => {
    const whole = new Float32Array(n * n);
    whole.set(map.weights(index), first * n);
    return whole;
  };
  return { ...map, queries: map.keys, keys: first ? map.keys : null, weights, before: first };
}

/** A picture of a record as the page shows it; `cells` says which key each of its patches is, row by row. */
async function photoOf(record, cells, held, name) {
  const { shape, data } = need(held, `the array ${name}`);
  const [rows, columns] = record.grid;
  if (shape.length !== 3 || shape[2] !== 3 || cells.length !== rows * columns) throw new Unreadable("its picture does not fit its patches");
  const facts = `${record.source}, ${record.size.join(" \u00d7 ")}, as the model saw it: ${shape[1]} \u00d7 ${shape[0]} pixels, ${columns} \u00d7 ${rows} patches`;
  return { source: record.source, facts, grid: record.grid, cells, size: [shape[1], shape[0]], pixels: data };
}

/** What the view of photos needs: the pictures, and of pictures among words the map of words over their patches. */
async function picturesOf({ record, array }, maps) {
  if (record.picture) {
    const special = new Set((maps[0].keys || maps[0].queries).special);
    const cells = Array.from({ length: (maps[0].keys || maps[0].queries).labels.length }, (_, at) => at).filter((at) => !special.has(at));
    return { photos: [await photoOf(record.picture, cells, await array("picture"), "picture")] };
  }
  if (!record.pictures?.length) return {};
  const photos = await Promise.all(record.pictures.map(async (one, at) => photoOf(one, one.cells.flat(), await array(`picture_${at}`), `picture_${at}`)));
  const patches = new Set(photos.flatMap(({ cells }) => cells));
  const keys = maps[0].keys || maps[0].queries;
  const firsts = record.maps.map(({ part }) => part?.[0] || 0);
  if (maps[0].kind === "cross") {
    const others = maps.slice(1).map((map, at) => withEmptyRows(map, firsts[at + 1]));
    const whole = others.find(({ queries }) => queries.labels.length === maps[0].queries.labels.length + firsts[0]);
    const first = whole ? firsts[0] : 0;
    const looking = { ...maps[0], keys: { ...keys, special: keys.special.filter((token) => !patches.has(token)) }, first };
    return { photos, looking, maps: [acrossAsOne(maps[0], record.pictures, first ? whole.queries : maps[0].queries, first), ...others] };
  }
  const [flat, first] = withPicturesAsOne({ ...maps[0], keys }, record.pictures, firsts[0]);
  const looking = { ...maps[0], keys: { ...keys, special: keys.special.filter((token) => !patches.has(token)) }, first };
  return { photos, looking, maps: [flat] };
}

async function textOfHeatmap(name, content) {
  const { record, array } = content;
  const maps = [];
  for (const [at, map] of need(record.maps, "the description of its maps").entries()) {
    const prefix = at === 0 ? "" : `${map.kind}_`;
    const held = need((await array(`${prefix}weights`)) || (await array(`${map.kind}_weights`)), "the array weights");
    const cross = map.kind === "cross" || record.pictures?.length;
    const rests = map.kind === "decoder" && !map.part && !record.picture && !record.pictures?.length && !record.sound && !record.changes?.includes("hide_special");
    maps.push(mapOfBlock(map.kind, map.layers, map.heads, map.picked || record.picked, tokensOfRecord(map.queries, rests), cross ? tokensOfRecord(map.keys) : null, held));
  }
  const run = record.run || record;
  return { text: record.text || "", title: (record.text || name).slice(0, 120) || "(blank)", run, changes: record.changes || [], maps, within: 0.0001, ...(await picturesOf(content, maps)) };
}

/** The tokens along one side of a pooled map: so many of them are a cell. */
function cellsOfTokens(tokens, size) {
  const labels = [];
  for (let first = 0; first < tokens.labels.length; first += size) {
    const some = tokens.labels.slice(first, first + size);
    labels.push(size === 1 ? some[0] : `${first} ${some.slice(0, 6).join(" ").slice(0, 28)}${some.length > 1 ? "\u2026" : ""}`);
  }
  return tokensOfRecord({ labels });
}

/** A pooled record: as a text whose tokens are the cells. */
async function textOfPooled(name, { record, array }) {
  const maps = [];
  for (const [number, map] of need(record.maps, "the description of its maps").entries()) {
    const cells = need(await array(`${number ? `${map.kind}_` : ""}cells`), "the array cells");
    const keys = map.kind === "cross" || map.key_cell !== map.query_cell ? cellsOfTokens(map.keys || map.queries, map.key_cell) : null;
    maps.push(mapOfBlock(map.kind, map.layers, map.heads, record.picked, cellsOfTokens(map.queries, map.query_cell), keys, cells));
  }
  const [{ query_cell, key_cell }] = record.maps;
  const what = record.pool === "max" ? "the largest weight in it" : "the share that a query of its row gives to its keys, on average";
  const note = `a cell is ${query_cell} \u00d7 ${key_cell} tokens, and shows ${what}`;
  return { text: record.text || "", title: (record.text || name).slice(0, 120) || "(blank)", run: { ...record, notes: [...(record.notes || []), note] }, changes: [], maps, within: 0.0001 };
}

async function textOfArrays(name, { array }) {
  const weights = need(await array("weights"), "the array weights");
  const tokens = need(await array("tokens"), "the array tokens");
  const keys = await array("keys");
  if (weights.shape.length !== 4) throw new Unreadable(`its weights are of shape ${weights.shape.join(" \u00d7 ")}, not (layer, head, query, key)`);
  const numbers = async (member, n) => Array.from((await array(member))?.data || Array.from({ length: n }, (_, at) => at));
  const special = new Set((await array("special"))?.data || []);
  const kind = keys ? "cross" : (await array("kind"))?.data[0] || "decoder";
  const axis = (labels) => tokensOfRecord({ labels, special: labels.map((_, at) => special.has(at)) }, kind === "decoder");
  const map = mapOfBlock(
    kind, await numbers("layers", weights.shape[0]), await numbers("heads", weights.shape[1]), null, axis(Array.from(tokens.data)), keys && axis(Array.from(keys.data)), weights,
  );
  return { text: "", title: name, run: { model: (await array("model"))?.data[0] || "" }, changes: [], maps: [map], within: 0.0001 };
}

/** The heads that were picked, on their text. */
async function textOfPicked({ record, array }) {
  const pairs = record.heads.map((name) => placeOfName(name).slice(2).map(Number));
  const weights = need(await array("weights"), "the array weights");
  const map = mapOfArray(record.kind, pairs, (pair) => pairs.indexOf(pair), tokensOfRecord(record.tokens), null, weights);
  return { text: record.tokens.text, title: record.tokens.text, run: record.run, changes: record.changes || [], maps: [map], within: 0.0001 };
}

/** The two texts of a comparison, to be compared in the view for it. */
async function textsOfComparison({ record, array }) {
  const pairs = record.heads.map((name) => placeOfName(name).slice(2).map(Number));
  const placeOf = (pair) => pairs.indexOf(pair);
  const texts = record.tokens.map(async (tokens, number) => {
    const weights = need(await array(number ? "other_weights" : "weights"), "the array weights");
    const map = mapOfArray(record.kind, pairs, placeOf, tokensOfRecord(tokens), null, weights);
    return { text: tokens.text, title: tokens.text, run: record.run, changes: record.changes || [], maps: [map], within: 0.0001 };
  });
  return Promise.all(texts);
}

// Numbers about heads -------------------------------------------------------------------------------------------------

const placeOfName = (name) => /^(?:(\w+) )?L(\d+)H(\d+)$/.exec(name) || [];
const noRoles = { roles: [] };

/** A head for each place, with measures by name. */
function headsOfGrid(kind, n_layers, n_heads, measuresAt) {
  return Array.from({ length: n_layers * n_heads }, (_, at) => {
    const [layer, head] = [Math.floor(at / n_heads), at % n_heads];
    return { kind, layer, head, ...noRoles, ...measuresAt(layer, head, at) };
  });
}

async function headsOfRelations({ record, array }) {
  const relations = need(record.relations, "relations");
  const field = async (name) => (await array(name)) || flat(relations.map((one) => need(one[name], name)));
  const [accuracy, low, high, found] = [await field("accuracy"), await field("low"), await field("high"), await field("found")];
  const [, nLayers, nHeads] = accuracy.shape;
  const names = relations.map(({ name }) => name.replace(/[:\s]/g, "_"));
  const facts = Object.fromEntries(
    relations.map((one, at) => [names[at], {
      label: one.name.replaceAll("_", " "),
      beside: ` \u00b7 n ${one.n_scored} \u00b7 ${Number.isFinite(one.baseline) ? one.baseline.toFixed(2) : "\u2013"}`,
      unsettled: !!one.why_no_verdict,
      what: `accuracy of ${one.name}; baseline: ${one.rule || "none"}; ${one.n_scored} links scored${one.why_no_verdict ? `; no verdict: ${one.why_no_verdict}` : ""}`, unit: "share", range: [0, 1] }]),
  );
  const heads = headsOfGrid(record.kind || "encoder", nLayers, nHeads, (layer, head, place) => {
    const at = (relation) => relation * nLayers * nHeads + place;
    const measures = Object.fromEntries(
      names.map((name, relation) => [name, { value: accuracy.data[at(relation)], low: low.data[at(relation)], high: high.data[at(relation)], uniform: relations[relation].baseline }]),
    );
    const expressed = relations.filter((_, relation) => found.data[at(relation)]).map(({ name }) => name);
    return { measures, words: expressed.length ? `expresses ${expressed.join(", ")}` : "" };
  });
  return { ...record, grid: "measures", rows: "relation", quantity: "accuracy; after each name its n and its baseline; grey: too few for a verdict", even: "baseline", options: { ...record.options, measures: facts }, heads };
}

/** How much each head's attention over the picture changes between two photos or questions, over words equal in both. */
async function headsOfPictures({ record, array }) {
  const parts = [`divergence.${record.measure}`, "equal", "weights", "other_weights"];
  const [divergence, equal, ...both] = await Promise.all(parts.map(async (name) => need(await array(name), `the array ${name}`)));
  const [, nWords, rows, columns] = both[0].shape;
  const words = Array.from({ length: nWords }, (_, word) => word).filter((word) => equal.data[word]);
  const mean = (valueAt) => words.reduce((sum, word) => sum + valueAt(word), 0) / words.length;
  const share = ({ data }, head) =>
    mean((word) => data.subarray((head * nWords + word) * rows * columns, (head * nWords + word + 1) * rows * columns).reduce((sum, one) => sum + one, 0));
  const heads = record.heads.map((name, at) => {
    const [, kind, layer, head] = placeOfName(name);
    const [before, after] = both.map((weights) => share(weights, at));
    const measures = { change: { value: Math.sqrt(mean((word) => divergence.data[at * nWords + word])) }, on_picture: { value: before }, on_other_picture: { value: after } };
    return { kind: kind || record.kind, layer: Number(layer), head: Number(head), ...noRoles, measures };
  });
  const facts = {
    change: { what: `${record.measure.replaceAll("_", "-")} distance between what words attend to in both, over the picture and all else` },
    on_picture: { what: "share of the words' attention on the first picture", unit: "share", range: [0, 1] },
    on_other_picture: { what: "share of the words' attention on the second picture", unit: "share", range: [0, 1] },
  };
  return { grid: "layers", rows: "number", shape: record.shape, run: record.run, options: { measures: facts }, heads };
}

async function headsOfComparison({ record, array }) {
  if (record.shape === "pictures") return headsOfPictures({ record, array });
  const [table] = record.tables || [];
  const names = need(record.heads, "heads");
  if (!table || !placeOfName(names[0])[0]) throw new Unreadable("this comparison has no table of heads that this page could show; `attnscope show` draws it");
  const mean = need(await array(`${table.name}.mean`), `${table.name}.mean`);
  const [rows, columns] = mean.shape;
  const others = record.other_heads || names;
  const [low, high] = [await array(`${table.name}.low`), await array(`${table.name}.high`)];
  const root = (held, a, b) => (held ? Math.sqrt(Math.max(0, held.data[a * columns + b])) : NaN);
  const distance = (a, b) => root(mean, a, b);
  const estimate = (a, b) => ({ value: distance(a, b), low: root(low, a, b), high: root(high, a, b) });
  const positions = await array(`${table.name}.places`);
  const self = !record.other_heads;
  const heads = names.slice(0, rows).map((name, at) => {
    const [, kind, layer, head] = placeOfName(name);
    const all = others.map((_, other) => [other, distance(at, other)]).filter(([other, value]) => (!self || other !== at) && Number.isFinite(value));
    all.sort((a, b) => a[1] - b[1]);
    const known = all.map(([, value]) => value);
    const nearest = all[0];
    return {
      kind: kind || record.kind || "encoder", layer: Number(layer), head: Number(head), ...noRoles,
      measures: {
        nearest_distance: nearest ? estimate(at, nearest[0]) : { value: NaN },
        mean_distance: { value: known.reduce((sum, one) => sum + one, 0) / (known.length || 1) },
        ...(self ? {} : { same_number_distance: estimate(at, others.indexOf(name)) }),
      },
      near: self ? all.slice(0, NEAREST) : [],
      words: nearest ? `nearest ${self ? "" : `in ${record.other_run?.model || "the other"} `}is ${others[nearest[0]]}, ${nearest[1].toFixed(3)} away` : "",
    };
  });
  const what = `${table.measure} distance`;
  const facts = { nearest_distance: { what: `${what} to the nearest head` }, mean_distance: { what: `mean ${what} to all others` }, same_number_distance: { what: `${what} to the head of the same number in the other model` } };
  const places = positions && Array.from({ length: rows }, (_, at) => [positions.data[2 * at], positions.data[2 * at + 1]]);
  return { grid: "layers", rows: "distance", quantity: "distance", run: record.run, corpus: record.corpus || {}, options: { measures: facts }, heads, positions: places };
}

async function atlasOf({ record, array }) {
  const n = record.heads.length;
  const [positions, deciles, profiles, even, distances, places, special, starts, keys, codes] = await Promise.all(
    ["positions", "deciles", "profiles", "even_profiles", "distances", "places", "special", "starts", "keys", "codes"].map(array),
  );
  const lines = (held) => held && Array.from({ length: n }, (_, at) => Array.from(held.data.subarray(at * held.shape[1], (at + 1) * held.shape[1])));
  const shown = {
    ...record,
    positions: lines(positions),
    deciles: lines(deciles),
    tokens: (record.tables || []).map((rows) => [...new Set(rows.flatMap((row) => row.tokens))]),
  };
  if (!codes) return [shown, null];
  const firsts = new Map();
  let token = 0;
  record.facts.forEach((facts, number) => {
    if (!firsts.has(facts.head)) firsts.set(facts.head, []);
    firsts.get(facts.head).push([number, token]);
    token += facts.labels.length;
  });
  if (token !== places.data.length || starts.data.at(-1) !== codes.data.length) throw new Unreadable("the attention of its examples is cut off");
  const sides = record.planes?.length ? ["queries", "keys", "outputs"] : [];
  const held = await Promise.all(sides.map((side) => array(`point_${side}`)));
  const counts = record.heads.map(({ kind }) => 3 * (record.plane_tokens || []).filter((token) => token.kind === kind).length);
  const pointsOf = (at) => {
    const first = counts.slice(0, at).reduce((sum, count) => sum + count, 0);
    return held.every(Boolean) && held.length ? Object.fromEntries(sides.map((side, number) => [side, held[number].data.subarray(first, first + counts[at])])) : null;
  };
  const detail = async (at) => {
    const row = lines({ ...distances, data: distances.data })[at];
    const near = row.map((distance, other) => [other, distance]).filter(([other, distance]) => other !== at && Number.isFinite(distance));
    const examples = (firsts.get(at) || []).map(([number, first]) => {
      const facts = record.facts[number];
      const after = first + facts.labels.length;
      const ends = [first ? starts.data[first - 1] : 0, ...starts.data.subarray(first, after)];
      const counts = ends.slice(1).map((end, place) => end - ends[place]);
      const flags = Array.from(special.data.subarray(first, after)).flatMap((flag, place) => (flag ? [place] : []));
      return new Example(facts, Array.from(places.data.subarray(first, after)), flags, counts, keys.data.subarray(ends[0], ends.at(-1)), codes.data.subarray(ends[0], ends.at(-1)));
    });
    return { tables: record.tables[at], profile: lines(profiles)[at], even: lines(even)[at], near: near.sort((a, b) => a[1] - b[1]).slice(0, NEAREST), points: pointsOf(at), examples };
  };
  return [shown, detail];
}

/** The columns of the table of heads, in the form and order in which Python writes them into a page; see `table_of`. */
function tableOf({ heads, positions, deciles, rank, descriptions, options = {} }) {
  const table = [];
  const add = (name, estimates, facts) => {
    if (!estimates.some(Boolean)) return;
    const [values, low, high, uniform] = ["value", "low", "high", "uniform"].map((part) => estimates.map((estimate) => estimate?.[part] ?? NaN));
    table.push({ name, label: facts.label || name.replaceAll("_", " "), what: "", unit: "", ...facts, values, low, high, uniform });
  };
  const numbers = (name, values, facts) => add(name, values.map((value) => value !== undefined && { value }), facts);
  const names = (what) => [...new Set(heads.flatMap((head) => Object.keys(head[what] || {})))];
  const described = new Map((descriptions?.heads || []).map((one) => [`${one.kind}.${one.layer}.${one.head}`, one]));
  const mine = heads.map(({ kind, layer, head }) => described.get(`${kind}.${layer}.${head}`));
  const share = "share of its attention";
  const apart = "attention apart from uniform attention that";
  add("explained", mine.map((one) => one && { ...one, value: one.explained }), { what: `share of what sets its ${apart} the description predicts, held out`, unit: "share" });
  numbers("nats", mine.map((one) => one?.nats), { what: "how far its attention is from uniform: mean KL divergence", unit: "nats" });
  add("active_explained", mine.map((one) => one?.active && { ...one.active, value: one.active.explained }), { what: `share of what sets that ${apart} its terms predict, held out`, unit: "share" });
  numbers("active_share", mine.map((one) => one?.active?.share), { what: `${share} on keys that are neither special tokens nor the first`, unit: "share" });
  numbers("active_nats", mine.map((one) => one?.active?.nats), { what: "how far that attention is from uniform: mean KL divergence", unit: "nats" });
  for (const name of ["position", "token", "both"])
    add(`from_${name}`, mine.map((one) => one?.active?.sources?.[name]), { what: `share that follows from mean queries and keys given ${name === "both" ? "position and token" : name}, held out`, unit: "share" });
  for (const [name, end, text] of deciles ? [["score", 5, "median text"], ["score_p90", 9, "90th percentile"]] : [])
    numbers(name, deciles.map((ends) => ends[end]), { label: `${rank} (${text})`, what: options.rank });
  numbers("resting_share", heads.map((head) => head.resting_share), { label: "sink share", what: `${share} on sinks: special tokens and the first`, unit: "share" });
  const measures = names("measures");
  const roles = new Set([...Object.keys(options.roles || {}), ...heads.flatMap((head) => head.roles.map(({ name }) => name))]);
  for (const role of ["unclassified", ...roles]) {
    const holds = heads.map((head) => Number(role === "unclassified" ? !head.roles.length : head.roles.some(({ name }) => name === role)));
    if (/^[\p{L}_][\p{L}\p{N}_]*$/u.test(role)) numbers(measures.includes(role) ? `is_${role}` : role, holds, { kind: "role", hidden: true });
  }
  for (const name of measures) {
    const { of: source, ...about } = options.measures?.[name] || {};
    const whole = options.measures?.[name] ? null : options.measures?.[name.replace(/_active$/, "")];
    add(name, heads.map((head) => head.measures?.[name]), { kind: "measure", source, ...about, ...(whole && { unit: whole.unit, what: `${whole.what} (excluding sinks)` }) });
  }
  for (const name of names("effects"))
    add(name, heads.map((head) => head.effects?.[name]), { kind: "effect", what: "what changes without the head", ...options.quantities?.[name] });
  for (const [at, axis] of positions?.some((place) => place.some(Number.isFinite)) ? ["x", "y"].entries() : [])
    numbers(`map_${axis}`, positions.map((place) => place[at]), { what: "heads that attend alike stand near each other" });
  return table;
}

/** The marks of the roles that heads have: the known ones, then colours that are left. */
function rolesOfHeads({ heads, options }) {
  const { marks, colors } = manifest.viewer;
  const names = new Set(heads.flatMap(({ roles }) => roles.map(({ name }) => name)));
  const others = [...names].filter((name) => !marks[name]).sort();
  const known = [...Object.keys(marks).filter((name) => names.has(name)), ...others];
  const found = {};
  for (const name of known) {
    const mark = marks[name] || [name[0]?.toUpperCase() || "?", colors[others.indexOf(name) % colors.length]];
    found[name] = { glyph: mark[0], color: mark[1], label: name.replaceAll("_", " "), what: options?.roles?.[name]?.what || "" };
  }
  const byKind = {};
  for (const { kind, layer, head, roles } of heads)
    (byKind[kind] ||= {})[`${layer}.${head}`] = roles.map(({ name, value, low, high, tentative }) => ({ name, value: value ?? NaN, low, high, tentative }));
  return { marks: found, heads: byKind };
}

/**
 * Reads a saved record.
 *
 * @returns {Promise<{texts: object[], roles: object | null, record: object | null, detail: Function | null}>} attention on
 *     texts, or the record of heads with a function that gives the card of each
 */
export async function readRecord(name, bytes) {
  const content = await contentOf(name, bytes);
  const kind = content.record.schema.split("/")[0];
  const nothing = { texts: [], roles: null, record: null, detail: null };
  if (kind === "attnscope.heatmap") return { ...nothing, texts: [await textOfHeatmap(name, content)] };
  if (kind === "attnscope.pooled") return { ...nothing, texts: [await textOfPooled(name, content)] };
  if (kind === "arrays") return { ...nothing, texts: [await textOfArrays(name, content)] };
  if (kind === "attnscope.compare" && content.record.shape === "texts") return { ...nothing, texts: await textsOfComparison(content) };
  if (kind === "attnscope.compare" && content.record.shape === "pick") return { ...nothing, texts: [await textOfPicked(content)] };
  const plain = async (record) => [record, null];
  const reader = {
    "attnscope.heads": ({ record }) => plain(record),
    "attnscope.ablate": ({ record }) => plain({ ...record, heads: record.heads.map((head) => ({ ...noRoles, ...head })) }),
    "attnscope.relations": (held) => headsOfRelations(held).then(plain),
    "attnscope.compare": (held) => headsOfComparison(held).then(plain),
    "attnscope.atlas": atlasOf,
  }[kind];
  if (!reader) throw new Unreadable(`it is of kind ${content.record.schema}, which this page does not show; \`attnscope show\` does`);
  const [record, detail] = await reader(content);
  if (!record.heads?.length) throw new Unreadable("it holds no heads");
  if (!record.heads.every(({ layer, head }) => Number.isInteger(layer) && Number.isInteger(head)))
    throw new Unreadable("one of its heads has no layer and number");
  return { ...nothing, record: { ...record, table: tableOf(record) }, detail, roles: rolesOfHeads(record) };
}
