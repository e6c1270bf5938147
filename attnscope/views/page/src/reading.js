// A saved record as what this app shows: attention on a text, or numbers about heads.
import { Unreadable, arrayOfNpy, jsonOf, membersOf } from "./archive.js";
import { Example, descriptionsOf } from "./catalog.js";
import { manifest } from "./data.js";
import { need, partsOfName, textsOfRecord } from "./recordtexts.js";

const NEAREST = 12;

function flat(value) {
  const shape = [];
  for (let at = value; Array.isArray(at); at = at[0]) shape.push(at.length);
  const data = value.flat(Infinity);
  return { shape, data: typeof data[0] === "string" ? data : Float64Array.from(data, (number) => (number === null ? NaN : Number(number))) };
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

// Numbers about heads ---------------------------------------------------------------------------------------------

const noRoles = { roles: [] };

async function headsOfRelations({ record, array }) {
  const relations = need(record.relations, "relations");
  const field = async (name) => (await array(name)) || flat(relations.map((relation) => need(relation[name], name)));
  const [accuracy, low, high, isExpressed] = await Promise.all(["accuracy", "low", "high", "found"].map(field));
  const [, nLayers, nHeads] = accuracy.shape;
  const names = relations.map(({ name }) => name.replace(/[:\s]/g, "_"));
  const factsOf = ({ name, n_scored, baseline, rule, why_no_verdict }) => {
    const scored = `${n_scored} links scored${why_no_verdict ? `; no verdict: ${why_no_verdict}` : ""}`;
    return {
      label: name.replaceAll("_", " "),
      beside: ` \u00b7 n ${n_scored} \u00b7 ${Number.isFinite(baseline) ? baseline.toFixed(2) : "\u2013"}`,
      unsettled: !!why_no_verdict,
      what: `accuracy of ${name}; baseline: ${rule || "none"}; ${scored}`,
      unit: "share",
      range: [0, 1],
    };
  };
  const measures = Object.fromEntries(relations.map((relation, at) => [names[at], factsOf(relation)]));
  const heads = Array.from({ length: nLayers * nHeads }, (_, head) => {
    const at = (relation) => relation * nLayers * nHeads + head;
    const estimate = (number) => ({
      value: accuracy.data[at(number)],
      low: low.data[at(number)],
      high: high.data[at(number)],
      uniform: relations[number].baseline,
    });
    const expressed = relations.filter((_, number) => isExpressed.data[at(number)]).map(({ name }) => name);
    return {
      kind: record.kind || "encoder", layer: Math.floor(head / nHeads), head: head % nHeads, ...noRoles,
      measures: Object.fromEntries(names.map((name, number) => [name, estimate(number)])),
      words: expressed.length ? `expresses ${expressed.join(", ")}` : "",
    };
  });
  const quantity = "accuracy; after each name its n and its baseline; grey: too few for a verdict";
  return { ...record, grid: "measures", rows: "relation", quantity, even: "baseline", options: { ...record.options, measures }, heads };
}

function headOfName(name, usualKind) {
  const [, kind, layer, head] = partsOfName(name);
  return { kind: kind || usualKind, layer: Number(layer), head: Number(head), ...noRoles };
}

/** Numbered distances without the head's own and the unknown ones, the nearest first. */
function nearestFirst(distances, self) {
  const others = Array.from(distances, (distance, at) => [at, distance]).filter(([at]) => at !== self);
  return others.filter(([, distance]) => Number.isFinite(distance)).sort((a, b) => a[1] - b[1]);
}

async function headsOfComparison({ record, array }) {
  const [table] = record.tables || [];
  const names = need(record.heads, "heads");
  if (!table || !partsOfName(names[0])[0]) throw new Unreadable("this comparison has no table of heads that this page could show; `attnscope show` draws it");
  const mean = need(await array(`${table.name}.mean`), `${table.name}.mean`);
  const [low, high] = [await array(`${table.name}.low`), await array(`${table.name}.high`)];
  const positions = await array(`${table.name}.places`);
  const [rows, columns] = mean.shape;
  const isSelf = !record.other_heads;
  const others = record.other_heads || names;
  const root = (squares, a, b) => (squares ? Math.sqrt(Math.max(0, squares.data[a * columns + b])) : NaN);
  const estimate = (a, b) => ({ value: root(mean, a, b), low: root(low, a, b), high: root(high, a, b) });
  const where = isSelf ? "" : `in ${record.other_run?.model || "the other"} `;
  const heads = names.slice(0, rows).map((name, at) => {
    const near = nearestFirst(others.map((_, other) => root(mean, at, other)), isSelf ? at : -1);
    const [nearest] = near;
    const total = near.reduce((sum, [, distance]) => sum + distance, 0);
    return {
      ...headOfName(name, record.kind || "encoder"),
      measures: {
        nearest_distance: nearest ? estimate(at, nearest[0]) : { value: NaN },
        mean_distance: { value: total / (near.length || 1) },
        ...(!isSelf && { same_number_distance: estimate(at, others.indexOf(name)) }),
      },
      near: isSelf ? near.slice(0, NEAREST) : [],
      words: nearest ? `nearest ${where}is ${others[nearest[0]]}, ${nearest[1].toFixed(3)} away` : "",
    };
  });
  const distance = `${table.measure} distance`;
  const measures = {
    nearest_distance: { what: `${distance} to the nearest head` },
    mean_distance: { what: `mean ${distance} to all others` },
    same_number_distance: { what: `${distance} to the head of the same number in the other model` },
  };
  const { run, corpus = {} } = record;
  return { grid: "layers", rows: "distance", quantity: "distance", run, corpus, options: { measures }, heads, positions: linesOf(positions) };
}

/** The rows of an array; none where there is no array. */
const linesOf = (table) => table && Array.from({ length: table.shape[0] }, (_, at) => lineOf(table, at));
const lineOf = ({ shape, data }, at) => Array.from(data.subarray(at * shape[1], (at + 1) * shape[1]));

async function atlasOf({ record, array }) {
  const names = ["positions", "deciles", "profiles", "even_profiles", "distances", "places", "special", "starts", "keys", "codes"];
  const [positions, deciles, profiles, even, distances, places, special, starts, keys, codes] = await Promise.all(names.map(array));
  const shown = {
    ...record,
    positions: linesOf(positions),
    deciles: linesOf(deciles),
    tokens: (record.tables || []).map((rows) => [...new Set(rows.flatMap((row) => row.tokens))]),
  };
  if (!codes) return [shown, null];
  const examplesOf = record.heads.map(() => []); // of each head [facts, the number of its first token]
  let token = 0;
  for (const facts of record.facts) {
    examplesOf[facts.head].push([facts, token]);
    token += facts.labels.length;
  }
  if (token !== places.data.length || starts.data.at(-1) !== codes.data.length) throw new Unreadable("the attention of its examples is cut off");
  const exampleOf = ([facts, first]) => {
    const after = first + facts.labels.length;
    const ends = [first ? starts.data[first - 1] : 0, ...starts.data.subarray(first, after)];
    const counts = ends.slice(1).map((end, at) => end - ends[at]);
    const flags = Array.from(special.data.subarray(first, after)).flatMap((flag, at) => (flag ? [at] : []));
    const [myKeys, myCodes] = [keys, codes].map(({ data }) => data.subarray(ends[0], ends.at(-1)));
    return new Example(facts, Array.from(places.data.subarray(first, after)), flags, counts, myKeys, myCodes);
  };
  const detail = async (at) => ({
    tables: record.tables[at],
    profile: lineOf(profiles, at),
    even: lineOf(even, at),
    near: nearestFirst(lineOf(distances, at), at).slice(0, NEAREST),
    examples: examplesOf[at].map(exampleOf),
  });
  return [shown, detail];
}

/** The columns of the table of heads, in the form and order in which Python writes them into a page; see `table_of`. */
function tableOf(record) {
  const { heads, positions, deciles, rank, options = {} } = record;
  const table = [];
  const add = (name, estimates, facts = manifest.viewer.columns[name]) => {
    if (!estimates.some(Boolean)) return;
    const parts = ["value", "low", "high", "uniform"].map((part) => estimates.map((estimate) => estimate?.[part] ?? NaN));
    const [values, low, high, uniform] = parts;
    table.push({ name, what: "", unit: "", ...facts, label: facts.label || name.replaceAll("_", " "), values, low, high, uniform });
  };
  const valued = (values) => values.map((value) => value !== undefined && { value });
  const partOf = (part, some) => valued(some.map((each) => each?.[part]));
  const explained = (some) => some.map((each) => each && { ...each, value: each.explained });
  const namesOf = (what) => [...new Set(heads.flatMap((head) => Object.keys(head[what] || {})))];
  const mine = descriptionsOf(record);
  const active = mine.map((description) => description?.active);
  add("explained", explained(mine));
  add("nats", partOf("nats", mine));
  add("active_explained", explained(active));
  add("active_share", partOf("share", active));
  add("active_nats", partOf("nats", active));
  for (const [name, end, text] of deciles ? [["score", 5, "median text"], ["score_p90", 9, "90th percentile"]] : [])
    add(name, partOf(end, deciles), { label: `${rank} (${text})`, what: options.rank });
  add("resting_share", partOf("resting_share", heads));
  const measures = namesOf("measures");
  const roles = new Set([...Object.keys(options.roles || {}), ...heads.flatMap((head) => head.roles.map(({ name }) => name))]);
  for (const role of ["unclassified", ...roles]) {
    const has = (head) => (role === "unclassified" ? !head.roles.length : head.roles.some(({ name }) => name === role));
    const name = measures.includes(role) ? `is_${role}` : role;
    const isName = /^[\p{L}_][\p{L}\p{N}_]*$/u.test(role);
    if (isName) add(name, valued(heads.map((head) => Number(has(head)))), { kind: "role", hidden: true });
  }
  for (const name of measures) {
    const whole = options.measures?.[name.replace(/_active$/, "")];
    const { of: source, ...facts } = options.measures?.[name] || (whole && { unit: whole.unit, what: `${whole.what} (excluding sinks)` }) || {};
    add(name, heads.map((head) => head.measures?.[name]), { kind: "measure", source, ...facts });
  }
  for (const name of namesOf("effects")) {
    const facts = { kind: "effect", what: "what changes without the head", ...options.quantities?.[name] };
    add(name, heads.map((head) => head.effects?.[name]), facts);
  }
  const isPlaced = positions?.some((position) => position.some(Number.isFinite));
  for (const [at, axis] of isPlaced ? ["x", "y"].entries() : [])
    add(`map_${axis}`, partOf(at, positions), { what: "heads that attend alike stand near each other" });
  return table;
}

/** The marks of the roles that heads have: the known ones, then colours that are left. */
function rolesOfHeads({ heads, options }) {
  const { marks, colors } = manifest.viewer;
  const names = new Set(heads.flatMap(({ roles }) => roles.map(({ name }) => name)));
  const others = [...names].filter((name) => !marks[name]).sort();
  const otherMark = (name) => [name[0]?.toUpperCase() || "?", colors[others.indexOf(name) % colors.length]];
  const order = [...Object.keys(marks).filter((name) => names.has(name)), ...others];
  const shownMarks = order.map((name) => {
    const [glyph, color] = marks[name] || otherMark(name);
    return [name, { glyph, color, label: name.replaceAll("_", " "), what: options?.roles?.[name]?.what || "" }];
  });
  const byKind = {};
  const roleOf = ({ name, value, low, high, tentative }) => ({ name, value: value ?? NaN, low, high, tentative });
  for (const { kind, layer, head, roles } of heads) (byKind[kind] ||= {})[`${layer}.${head}`] = roles.map(roleOf);
  return { marks: Object.fromEntries(shownMarks), heads: byKind };
}

const withoutDetail = async (record) => [record, null];
const READERS = {
  "attnscope.heads": ({ record }) => withoutDetail(record),
  "attnscope.ablate": ({ record }) => withoutDetail({ ...record, heads: record.heads.map((head) => ({ ...noRoles, ...head })) }),
  "attnscope.relations": (content) => headsOfRelations(content).then(withoutDetail),
  "attnscope.compare": (content) => headsOfComparison(content).then(withoutDetail),
  "attnscope.atlas": atlasOf,
};

/** What a saved record holds: attention on texts, or a record of heads with what gives the card of each. */
export async function readRecord(name, bytes) {
  const content = await contentOf(name, bytes);
  const texts = await textsOfRecord(name, content);
  if (texts) return { texts, roles: null, record: null, detail: null };
  const { schema } = content.record;
  const read = READERS[schema.split("/")[0]];
  if (!read) throw new Unreadable(`it is of kind ${schema}, which this page does not show; \`attnscope show\` does`);
  const [record, detail] = await read(content);
  if (!record.heads?.length) throw new Unreadable("it holds no heads");
  if (!record.heads.every(({ layer, head }) => Number.isInteger(layer) && Number.isInteger(head)))
    throw new Unreadable("one of its heads has no layer and number");
  return { texts: [], record: { ...record, table: tableOf(record) }, detail, roles: rolesOfHeads(record) };
}
