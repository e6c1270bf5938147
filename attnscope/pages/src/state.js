// What is shown, all of it: one plain object that the address after # holds.
import { manifest, has, canHide, canMerge, axisOf } from "./data.js";

const DEFAULTS = {
  v: "", // the view; empty = the first
  t: 0, // the text
  m: 0, // the map of the text: encoder, decoder or cross
  h: "", // the head, such as 3.1, or mean, mean3, full3
  q: -1, // the query token that is looked at; -1 = none
  k: -1, // the key token
  p: "", // Photo: the patch, as picture,row,column
  hide: 0, // special tokens hidden
  words: 0, // word pieces merged
  scale: "fixed", // what the darkest colour means: fixed, head, figure
  hs: "", // Links: the heads, such as 3.1,5.11
  min: 0.1, // Links: the least weight that is drawn
  side: "q", // Links: whose links; Text: "q" what the token attends to, "k" what attends to it
  b: "mean", // Compare: what with: a spec of a head, or text1
  z: "", // Matrix, Compare: zoom, as cell,left,top
  y: 0, // Links: the first token in sight
  sort: "layer", // Grid
  role: "", // Grid: only heads of this role
  size: 0, // Grid: how wide a cell is, in pixels; 0 = as the window has room
  head: "", // Atlas, Head: the head, such as L3H1 or cross L3H1
  ax: "", // Atlas: what goes from left to right
  ay: "", // Atlas: what goes up
  ac: "", // Atlas: what the colour is
  f: "", // Atlas: the filter
  br: "", // Atlas: the brush, as left,right,low,high in the axes' own units
  o: "", // Atlas: what the list is sorted by; - before it = the largest first
  tab: "top", // Head: which examples
  ex: -1, // the example of the head whose token is looked at, or that is open as a map; -1 = none
  d: "", // light or dark; empty = as the system
};

/** The views that the page's parts bring: by name, what each is called and its class. */
export const registered = {};

export function register(name, title, View) {
  registered[name] = { title, View };
}

/** The views there are, in the order of the tabs. */
export function viewsOf() {
  const { heads, texts } = manifest;
  const ofMaps = hasText() ? ["grid", "matrix", "links", "text", "compare"] : heads?.cards.length ? ["matrix", "links"] : [];
  return [
    ...(heads ? ["atlas", "head"] : []),
    ...(registered.photo && texts.some(({ photos }) => photos) ? ["photo"] : []),
    ...ofMaps,
  ];
}

/** Whether the page has a text that is no example of an atlas. */
export const hasText = () => manifest.texts.some(({ example }) => example === undefined);

export function ofAtlas(s = state) {
  return ["atlas", "head"].includes(s.v);
}

/** Whether the text that is shown is an example of the atlas. */
export function ofExample() {
  return !ofAtlas() && manifest.texts[state.t]?.example !== undefined;
}

/** What an atlas does with an address before it is shown: brings its names in order, and unpacks the example. */
export const atlasHooks = { mend() {}, async prepare() {}, async example() {}, about() {} };

export const state = { ...DEFAULTS };

const listeners = new Set();
let waiting = false;
let written = "";

export function mapOf() {
  return manifest.texts[state.t].maps[state.m];
}

export function axesOf() {
  const { t, m } = state;
  const [hide, words] = [state.hide && canHide(t, m), state.words && canMerge(t, m)];
  return { rows: axisOf(t, m, "queries", hide, words), columns: axisOf(t, m, "keys", hide, words) };
}

/** Calls back after a change, at most once a frame. */
export function onChange(listener) {
  listeners.add(listener);
}

/** What Back goes back to: the view, and of a head's own view the head. */
function placeOf() {
  return state.v === "head" ? state.head : state.v;
}

/** Changes what is shown. Another view, or head, is another step of the browser's history, anything else the same one. */
export function update(patch) {
  const left = placeOf();
  const before = addressOf();
  Object.assign(state, patch);
  mend();
  if (placeOf() !== left) {
    writeAddress("replaceState", before);
    writeAddress("pushState");
  }
  schedule();
}

function schedule() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const listener of listeners) listener();
    clearTimeout(schedule.later);
    schedule.later = setTimeout(writeAddress, 150, "replaceState");
  });
}

/** Brings a state that means nothing (an old link, a hand-written one) back to what there is. */
function mend() {
  const whole = (value, low, high, fallback) => (Number.isInteger(value) && value >= low && value <= high ? value : fallback);
  const among = (name, values) => {
    if (!values.includes(state[name])) [state[name]] = values; // the first stands for what means nothing
  };
  const like = (name, pattern) => {
    if (!pattern.test(state[name])) state[name] = "";
  };
  among("v", viewsOf());
  among("d", ["", "light", "dark"]);
  atlasHooks.mend();
  if (!manifest.texts.length) return;
  state.t = whole(state.t, 0, manifest.texts.length - 1, 0);
  state.m = whole(state.m, 0, manifest.texts[state.t].maps.length - 1, 0);
  const map = mapOf();
  const isThere = (spec) => has(state.t, state.m, spec);
  if (!isThere(state.h) && state.v === "photo") state.h = "mean";
  if (!isThere(state.h)) state.h = map.heads.length ? map.heads[0].join(".") : "mean";
  state.q = whole(state.q, 0, map.queries.labels.length - 1, -1);
  state.k = whole(state.k, 0, (map.keys || map.queries).labels.length - 1, -1);
  like("p", /^\d+,\d+,\d+$/);
  like("z", /^(-?[\d.]+,){2}-?[\d.]+$/);
  state.hide = state.hide ? 1 : 0;
  state.words = state.words ? 1 : 0;
  if (!(state.min >= 0 && state.min <= 1)) state.min = DEFAULTS.min;
  among("scale", ["fixed", "head", "figure"]);
  among("side", ["q", "k"]);
  among("sort", ["layer", "role", "focus"]);
  if (!manifest.roles?.marks[state.role]) state.role = "";
  state.size = whole(state.size, 12, 400, 0);
  state.y = whole(state.y, 0, 1e6, 0);
  const other = /^text(\d+)$/.exec(state.b);
  if (other ? !(Number(other[1]) < manifest.texts.length) : !isThere(state.b)) state.b = "mean";
  state.hs = state.hs.split(",").filter((spec) => spec && isThere(spec)).join(",");
}

/** The address that shows this again; what is as it is at first is left out. A head by itself means its own view. */
export function addressOf(s = state) {
  const address = new URLSearchParams();
  const atFirst = { ...DEFAULTS, v: s.head ? "" : viewsOf()[0] };
  for (const [name, first] of Object.entries(atFirst)) if (s[name] !== first) address.set(name, String(s[name]));
  return "#" + address.toString().replaceAll("%2C", ",");
}

function writeAddress(how, address = addressOf()) {
  clearTimeout(schedule.later);
  if (location.hash !== written) return; // another one was set, and is about to be read
  if (address === (location.hash || "#")) return;
  try {
    history[how](null, "", address);
  } catch {
    // Within a sandboxed frame of a notebook the address is not ours to set.
  }
  written = location.hash;
}

function readAddress(text) {
  const address = new URLSearchParams(text);
  for (const [name, first] of Object.entries(DEFAULTS)) {
    const value = address.get(name);
    state[name] = value === null ? first : typeof first === "number" ? Number(value) : value;
  }
  if (address.has("v") || !state.head) return;
  // A head by itself: its card in an atlas, else its map.
  if (manifest.heads) state.v = "head";
  else Object.assign(state, { v: "matrix", h: state.head.replace(/^L(\d+)H(\d+)$/, "$1.$2"), head: "" });
}

/** Reads the address, or what the page was made to show at first. */
export async function begin() {
  written = location.hash;
  const address = location.hash.length > 1 ? location.hash.slice(1) : "";
  readAddress(address || new URLSearchParams(manifest.start).toString());
  await atlasHooks.prepare();
  mend();
}

/** Follows the address as it changes, and keeps it as the page is left. */
export function followAddress() {
  addEventListener("hashchange", async () => {
    if (location.hash === written) return;
    clearTimeout(schedule.later);
    written = location.hash;
    readAddress(location.hash.slice(1));
    await atlasHooks.prepare();
    mend();
    schedule();
  });
  addEventListener("pagehide", () => writeAddress("replaceState"));
}
