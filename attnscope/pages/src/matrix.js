// Matrix: one head's map, read cell by cell.
import { digits, manifest, nameOf, rankOf, rolesOf } from "./data.js";
import { button, clamp, el, faint, fill, pairOf, readout, say, tokenOf, toolbar } from "./dom.js";
import { Heat, Legend, addressOfView, endOf, figureOfHeat, viewAt } from "./heat.js";
import { loadMap, roleChip } from "./heads.js";
import { axesOf, mapOf, state, update } from "./state.js";
import { whyOf } from "./why.js";

const LEAST_LISTED = 0.0005;

/** What an example of an atlas lacks: of each query the share that is missing, and the least weight that is there. */
const keptOf = () => manifest.texts[state.t]?.kept || null;

/** What is missing of a query's row, else of rows on average, in a line; null where nothing is. */
export function missingLine(query = -1) {
  const kept = keptOf();
  if (!kept) return null;
  const mean = kept.missing.reduce((sum, share) => sum + share, 0) / (kept.missing.length || 1);
  const share = query < 0 ? mean : kept.missing[query];
  return el(
    "p",
    { class: "faint kept" },
    "An atlas keeps the largest weights of a row, up to 95% or 16 keys; a stroke: not kept. Not kept, or on tokens that are left out: ",
    el("b", {}, share < 0.005 ? "hardly any" : `${(100 * share).toFixed(0)}%`),
    query < 0 ? " of a row, on average" : ` of the row of \u201c${manifest.texts[state.t].maps[0].queries.labels[query]}\u201d`,
  );
}

function weightText(shown, row, column) {
  const value = shown.values[row * shown.columns.length + column];
  const least = !value && keptOf()?.least[shown.rows.groups[row].first];
  return least ? `at most ${least.toFixed(2)}, not kept` : digits(value);
}

const rankText = (shown, row, column) => `rank ${rankOf(shown, row, column)} of ${shown.columns.length}`;

/** A cell's place in the state: the tokens that the row and the column begin with. */
export function tokensAt({ rows, columns }, row, column) {
  return { q: row >= 0 ? rows.groups[row].first : -1, k: column >= 0 ? columns.groups[column].first : -1 };
}

/** Where the tokens of the state stand in what is shown. */
export function cursorOf({ rows, columns }) {
  const row = state.q >= 0 ? rows.place[state.q] : -1;
  const column = state.k >= 0 ? columns.place[state.k] : -1;
  return row < 0 && column < 0 ? null : { row, column };
}

/** The tokens in the state after steps from here. */
export function stepFrom(shown, rows, columns) {
  const at = cursorOf(shown) || { row: 0, column: 0 };
  const [row, column] = [Math.max(at.row, 0) + rows, Math.max(at.column, 0) + columns];
  return tokensAt(shown, clamp(row, shown.rows.length - 1), clamp(column, shown.columns.length - 1));
}

function readingOf(shown, { row, column }) {
  const { rows, columns } = shown;
  const token = (axis, at) => tokenOf(axis.labels[at], { title: `token ${axis.groups[at].first}` });
  if (row >= 0 && column >= 0)
    return [
      pairOf(token(rows, row), token(columns, column)),
      el("b", { class: "value" }, weightText(shown, row, column)),
      faint(rankText(shown, row, column)),
    ];
  return [el("span", {}, row >= 0 ? "query " : "key ", tokenOf(row >= 0 ? rows.labels[row] : columns.labels[column]))];
}

/** The head that is shown, in words: its name and roles. */
export const titleOf = (spec) => [el("b", {}, nameOf(spec)), rolesOf(mapOf().kind, spec).map((role) => roleChip(role))];

/** A list of tokens with their weights as bars, up to `high`: the largest first, as many as `most`. */
export function strongest(title, labels, weights, { most = 8, least = LEAST_LISTED, high = 1 } = {}) {
  const order = Array.from(labels.keys()).filter((at) => weights[at] >= least);
  order.sort((a, b) => weights[b] - weights[a]);
  const items = order.slice(0, most).map((at) => {
    const bar = el("i", {});
    bar.style.width = `${Math.round(Math.min(1, weights[at] / high) * 100)}%`;
    const name = el("span", { class: "name" }, labels[at]);
    return el("li", {}, name, el("span", { class: "bar" }, bar), el("b", {}, digits(weights[at])));
  });
  return el("section", {}, el("p", { class: "faint" }, title), el("ol", { class: "strongest" }, items));
}

export class MatrixView {
  constructor(app) {
    this.app = app;
    this.heat = new Heat("Attention map. Arrow keys move, plus and minus zoom.", {
      hover: (cell) => {
        this.over = cell;
        this.tell(cell || cursorOf(this.shown));
      },
      pick: (row, column) => update(tokensAt(this.shown, row, column)),
      step: (rows, columns) => {
        update(stepFrom(this.shown, rows, columns));
        const { row, column } = cursorOf(this.shown);
        this.heat.reveal(row, column);
        if (row < 0 || column < 0) return say("");
        const [query, key] = [this.shown.rows.labels[row], this.shown.columns.labels[column]];
        say(`${query} to ${key}: ${weightText(this.shown, row, column)}, ${rankText(this.shown, row, column)}`);
      },
      zoom: (view) => update({ z: addressOfView(view) }),
    });
    this.title = el("div", { class: "title" });
    this.read = readout();
    const zooms = el(
      "div",
      { class: "buttons", role: "group", "aria-label": "Zoom" },
      button("−", () => this.heat.zoom(1 / 1.6), { title: "zoom out (−)", "aria-label": "Zoom out" }),
      button("fit", () => this.heat.move(null), { title: "all of it (0)" }),
      button("+", () => this.heat.zoom(1.6), { title: "zoom in (+)", "aria-label": "Zoom in" }),
    );
    this.side = el("div", { class: "side", tabindex: "0", role: "region", "aria-label": "largest weights" });
    this.legend = new Legend();
    this.missing = el("div", {});
    this.root = el(
      "div",
      { class: "view matrix" },
      toolbar(this.title, this.read, zooms),
      this.legend.root,
      this.missing,
      el("div", { class: "beside" }, this.heat.root, this.side),
    );
  }

  focus() {
    this.heat.focus();
  }

  name() {
    return `matrix ${nameOf(state.h)}`;
  }

  async show() {
    const map = await loadMap(this);
    if (!map) return;
    const { shown, high } = map;
    this.shown = shown;
    this.heat.view = viewAt(state.z);
    const isWithin = this.over && this.over.row < shown.rows.length && this.over.column < shown.columns.length;
    this.heat.cursor = (isWithin && this.over) || cursorOf(shown);
    this.look = { low: 0, high, table: this.app.palette.sequential, colours: this.app.palette };
    if (keptOf()) this.look.missing = (value) => !value;
    this.heat.set(shown, this.look);
    this.legend.show(this.look, endOf(high), shown.largest);
    fill(this.title, titleOf(state.h));
    this.tell(this.heat.cursor);
    this.root.dataset.shown = [state.t, state.m, state.h].join();
  }

  tell(cursor) {
    if (!this.shown) return;
    this.heat.point(cursor);
    fill(this.read, cursor ? readingOf(this.shown, cursor) : faint("point at a cell, or use the arrow keys"));
    fill(this.missing, missingLine(cursor?.row >= 0 ? this.shown.rows.groups[cursor.row].first : -1));
    this.list(cursor);
  }

  /** The strongest weights of the row and of the column. */
  list(cursor) {
    const { rows, columns, values } = this.shown;
    const n = columns.length;
    const { row = -1, column = -1 } = cursor || {};
    const [ofRow, ofColumn] = [(_, at) => values[row * n + at], (_, at) => values[at * n + column]];
    fill(
      this.side,
      row < 0 ? null : strongest([tokenOf(rows.labels[row]), " attends to"], columns.labels, columns.labels.map(ofRow)),
      column < 0
        ? null
        : strongest([tokenOf(columns.labels[column]), " is attended by"], rows.labels, rows.labels.map(ofColumn)),
      this.why(cursorOf(this.shown)),
    );
  }

  /** Why the chosen cell's query attends to its key; of words of several tokens nothing is known. */
  why(chosen) {
    const { rows, columns } = this.shown;
    const isSingle = rows.groups[chosen?.row]?.size === 1 && columns.groups[chosen?.column]?.size === 1;
    return isSingle ? whyOf(state.q, state.k) : null;
  }

  async figure() {
    return figureOfHeat(this.heat, `${nameOf(state.h)} · rows are queries, columns keys`, ["0", endOf(this.look.high)]);
  }

  async rows() {
    const { rows, columns } = axesOf();
    const { values } = this.shown;
    const cell = (value) => (this.look.missing?.(value) ? "" : value.toFixed(4));
    const line = (row) => Array.from(values.subarray(row * columns.length, (row + 1) * columns.length), cell);
    return [["query \\ key", ...columns.labels], ...rows.labels.map((label, row) => [label, ...line(row)])];
  }
}
