// Grid of heads: one number of all heads by layer and head, or all numbers at once, a row each, heads beside each other.
import { catalogs, headOf, shortNumber } from "./catalog.js";
import { el, fill, say, segmented, select } from "./dom.js";
import { Heat, Legend, drawHeat, drawScale, seenOf } from "./heat.js";
import { register, state, update } from "./state.js";

const NO_MEASURES = ["layer", "head", "map_x", "map_y"];

/** Labels as heatmaps have them along a side. */
function sideOf(labels, also = {}) {
  return { ...also, labels, length: labels.length, special: labels.map(() => false), written: labels.map(() => false) };
}

/** The numbers of heads that are no places. */
function measuresShown() {
  return [...catalogs.shown.columns.values()].filter(({ name }) => !NO_MEASURES.includes(name));
}

/** The number that is looked at. */
function measureShown() {
  const all = measuresShown();
  return all.find(({ name }) => name === state.ac) || all[0];
}

class NumbersView {
  constructor(app) {
    this.app = app;
    const names = measuresShown().map(({ name, title }) => [name, title]);
    this.shape = segmented("What stands in the grid", [["layers", "layer \u00d7 head", "one number of all heads"], ["measures", `${catalogs.shown.record.rows || "measure"} \u00d7 head`, "all numbers of all heads"]], (g) => update({ g, z: "" }));
    this.which = select("Number", names, (ac) => update({ ac }));
    this.order = select("Order of heads", [["", "as in the model"], ...names.map(([name, title]) => [`-${name}`, `most ${title}`])], (o) => update({ o }));
    this.read = el("div", { class: "read", id: "readout" });
    this.legend = new Legend("");
    this.heat = new Heat("Numbers of heads. Arrow keys move, Enter opens the head, plus and minus zoom.", {
      hover: (cell) => this.tell((this.over = cell)),
      pick: (row, column) => (column >= 0 && row >= 0 ? this.open(this.entry(row, column)) : row >= 0 && this.sort(row)),
      step: (rows, columns) => this.step(rows, columns),
      zoom: () => {},
    });
    this.heat.over.addEventListener("keydown", (event) => {
      const cursor = this.cursor();
      if (!["Enter", " "].includes(event.key) || !cursor) return;
      event.preventDefault();
      this.open(this.entry(cursor.row, cursor.column));
    });
    this.root = el("div", { class: "view numbers" }, el("div", { class: "toolbar" }, this.shape, this.which, this.order, this.read), this.legend.root, this.heat.root);
  }

  focus() {
    this.heat.focus();
  }

  name() {
    return state.g === "measures" ? "numbers of heads" : `${measureShown().name} of heads`;
  }

  /** What stands where: numbers of heads by row and column; -1 = no head. */
  arrange() {
    const { heads } = catalogs.shown;
    const measures = measuresShown();
    if (state.g === "measures") {
      const order = heads.map(({ at }) => at);
      const by = catalogs.shown.columns.get(state.o.replace("-", ""));
      const value = (at) => (Number.isFinite(by.values[at]) ? by.values[at] : -Infinity);
      if (by) order.sort((a, b) => (state.o.startsWith("-") ? value(b) - value(a) : value(a) - value(b)));
      this.measureAt = (row) => measures[row];
      this.headAt = (_, column) => order[column];
      const names = measures.map(({ label }) => label);
      const told = measures.map(({ label, beside = "" }) => label + beside);
      return [sideOf(told, { names, whole: true, pale: measures.map(({ unsettled }) => !!unsettled) }), sideOf(order.map((at) => heads[at].name))];
    }
    const rows = [...new Set(heads.map(({ name, layer }) => `${name.replace(/L\d+H\d+$/, "")}L${layer}`))];
    const columns = [...new Set(heads.map(({ head }) => head))].sort((a, b) => a - b);
    this.measureAt = () => measureShown();
    this.headAt = (row, column) => catalogs.shown.byName.get(`${rows[row]}H${columns[column]}`) ?? -1;
    return [sideOf(rows), sideOf(columns.map((head) => `H${head}`))];
  }

  show() {
    const [rows, columns] = this.arrange();
    const values = new Float32Array(rows.length * columns.length).fill(NaN);
    let [low, high] = [0, 0];
    for (let row = 0; row < rows.length; row++)
      for (let column = 0; column < columns.length; column++) {
        const { measure, at } = this.entry(row, column);
        const value = at < 0 ? NaN : measure.values[at];
        values[row * columns.length + column] = value;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    const colours = this.app.palette;
    const two = low < 0; // of numbers that go both ways the middle is 0
    const most = Math.max(high, -low) || 1;
    this.look = { low: two ? -most : 0, high: most, table: two ? colours.two : colours.one, colours, missing: (value) => value !== value };
    this.shown = { rows, columns, values, largest: high };
    const { measures, layers } = { measures: state.g === "measures", layers: state.g !== "measures" };
    this.shape.show(measures ? "measures" : "layers");
    [this.which.hidden, this.order.hidden] = [measures, layers];
    this.which.show(measureShown().name);
    this.order.show(state.o);
    fill(this.legend.unit, measures ? catalogs.shown.record.quantity || "value" : measureShown().title);
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
    for (let row = 0; row < rows.length; row++)
      for (let column = 0; column < columns.length; column++) {
        const { measure, at } = this.entry(row, column);
        if (at === headOf().at && measure === measureShown()) return { row, column };
      }
    return null;
  }

  sort(row) {
    if (state.g !== "measures") return;
    const { name } = this.measureAt(row);
    update({ o: state.o === `-${name}` ? "" : `-${name}`, ac: name });
  }

  open({ measure, at }) {
    if (at >= 0) update({ v: "head", head: catalogs.shown.heads[at].name, ac: measure.name, ex: -1, q: -1 });
  }

  step(rows, columns) {
    const from = this.cursor();
    const held = (at, n) => Math.max(0, Math.min(n - 1, at));
    const to = from
      ? { row: held(from.row + rows, this.shown.rows.length), column: held(from.column + columns, this.shown.columns.length) }
      : { row: 0, column: 0 };
    const { measure, at } = this.entry(to.row, to.column);
    if (at < 0) return;
    this.over = null;
    update({ head: catalogs.shown.heads[at].name, ac: measure.name });
    this.heat.reveal(to.row, to.column);
    say(this.words(to).join(", "));
  }

  /** Head, number with its interval, what chance gives, and rank. */
  words({ row, column }) {
    const { measure, at } = this.entry(row, column);
    const value = measure.values[at];
    const [low, high, even] = [measure.lows?.[at], measure.highs?.[at], measure.uniforms?.[at]];
    const { heads, record } = catalogs.shown;
    return [
      heads[at].name,
      `${measure.label} ${shortNumber(value)}${Number.isFinite(low) && Number.isFinite(high) ? ` [${shortNumber(low)}, ${shortNumber(high)}]` : ""}`,
      Number.isFinite(even) ? `${record.even || "uniform"} ${shortNumber(even)}` : "",
      Number.isFinite(value) ? `rank ${measure.rank(at)} of ${heads.length}` : "not measured",
      /\d+ links scored.*$/.exec(measure.what)?.[0],
      heads[at].words,
    ].filter(Boolean);
  }

  tell(cell) {
    this.heat.point(cell);
    if (!cell) return fill(this.read, el("span", { class: "faint" }, "point at a cell, or use the arrow keys; click for the head"));
    if (cell.row < 0 || cell.column < 0 || this.entry(cell.row, cell.column).at < 0) {
      const sorts = state.g === "measures" && cell.column < 0 && cell.row >= 0;
      return fill(this.read, el("span", { class: "faint" }, sorts ? `click to sort heads by ${this.measureAt(cell.row).label}` : ""));
    }
    const [name, value, ...rest] = this.words(cell);
    return fill(this.read, el("b", {}, name), " ", el("span", { class: "value" }, value), el("span", { class: "faint" }, ` ${rest.join(" \u00b7 ")}`));
  }

  async figure() {
    const { place, width, height } = seenOf(this.heat);
    const { look } = this;
    const title = state.g === "measures" ? "numbers of heads" : `${measureShown().title}, layer by head`;
    return {
      width: Math.max(width, 260),
      height: height + 62,
      draw: (pen) => {
        pen.text(title, place.left, 12, { size: 12, weight: 600, colour: look.colours.ink });
        drawHeat(pen, this.shown, { ...place, top: place.top + 22 }, look, 4);
        drawScale(pen, look, place.left, height + 28, Math.min(180, place.width), [shortNumber(look.low), shortNumber(look.high)]);
      },
    };
  }

  async rows() {
    const { rows, columns, values } = this.shown;
    const said = (value) => (value === value ? String(value) : "");
    return [
      [state.g === "measures" ? "" : measureShown().name, ...columns.labels],
      ...(rows.names || rows.labels).map((label, row) => [label, ...Array.from(values.subarray(row * columns.length, (row + 1) * columns.length), said)]),
    ];
  }
}

register("numbers", "Grid", NumbersView);
