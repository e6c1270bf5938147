// A saved record as what this app shows: attention on a text, or numbers about heads.
import { Unreadable, arrayOfNpy, jsonOf, membersOf } from "./archive.js";
import { descriptionsOf } from "./catalog.js";
import { manifest } from "./data.js";
import { need, partsOfName, textsOfRecord } from "./recordtexts.js";

const NEAREST = 12;

/** A record as it was saved: what describes it, and its arrays by name. */
async function contentOf(bytes) {
  const members = membersOf(bytes);
  const array = async (member) => (members.has(member) ? arrayOfNpy(await members.get(member)(), member) : null);
  const { data } = await array("record");
  return { record: jsonOf(new TextDecoder().decode(data)), array };
}

// Numbers about heads ---------------------------------------------------------------------------------------------

const noRoles = { roles: [] };

async function headsOfRelations({ record, array }) {
  const relations = need(record.relations, "relations");
  const field = async (name) => need(await array(name), name);
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

/** The columns of the table of heads, in the form and order in which Python writes them into a page; see `table_of`. */
function tableOf(record) {
  const { heads, positions, options = {} } = record;
  const table = [];
  const add = (name, estimates, facts = manifest.saved.columns[name]) => {
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
  const { marks, colors } = manifest.saved;
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

const READERS = {
  "attnscope.heads": async ({ record }) => record,
  "attnscope.ablate": async ({ record }) => ({ ...record, heads: record.heads.map((head) => ({ ...noRoles, ...head })) }),
  "attnscope.relations": headsOfRelations,
  "attnscope.compare": headsOfComparison,
};

/** What a saved record holds: attention on texts, or a record of heads. */
export async function readRecord(name, bytes) {
  const content = await contentOf(bytes);
  const texts = await textsOfRecord(name, content);
  if (texts) return { texts, roles: null, record: null };
  const record = await READERS[content.record.schema.split("/")[0]](content);
  if (!record.heads?.length) throw new Unreadable("it holds no heads");
  return { texts: [], record: { ...record, table: tableOf(record) }, roles: rolesOfHeads(record) };
}
