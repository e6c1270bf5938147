// Compare: two maps side by side, and what one has more than the other.
import { breathe, digits, manifest, matrix, nameOf } from "./data.js";
import { el, faint, fill, pairOf, readout, say, select, tokenOf, toolbar } from "./dom.js";
import { Heat, Legend, addressOfView, drawHeat, drawScale, endOf, guttersOf, seenOf, viewAt } from "./heat.js";
import { topOf } from "./heads.js";
import { cursorOf, stepFrom, tokensAt } from "./matrix.js";
import { mapOf, state, update } from "./state.js";

/** Which tokens of two texts stand for each other: by position where there are as many, else the longest common run of labels. */
function alignTokens(a, b) {
  if (a.length === b.length) return a.labels.map((_, at) => [at, at]);
  const [n, m] = [a.length, b.length];
  const best = new Uint16Array((n + 1) * (m + 1));
  const cell = (i, j) => i * (m + 1) + j;
  for (let i = n - 1; i >= 0; i--)
    for (let j = m - 1; j >= 0; j--)
      best[cell(i, j)] =
        a.labels[i] === b.labels[j] ? best[cell(i + 1, j + 1)] + 1 : Math.max(best[cell(i + 1, j)], best[cell(i, j + 1)]);
  const pairs = [];
  for (let i = 0, j = 0; i < n && j < m;) {
    if (a.labels[i] === b.labels[j]) pairs.push([i++, j++]);
    else if (best[cell(i + 1, j)] >= best[cell(i, j + 1)]) i++;
    else j++;
  }
  return pairs;
}

/** An axis of the pairs of tokens that two axes share. */
function joinAxes(a, b) {
  const pairs = alignTokens(a, b);
  const halves = pairs.map(([i, j]) => (a.labels[i] === b.labels[j] ? null : [a.labels[i], b.labels[j]]));
  return {
    length: pairs.length,
    labels: pairs.map(([i], at) => halves[at]?.join(" / ") ?? a.labels[i]),
    halves,
    special: pairs.map(([i]) => a.special[i]),
    written: pairs.map(([i]) => a.written[i]),
    pairs,
  };
}

/** So much of a text as tells it from another: cut where they begin to differ, not behind it. */
function cutWhereApart(text, other, most) {
  const [letters, others] = [Array.from(text), Array.from(other)];
  if (letters.length <= most) return text;
  const apart = letters.findIndex((letter, at) => letter !== others[at]);
  const from = Math.max(0, Math.min((apart < 0 ? 0 : apart) - Math.floor(most / 3), letters.length - most));
  return `${from ? "\u2026" : ""}${letters.slice(from, from + most).join("")}${from + most < letters.length ? "\u2026" : ""}`;
}

/** A − B where both have tokens; of two texts the second − the first, as in the figures of `compare`. */
function difference(a, b, sign) {
  const [rows, columns] = [joinAxes(a.rows, b.rows), joinAxes(a.columns, b.columns)];
  const values = new Float32Array(rows.length * columns.length);
  const [of_a, of_b] = [0, 1].map((which) => Int32Array.from(columns.pairs, (pair) => pair[which]));
  let [largest, apart, most] = [0, 0, -1];
  for (let row = 0, at = 0; row < rows.length; row++) {
    const [from_a, from_b] = [rows.pairs[row][0] * a.columns.length, rows.pairs[row][1] * b.columns.length];
    for (let column = 0; column < of_a.length; column++, at++) {
      const value = sign * (a.values[from_a + of_a[column]] - b.values[from_b + of_b[column]]);
      const size = Math.abs(value);
      values[at] = value;
      apart += size;
      if (size > largest) [largest, most] = [size, at];
    }
  }
  const place = most < 0 ? null : { row: Math.floor(most / columns.length), column: most % columns.length };
  return { rows, columns, values, largest, place, apart: rows.length ? apart / 2 / rows.length : 0 };
}

const PANELS = { a: "First map", b: "Second map", d: "Difference" };

/** The number of the text that the second map is of; null = it is of the same text. */
function otherText() {
  const [, number] = /^text(\d+)$/.exec(state.b) || [];
  return number === undefined ? null : Number(number);
}

export class CompareView {
  constructor(app) {
    this.app = app;
    this.partner = select("with", [], (value) => update({ b: value }));
    this.read = readout();
    this.panels = Object.entries(PANELS).map(([which, label]) => this.panel(which, label));
    this.notes = el("div", { class: "faint note" });
    const panels = el("div", { class: "panels" }, this.panels.map(({ root }) => root));
    this.root = el("div", { class: "view compare" }, toolbar(this.read, this.partner), panels, this.notes);
  }

  panel(which, label) {
    const heat = new Heat(`${label}. Arrow keys move, plus and minus zoom.`, {
      hover: (cell) => {
        this.over = cell && this.spread(which, cell);
        this.point(this.over || this.kept());
      },
      pick: (row, column) => {
        const { a } = this.spread(which, { row, column });
        if (a.row >= 0 || a.column >= 0) update(tokensAt(this.a, a.row, a.column));
      },
      step: (rows, columns) => {
        update(stepFrom(this.a, rows, columns));
        const cursor = this.kept();
        for (const panel of this.panels) panel.heat.reveal(cursor[panel.which].row, cursor[panel.which].column);
        this.point(cursor);
        say(this.read.textContent);
      },
      zoom: (view) => {
        for (const panel of this.panels.filter((panel) => panel.which !== which)) {
          panel.heat.view = view && { ...view };
          panel.heat.draw();
        }
        update({ z: addressOfView(view) });
      },
    });
    heat.gutters = (width, height) => this.gutters(width, height);
    const [name, legend] = [el("b", {}), new Legend(null)];
    return { which, heat, name, legend, root: el("figure", {}, el("figcaption", {}, name, legend.root), heat.root) };
  }

  /** Room for labels, the same in all three, so that cells stand at like places. */
  gutters(width, height) {
    const each = Object.keys(PANELS).map((which) => guttersOf(this[which], width, height));
    return { left: Math.max(...each.map(({ left }) => left)), top: Math.max(...each.map(({ top }) => top)) };
  }

  offered() {
    const { heads, full } = mapOf();
    const layers = [...new Set(heads.map(([layer]) => layer))];
    const mine = manifest.texts[state.t].title;
    const choice = (spec) => [spec, nameOf(spec)];
    const texts = manifest.texts.map(({ title }, number) => [`text${number}`, `text ${number + 1}: ${cutWhereApart(title, mine, 30)}`]);
    return [
      ...["mean", ...layers.map((layer) => `mean${layer}`), ...full.map((layer) => `full${layer}`)].map(choice),
      ...texts.filter((_, number) => number !== state.t),
      ...heads.map((pair) => choice(pair.join("."))),
    ];
  }

  /** The second map; null where the other text has no such head. */
  async second() {
    const text = otherText();
    if (text === null) return matrix(state.t, state.m, state.b, state.hide, state.words);
    const map = manifest.texts[text].maps.findIndex(({ kind }) => kind === mapOf().kind);
    return map < 0 ? null : matrix(text, map, state.h, state.hide, state.words).catch(() => null);
  }

  async show() {
    const call = (this.lastCall = {});
    this.partner.offer(this.offered());
    this.partner.show(state.b);
    const [a, b] = await Promise.all([matrix(state.t, state.m, state.h, state.hide, state.words), this.second()]);
    const high = await topOf(a);
    if (this.lastCall !== call) return;
    if (!b) return fill(this.notes, "The other text has no such head.");
    await breathe();
    if (this.lastCall !== call) return;
    if (a !== this.a || b !== this.b) {
      this.d = difference(a, b, otherText() === null ? 1 : -1);
      this.over = null;
    }
    [this.a, this.b] = [a, b];
    const colours = this.app.palette;
    const top = state.scale === "fixed" ? 1 : Math.max(high, b.largest);
    const most = state.scale === "fixed" ? 1 : this.d.largest || 1;
    const ofMap = { low: 0, high: top, table: colours.sequential, colours };
    this.looks = { a: ofMap, b: ofMap, d: { low: -most, high: most, table: colours.diverging, colours } };
    this.names = this.named();
    for (const { which, heat, name, legend } of this.panels) {
      fill(name, this.names[which]);
      name.title = this.names[which];
      legend.show(this.looks[which]);
      heat.view = viewAt(state.z);
      heat.set(this[which], this.looks[which]);
      await breathe();
      if (this.lastCall !== call) return;
    }
    fill(this.notes, this.notesOn(a, b).map((note) => el("span", {}, note)));
    this.root.dataset.shown = [state.t, state.m, state.h, state.b].join();
    this.point(this.over || this.kept());
  }

  /** What there is to say of two maps: sentences. */
  notesOn(a, b) {
    const { place, apart, rows, columns, values } = this.d;
    const notes = [`On average ${digits(apart)} of a query's attention goes elsewhere (total variation distance).`];
    if (place) {
      const value = digits(values[place.row * columns.length + place.column], true);
      notes.push(` Largest difference: ${value} from “${rows.labels[place.row]}” to “${columns.labels[place.column]}”.`);
    }
    if (a.rows !== b.rows || a.columns !== b.columns) {
      const isAll = rows.length === a.rows.length && rows.length === b.rows.length;
      const some = `The difference shows the ${rows.length} queries and ${columns.length} keys that both texts have.`;
      notes.push(` ${isAll ? "Tokens are compared position by position." : some}`);
    }
    const [layer] = state.h.split(".");
    if (!state.b.startsWith("full") && /^\d/.test(layer) && !mapOf().full.includes(Number(layer)))
      notes.push(
        " The full-width head of this layer is not known: it needs the layer's queries and keys, which a saved record does not hold, and attention without position biases, soft caps or sinks.",
      );
    return notes;
  }

  named() {
    const other = otherText();
    if (other === null) return { a: nameOf(state.h), b: nameOf(state.b), d: "difference, first − second" };
    const title = (text, than) => cutWhereApart(manifest.texts[text].title, manifest.texts[than].title, 26);
    const name = (text, than) => `${nameOf(state.h)}, text ${text + 1}: ${title(text, than)}`;
    return { a: name(state.t, other), b: name(other, state.t), d: "difference, second − first" };
  }

  focus() {
    this.panels[0].heat.focus();
  }

  name() {
    const other = otherText();
    return `compare ${nameOf(state.h)} ${other === null ? nameOf(state.b) : `text ${other + 1}`}`;
  }

  /** A cell of one panel as it stands in all three. */
  spread(which, { row, column }) {
    const pairs = { rows: this.d.rows.pairs, columns: this.d.columns.pairs };
    const everywhere = (side, at) => {
      if (at < 0) return { a: -1, b: -1, d: -1 };
      const d = which === "d" ? at : pairs[side].findIndex(([a, b]) => (which === "a" ? a : b) === at);
      return d < 0
        ? { a: which === "a" ? at : -1, b: which === "b" ? at : -1, d: -1 }
        : { a: pairs[side][d][0], b: pairs[side][d][1], d };
    };
    const [rows, columns] = [everywhere("rows", row), everywhere("columns", column)];
    return Object.fromEntries(Object.keys(PANELS).map((name) => [name, { row: rows[name], column: columns[name] }]));
  }

  kept() {
    const at = this.a && cursorOf(this.a);
    return at ? this.spread("a", at) : null;
  }

  point(cursor) {
    if (!this.d) return;
    for (const { which, heat } of this.panels)
      heat.point(cursor && (cursor[which].row >= 0 || cursor[which].column >= 0) ? cursor[which] : null);
    if (!cursor) return fill(this.read, faint("point at a cell of one map: it is marked in all"));
    const valueOf = ({ columns, values }, { row, column }) => (row >= 0 && column >= 0 ? values[row * columns.length + column] : null);
    const [a, b, d] = ["a", "b", "d"].map((which) => valueOf(this[which], cursor[which]));
    const tokenAt = (axis, side) => {
      const which = ["a", "b"].find((map) => cursor[map][side] >= 0);
      return which ? tokenOf(this[which][axis].labels[cursor[which][side]]) : null;
    };
    const [query, key] = [tokenAt("rows", "row"), tokenAt("columns", "column")];
    const number = (which, text) => el("b", { "data-of": which }, text);
    fill(
      this.read,
      query && key ? pairOf(query, key) : el("span", { class: "pair" }, query, key),
      a === null ? null : number("a", digits(a)),
      b === null ? null : [faint("and"), number("b", digits(b))],
      d === null ? null : [faint("difference"), number("d", digits(d, true))],
    );
  }

  async figure() {
    const parts = this.panels.map(({ which, heat }) => ({ which, ...seenOf(heat, 420) }));
    let x = 0;
    for (const part of parts) {
      part.x = x;
      x += Math.max(part.width, 220) + 24;
    }
    const height = Math.max(...parts.map((part) => part.height)) + 60;
    return {
      width: x - 24,
      height,
      draw: (pen) => {
        for (const part of parts) {
          const look = this.looks[part.which];
          const ends = [endOf(look.low), endOf(look.high)];
          pen.moved(part.x, 0, () => {
            pen.text(this.names[part.which], 0, 10, { size: 12, weight: 600, colour: look.colours.ink });
            drawHeat(pen, this[part.which], { ...part.place, top: part.place.top + 24 }, look, 4);
            drawScale(pen, look, part.place.left, part.height + 30, Math.min(160, part.place.width), ends);
          });
        }
      },
    };
  }

  async rows() {
    const { rows, columns } = this.d;
    const valueAt = (shown, row, column) => shown.values[row * shown.columns.length + column].toFixed(4);
    const lines = rows.pairs.flatMap(([rowOfA, rowOfB], row) =>
      columns.pairs.map(([columnOfA, columnOfB], column) => [
        rows.labels[row],
        columns.labels[column],
        valueAt(this.a, rowOfA, columnOfA),
        valueAt(this.b, rowOfB, columnOfB),
        valueAt(this.d, row, column),
      ]),
    );
    return [["query", "key", "first", "second", "difference"], ...lines];
  }
}
