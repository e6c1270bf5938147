// Grid of heads: one number of all heads by layer and head, or all numbers at once, a row each, heads beside each other.
import { atHead, catalogs, headOf } from "./catalog.js";
import { clamp, el, faint, fill, isChoice, readout, say, segmented, select, toolbar } from "./dom.js";
import { Heat, Legend, figureOfHeat } from "./heat.js";
import { register, state, update } from "./state.js";
import { intervalText, shortNumber } from "./wording.js";

const NO_MEASURES = ["layer", "head", "map_x", "map_y"];

/** Labels as heatmaps have them along a side. */
function sideOf(labels, also = {}) {
  return { ...also, labels, length: labels.length, special: labels.map(() => false), written: labels.map(() => false) };
}

function measuresShown() {
  return [...catalogs.current.columns.values()].filter(({ name }) => !NO_MEASURES.includes(name));
}

function measureShown() {
  const all = measuresShown();
  return all.find(({ name }) => name === state.ac) || all[0];
}

class NumbersView {
  constructor(app) {
    this.app = app;
    const names = measuresShown().map(({ name, title }) => [name, title]);
    const rows = catalogs.current.record.rows || "measure";
    const shapes = [["layers", "layer \u00d7 head", "one number of all heads"], ["measures", `${rows} \u00d7 head`, "all numbers of all heads"]];
    this.shape = segmented("What stands in the grid", shapes, (g) => update({ g, z: "" }));
    this.which = select("Number", names, (ac) => update({ ac }));
    const orders = [["", "as in the model"], ...names.map(([name, title]) => [`-${name}`, `most ${title}`])];
    this.order = select("Order of heads", orders, (o) => update({ o }));
    this.read = readout();
    this.legend = new Legend("");
    this.heat = new Heat("Numbers of heads. Arrow keys move, Enter opens the head, plus and minus zoom.", {
      hover: (cell) => this.tell((this.over = cell)),
      pick: (row, column) => (column >= 0 && row >= 0 ? this.open(this.entry(row, column)) : row >= 0 && this.sort(row)),
      step: (rows, columns) => this.step(rows, columns),
      zoom: () => {},
    });
    this.heat.over.addEventListener("keydown", (event) => {
      const cursor = this.cursor();
      if (!isChoice(event) || !cursor) return;
      event.preventDefault();
      this.open(this.entry(cursor.row, cursor.column));
    });
    const bar = toolbar(this.shape, this.which, this.order, this.read);
    this.root = el("div", { class: "view numbers" }, bar, this.legend.root, this.heat.root);
  }

  focus() {
    this.heat.focus();
  }

  name() {
    return state.g === "measures" ? "numbers of heads" : `${measureShown().name} of heads`;
  }

  /** What stands where: numbers of heads by row and column; -1 = no head. */
  arrange() {
    const { heads } = catalogs.current;
    const measures = measuresShown();
    if (state.g === "measures") {
      const order = heads.map(({ at }) => at);
      const by = catalogs.current.columns.get(state.o.replace("-", ""));
      const value = (at) => (Number.isFinite(by.values[at]) ? by.values[at] : -Infinity);
      if (by) order.sort((a, b) => (state.o.startsWith("-") ? value(b) - value(a) : value(a) - value(b)));
      this.measureAt = (row) => measures[row];
      this.headAt = (_, column) => order[column];
      const names = measures.map(({ label }) => label);
      const labels = measures.map(({ label, beside = "" }) => label + beside);
      const pale = measures.map(({ unsettled }) => !!unsettled);
      return [sideOf(labels, { names, whole: true, pale }), sideOf(order.map((at) => heads[at].name))];
    }
    const rows = [...new Set(heads.map(({ name, layer }) => `${name.replace(/L\d+H\d+$/, "")}L${layer}`))];
    const columns = [...new Set(heads.map(({ head }) => head))].sort((a, b) => a - b);
    this.measureAt = () => measureShown();
    this.headAt = (row, column) => catalogs.current.byName.get(`${rows[row]}H${columns[column]}`) ?? -1;
    return [sideOf(rows), sideOf(columns.map((head) => `H${head}`))];
  }

  show() {
    const [rows, columns] = this.arrange();
    const values = new Float32Array(rows.length * columns.length).fill(NaN);
    let [low, high] = [0, 0];
    values.forEach((_, cell) => {
      const { measure, at } = this.entry(Math.floor(cell / columns.length), cell % columns.length);
      const value = at < 0 ? NaN : measure.values[at];
      values[cell] = value;
      if (value < low) low = value;
      if (value > high) high = value;
    });
    const colours = this.app.palette;
    const most = Math.max(high, -low) || 1;
    // Of numbers that go both ways the middle is 0.
    const ends = low < 0 ? { low: -most, table: colours.diverging } : { low: 0, table: colours.sequential };
    this.look = { ...ends, high: most, colours, missing: (value) => Number.isNaN(value) };
    this.shown = { rows, columns, values, largest: high };
    const ofMeasures = state.g === "measures";
    this.shape.show(ofMeasures ? "measures" : "layers");
    [this.which.hidden, this.order.hidden] = [ofMeasures, !ofMeasures];
    this.which.show(measureShown().name);
    this.order.show(state.o);
    fill(this.legend.unit, ofMeasures ? catalogs.current.record.quantity || "value" : measureShown().title);
    this.legend.show(this.look, shortNumber(most), undefined);
    this.heat.set(this.shown, this.look);
    this.tell(this.over || this.cursor());
    this.root.dataset.shown = [state.g, measureShown().name, state.o].join();
  }

  entry(row, column) {
    return { measure: this.measureAt(row), at: this.headAt(row, column) };
  }

  /** Where the head and the number of the state stand; null = no head is chosen. */
  cursor() {
    if (!state.head || !this.shown) return null;
    const { rows, columns } = this.shown;
    const [head, shown] = [headOf().at, measureShown()];
    for (let cell = 0; cell < rows.length * columns.length; cell++) {
      const [row, column] = [Math.floor(cell / columns.length), cell % columns.length];
      const { measure, at } = this.entry(row, column);
      if (at === head && measure === shown) return { row, column };
    }
    return null;
  }

  sort(row) {
    if (state.g !== "measures") return;
    const { name } = this.measureAt(row);
    update({ o: state.o === `-${name}` ? "" : `-${name}`, ac: name });
  }

  open({ measure, at }) {
    if (at >= 0) update({ v: "head", ac: measure.name, ...atHead(catalogs.current.heads[at].name) });
  }

  step(rows, columns) {
    const from = this.cursor();
    const [lastRow, lastColumn] = [this.shown.rows.length - 1, this.shown.columns.length - 1];
    const to = from ? { row: clamp(from.row + rows, lastRow), column: clamp(from.column + columns, lastColumn) } : { row: 0, column: 0 };
    const { measure, at } = this.entry(to.row, to.column);
    if (at < 0) return;
    this.over = null;
    update({ head: catalogs.current.heads[at].name, ac: measure.name });
    this.heat.reveal(to.row, to.column);
    say(this.words(to).join(", "));
  }

  /** Head, number with its interval, what chance gives, and rank. */
  words({ row, column }) {
    const { measure, at } = this.entry(row, column);
    const value = measure.values[at];
    const even = measure.baselines[at];
    const { heads, baseline } = catalogs.current;
    return [
      heads[at].name,
      `${measure.label} ${shortNumber(value)}${intervalText(measure.lows[at], measure.highs[at])}`,
      Number.isFinite(even) ? `${baseline} ${shortNumber(even)}` : "",
      Number.isFinite(value) ? `rank ${measure.rank(at)} of ${heads.length}` : "not measured",
      measure.note,
      heads[at].words,
    ].filter(Boolean);
  }

  tell(cell) {
    this.heat.point(cell);
    if (!cell) return fill(this.read, faint("point at a cell, or use the arrow keys; click for the head"));
    if (cell.row < 0 || cell.column < 0 || this.entry(cell.row, cell.column).at < 0) {
      const isName = state.g === "measures" && cell.column < 0 && cell.row >= 0;
      return fill(this.read, faint(isName ? `click to sort heads by ${this.measureAt(cell.row).label}` : ""));
    }
    const [name, value, ...rest] = this.words(cell);
    fill(this.read, el("b", {}, name), " ", el("span", { class: "value" }, value), faint(` ${rest.join(" \u00b7 ")}`));
  }

  async figure() {
    const title = state.g === "measures" ? "numbers of heads" : `${measureShown().title}, layer by head`;
    return figureOfHeat(this.heat, title, [shortNumber(this.look.low), shortNumber(this.look.high)]);
  }

  async rows() {
    const { rows, columns, values } = this.shown;
    const n = columns.length;
    const cell = (value) => (Number.isNaN(value) ? "" : String(value));
    const lines = (rows.names || rows.labels).map((label, row) => [label, ...Array.from(values.subarray(row * n, (row + 1) * n), cell)]);
    return [[state.g === "measures" ? "" : measureShown().name, ...columns.labels], ...lines];
  }
}

register("numbers", "Grid", NumbersView);
