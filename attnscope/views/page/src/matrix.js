// Matrix: one head's map, read cell by cell.
import { digits, matrix, nameOf, rankOf, rolesOf } from "./data.js";
import { el, fill, say } from "./dom.js";
import { Heat, Legend, addressOfView, drawHeat, drawScale, endOf, seenOf, viewAt } from "./heat.js";
import { roleChip, topOf } from "./heads.js";
import { keptOf, tellKept } from "./kept.js";
import { axesOf, mapOf, state, update } from "./state.js";
import { whyOf } from "./why.js";

/** The numbers and words of one cell. */
export function readingOf(shown, row, column) {
  const value = shown.values[row * shown.columns.length + column];
  const least = !value && keptOf()?.least[shown.rows.groups[row].first];
  return {
    query: shown.rows.labels[row],
    key: shown.columns.labels[column],
    weight: least ? `at most ${least.toFixed(2)}, not kept` : digits(value),
    rank: rankOf(shown, row, column),
    of: shown.columns.length,
  };
}

/** A cell's place in the state: the tokens that the row and the column begin with. */
export function tokensAt(shown, row, column) {
  return { q: row >= 0 ? shown.rows.groups[row].first : -1, k: column >= 0 ? shown.columns.groups[column].first : -1 };
}

/** Where the tokens of the state stand in what is shown. */
export function cursorOf(shown) {
  const row = state.q >= 0 ? shown.rows.place[state.q] : -1;
  const column = state.k >= 0 ? shown.columns.place[state.k] : -1;
  return row < 0 && column < 0 ? null : { row, column };
}

/** The next token in the state after steps from here. */
export function stepped(shown, rows, columns) {
  const at = cursorOf(shown) || { row: 0, column: 0 };
  const held = (value, most) => Math.max(0, Math.min(most - 1, value));
  return tokensAt(
    shown,
    held(Math.max(at.row, 0) + rows, shown.rows.length),
    held(Math.max(at.column, 0) + columns, shown.columns.length),
  );
}

/** Query, key, weight and rank in words. */
export function reading(shown, cursor) {
  const { row, column } = cursor;
  if (row >= 0 && column >= 0) {
    const cell = readingOf(shown, row, column);
    return [
      el(
        "span",
        { class: "pair" },
        el("q", { class: "token", title: `token ${shown.rows.groups[row].first}` }, cell.query),
        " attends to ",
        el("q", { class: "token", title: `token ${shown.columns.groups[column].first}` }, cell.key),
      ),
      el("b", { class: "value" }, cell.weight),
      el("span", { class: "faint" }, `rank ${cell.rank} of ${cell.of}`),
    ];
  }
  const axis = row >= 0 ? shown.rows : shown.columns;
  return [
    el("span", {}, row >= 0 ? "query " : "key ", el("q", { class: "token" }, axis.labels[Math.max(row, column)])),
  ];
}

export function spoken(shown, { row, column }) {
  if (row < 0 || column < 0) return "";
  const cell = readingOf(shown, row, column);
  return `${cell.query} to ${cell.key}: ${cell.weight}, rank ${cell.rank} of ${cell.of}`;
}

/** The head that is shown, in words: its name and roles. */
export function titleOf(spec) {
  return [el("b", {}, nameOf(spec)), rolesOf(mapOf().kind, spec).map((role) => roleChip(role))];
}

/** A list of tokens with their weights as bars, up to 1. */
export function strongest(title, entries, high = 1) {
  const items = entries.map(({ label, weight }) => {
    const bar = el("i", {});
    bar.style.width = `${Math.round(Math.min(1, weight / high) * 100)}%`;
    return el(
      "li",
      {},
      el("span", { class: "name" }, label),
      el("span", { class: "bar" }, bar),
      el("b", {}, digits(weight)),
    );
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
        update(stepped(this.shown, rows, columns));
        const cursor = cursorOf(this.shown);
        this.heat.reveal(cursor.row, cursor.column);
        say(spoken(this.shown, cursor));
      },
      zoom: (view) => update({ z: addressOfView(view) }),
    });
    this.title = el("div", { class: "title" });
    this.read = el("div", { class: "read", id: "readout" });
    const zooms = el(
      "div",
      { class: "buttons", role: "group", "aria-label": "Zoom" },
      el(
        "button",
        { type: "button", title: "zoom out (−)", "aria-label": "Zoom out", onclick: () => this.heat.zoom(1 / 1.6) },
        "−",
      ),
      el("button", { type: "button", title: "all of it (0)", onclick: () => this.heat.move(null) }, "fit"),
      el(
        "button",
        { type: "button", title: "zoom in (+)", "aria-label": "Zoom in", onclick: () => this.heat.zoom(1.6) },
        "+",
      ),
    );
    this.side = el("div", { class: "side", tabindex: "0", role: "region", "aria-label": "largest weights" });
    this.legend = new Legend();
    this.root = el(
      "div",
      { class: "view matrix" },
      el("div", { class: "toolbar" }, this.title, this.read, zooms),
      this.legend.root,
      (this.kept = el("div", {})),
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
    const asked = (this.asked = {});
    const shown = await matrix(state.t, state.m, state.h, state.hide, state.words);
    const high = await topOf(shown);
    if (this.asked !== asked) return;
    this.shown = shown;
    this.heat.view = viewAt(state.z);
    const within = this.over && this.over.row < shown.rows.length && this.over.column < shown.columns.length;
    this.heat.cursor = (within && this.over) || cursorOf(shown);
    this.look = { low: 0, high, table: this.app.palette.one, colours: this.app.palette };
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
    fill(
      this.read,
      cursor ? reading(this.shown, cursor) : el("span", { class: "faint" }, "point at a cell, or use the arrow keys"),
    );
    fill(this.kept, tellKept(cursor?.row >= 0 ? this.shown.rows.groups[cursor.row].first : -1));
    this.list(cursor);
  }

  /** The strongest weights of the row and of the column. */
  list(cursor) {
    const { rows, columns, values } = this.shown;
    const n = columns.length;
    const ranked = (axis, weightAt) =>
      axis.labels
        .map((label, at) => ({ label, weight: weightAt(at) }))
        .sort((a, b) => b.weight - a.weight)
        .slice(0, 8)
        .filter(({ weight }) => weight >= 0.0005);
    const { row = -1, column = -1 } = cursor || {};
    fill(
      this.side,
      row < 0
        ? null
        : strongest(
            [el("q", { class: "token" }, rows.labels[row]), " attends to"],
            ranked(columns, (at) => values[row * n + at]),
          ),
      column < 0
        ? null
        : strongest(
            [el("q", { class: "token" }, columns.labels[column]), " is attended by"],
            ranked(rows, (at) => values[at * n + column]),
          ),
      this.why(cursorOf(this.shown)),
    );
  }

  /** Why the chosen cell's query attends to its key; of words of several tokens nothing is known. */
  why(chosen) {
    const { rows, columns } = this.shown;
    const single = rows.groups[chosen?.row]?.size === 1 && columns.groups[chosen?.column]?.size === 1;
    return single ? whyOf(state.q, state.k) : null;
  }

  async figure() {
    const { place, width, height } = seenOf(this.heat);
    const { look, shown } = this;
    return {
      width: Math.max(width, 260),
      height: height + 62,
      draw: (pen) => {
        pen.text(`${nameOf(state.h)} · rows are queries, columns keys`, place.left, 12, {
          size: 12,
          weight: 600,
          colour: look.colours.ink,
        });
        drawHeat(pen, shown, { ...place, top: place.top + 22 }, look, 4);
        drawScale(pen, look, place.left, height + 28, Math.min(180, place.width), ["0", endOf(look.high)]);
      },
    };
  }

  async rows() {
    const { rows, columns } = axesOf();
    const { values } = this.shown;
    return [
      ["query \\ key", ...columns.labels],
      ...rows.labels.map((label, row) => [
        label,
        ...Array.from(values.subarray(row * columns.length, (row + 1) * columns.length), (value) =>
          this.look.missing?.(value) ? "" : value.toFixed(4),
        ),
      ]),
    ];
  }
}
