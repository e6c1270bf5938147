// Compare: two maps side by side, and what one has more than the other.
import { breathe, digits, manifest, matrix, nameOf } from "./data.js";
import { el, fill, say, select } from "./dom.js";
import { Heat, Legend, addressOfView, drawHeat, drawScale, endOf, guttersOf, seenOf, viewAt } from "./heat.js";
import { topOf } from "./heads.js";
import { cursorOf, stepped, tokensAt } from "./matrix.js";
import { mapOf, state, update } from "./state.js";

/** Which tokens of two texts stand for each other: by position where there are as many, else the longest common run of labels. */
function aligned(a, b) {
  if (a.length === b.length) return a.labels.map((_, at) => [at, at]);
  const [n, m] = [a.length, b.length];
  const best = new Uint16Array((n + 1) * (m + 1));
  for (let i = n - 1; i >= 0; i--) {
    for (let j = m - 1; j >= 0; j--) {
      best[i * (m + 1) + j] =
        a.labels[i] === b.labels[j]
          ? best[(i + 1) * (m + 1) + j + 1] + 1
          : Math.max(best[(i + 1) * (m + 1) + j], best[i * (m + 1) + j + 1]);
    }
  }
  const pairs = [];
  for (let i = 0, j = 0; i < n && j < m;) {
    if (a.labels[i] === b.labels[j]) pairs.push([i++, j++]);
    else if (best[(i + 1) * (m + 1) + j] >= best[i * (m + 1) + j + 1]) i++;
    else j++;
  }
  return pairs;
}

/** An axis of the pairs of tokens that two axes share. */
function joined(a, b, pairs) {
  return {
    length: pairs.length,
    labels: pairs.map(([i, j]) => (a.labels[i] === b.labels[j] ? a.labels[i] : `${a.labels[i]} / ${b.labels[j]}`)),
    halves: pairs.map(([i, j]) => (a.labels[i] === b.labels[j] ? null : [a.labels[i], b.labels[j]])),
    special: pairs.map(([i]) => a.special[i]),
    written: pairs.map(([i]) => a.written[i]),
    pairs,
  };
}

/** So much of a text as tells it from another: cut where they begin to differ, not behind it. */
function telling(text, other, most) {
  const [letters, others] = [Array.from(text), Array.from(other)];
  if (letters.length <= most) return text;
  const apart = letters.findIndex((letter, at) => letter !== others[at]);
  const from = Math.max(0, Math.min((apart < 0 ? 0 : apart) - Math.floor(most / 3), letters.length - most));
  return `${from ? "\u2026" : ""}${letters.slice(from, from + most).join("")}${from + most < letters.length ? "\u2026" : ""}`;
}

/** A − B where both have tokens; of two texts the second − the first, as in the figures of `compare`. */
function difference(a, b, sign) {
  const rows = joined(a.rows, b.rows, aligned(a.rows, b.rows));
  const columns = joined(a.columns, b.columns, aligned(a.columns, b.columns));
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
      if (size > largest) {
        largest = size;
        most = at;
      }
    }
  }
  const place = most < 0 ? null : { row: Math.floor(most / columns.length), column: most % columns.length };
  return { rows, columns, values, largest, place, apart: rows.length ? apart / 2 / rows.length : 0 };
}

export class CompareView {
  constructor(app) {
    this.app = app;
    this.partner = select("with", [], (value) => update({ b: value }));
    this.read = el("div", { class: "read", id: "readout" });
    this.panels = ["a", "b", "d"].map((which) => {
      const said = { a: "First map", b: "Second map", d: "Difference" }[which];
      const heat = new Heat(`${said}. Arrow keys move, plus and minus zoom.`, {
        hover: (cell) => {
          this.over = cell && this.spread(which, cell);
          this.point(this.over || this.kept());
        },
        pick: (row, column) => {
          const cursor = this.spread(which, { row, column });
          if (cursor.a.row >= 0 || cursor.a.column >= 0) update(tokensAt(this.a, cursor.a.row, cursor.a.column));
        },
        step: (rows, columns) => {
          update(stepped(this.a, rows, columns));
          const cursor = this.kept();
          for (const panel of this.panels) panel.heat.reveal(cursor[panel.which].row, cursor[panel.which].column);
          this.point(cursor);
          say(this.read.textContent);
        },
        zoom: (view) => {
          for (const panel of this.panels) {
            if (panel.which === which) continue;
            panel.heat.view = view && { ...view };
            panel.heat.draw();
          }
          update({ z: addressOfView(view) });
        },
      });
      const name = el("b", {});
      const legend = new Legend(null);
      const caption = el("figcaption", {}, name, legend.root);
      heat.gutters = (width, height) => this.gutters(width, height);
      return { which, heat, name, legend, root: el("figure", {}, caption, heat.root) };
    });
    this.notes = el("div", { class: "faint note" });
    this.root = el(
      "div",
      { class: "view compare" },
      el("div", { class: "toolbar" }, this.read, this.partner),
      el(
        "div",
        { class: "panels" },
        this.panels.map(({ root }) => root),
      ),
      this.notes,
    );
  }

  /** Room for labels, the same in all three, so that cells stand at like places. */
  gutters(width, height) {
    const each = ["a", "b", "d"].map((which) => guttersOf(this[which], width, height));
    return { left: Math.max(...each.map(({ left }) => left)), top: Math.max(...each.map(({ top }) => top)) };
  }

  offered() {
    const map = mapOf();
    const layers = [...new Set(map.heads.map(([layer]) => layer))];
    const mine = manifest.texts[state.t].title;
    return [
      ["mean", nameOf("mean")],
      ...layers.map((layer) => [`mean${layer}`, nameOf(`mean${layer}`)]),
      ...map.full.map((layer) => [`full${layer}`, nameOf(`full${layer}`)]),
      ...manifest.texts.flatMap(({ title }, number) =>
        number === state.t ? [] : [[`text${number}`, `text ${number + 1}: ${telling(title, mine, 30)}`]],
      ),
      ...map.heads.map((pair) => [pair.join("."), nameOf(pair.join("."))]),
    ];
  }

  /** The second map; null where the other text has no such head. */
  async second() {
    const other = /^text(\d+)$/.exec(state.b);
    if (!other) return matrix(state.t, state.m, state.b, state.hide, state.words);
    const text = Number(other[1]);
    const map = manifest.texts[text].maps.findIndex(({ kind }) => kind === mapOf().kind);
    return map < 0 ? null : matrix(text, map, state.h, state.hide, state.words).catch(() => null);
  }

  async show() {
    const asked = (this.asked = {});
    this.partner.offer(this.offered());
    this.partner.show(state.b);
    const [a, b] = await Promise.all([matrix(state.t, state.m, state.h, state.hide, state.words), this.second()]);
    const high = await topOf(a);
    if (this.asked !== asked) return;
    if (!b) {
      fill(this.notes, "The other text has no such head.");
      return;
    }
    await breathe();
    if (this.asked !== asked) return;
    if (a !== this.a || b !== this.b) {
      this.d = difference(a, b, state.b.startsWith("text") ? -1 : 1);
      this.over = null;
    }
    [this.a, this.b] = [a, b];
    this.same = a.rows === b.rows && a.columns === b.columns;
    const colours = this.app.palette;
    const top = state.scale === "fixed" ? 1 : Math.max(high, b.largest);
    const most = state.scale === "fixed" ? 1 : this.d.largest || 1;
    this.looks = {
      a: { low: 0, high: top, table: colours.one, colours },
      b: { low: 0, high: top, table: colours.one, colours },
      d: { low: -most, high: most, table: colours.two, colours },
    };
    this.names = { ...this.named(), d: `difference, ${state.b.startsWith("text") ? "second − first" : "first − second"}` };
    for (const { which, heat, name, legend } of this.panels) {
      fill(name, this.names[which]);
      name.title = this.names[which];
      legend.show(this.looks[which]);
      heat.view = viewAt(state.z);
      heat.set(this[which], this.looks[which]);
      await breathe();
      if (this.asked !== asked) return;
    }
    const { place, apart, rows, columns } = this.d;
    const layer = state.h.split(".")[0];
    fill(
      this.notes,
      el("span", {}, `On average ${digits(apart)} of a query's attention goes elsewhere (total variation distance).`),
      place
        ? el(
            "span",
            {},
            ` Largest difference: ${digits(this.d.values[place.row * columns.length + place.column], true)} from “${rows.labels[place.row]}” to “${columns.labels[place.column]}”.`,
          )
        : null,
      this.same
        ? null
        : el(
            "span",
            {},
            ` ${rows.length === a.rows.length && rows.length === b.rows.length ? "Tokens are compared position by position." : `The difference shows the ${rows.length} queries and ${columns.length} keys that both texts have.`}`,
          ),
      !state.b.startsWith("full") && /^\d/.test(layer) && !mapOf().full.includes(Number(layer))
        ? el(
            "span",
            {},
            " The full-width head of this layer is not known: it needs the layer's queries and keys, which a saved record does not hold, and attention without position biases, soft caps or sinks.",
          )
        : null,
    );
    this.root.dataset.shown = [state.t, state.m, state.h, state.b].join();
    this.point(this.over || this.kept());
  }

  /** What the two maps are called. */
  named() {
    const other = /^text(\d+)$/.exec(state.b);
    if (!other) return { a: nameOf(state.h), b: nameOf(state.b) };
    const numbers = [state.t, Number(other[1])];
    const [a, b] = numbers.map((text, at) => {
      const [mine, theirs] = [text, numbers[1 - at]].map((number) => manifest.texts[number].title);
      return `${nameOf(state.h)}, text ${text + 1}: ${telling(mine, theirs, 26)}`;
    });
    return { a, b };
  }

  focus() {
    this.panels[0].heat.focus();
  }

  name() {
    const other = /^text(\d+)$/.exec(state.b);
    return `compare ${nameOf(state.h)} ${other ? `text ${Number(other[1]) + 1}` : nameOf(state.b)}`;
  }

  /** A cell of one panel as it stands in all three. */
  spread(which, { row, column }) {
    const pairs = { rows: this.d.rows.pairs, columns: this.d.columns.pairs };
    const found = (side, at) => {
      if (at < 0) return { a: -1, b: -1, d: -1 };
      const d = which === "d" ? at : pairs[side].findIndex(([a, b]) => (which === "a" ? a : b) === at);
      return d < 0
        ? { a: which === "a" ? at : -1, b: which === "b" ? at : -1, d: -1 }
        : { a: pairs[side][d][0], b: pairs[side][d][1], d };
    };
    const [rows, columns] = [found("rows", row), found("columns", column)];
    return Object.fromEntries(["a", "b", "d"].map((name) => [name, { row: rows[name], column: columns[name] }]));
  }

  kept() {
    const at = this.a && cursorOf(this.a);
    return at ? this.spread("a", at) : null;
  }

  point(cursor) {
    if (!this.d) return;
    for (const { which, heat } of this.panels)
      heat.point(cursor && (cursor[which].row >= 0 || cursor[which].column >= 0) ? cursor[which] : null);
    if (!cursor)
      return fill(this.read, el("span", { class: "faint" }, "point at a cell of one map: it is marked in all"));
    const of = (shown, { row, column }) =>
      row >= 0 && column >= 0 ? shown.values[row * shown.columns.length + column] : null;
    const values = { a: of(this.a, cursor.a), b: of(this.b, cursor.b), d: of(this.d, cursor.d) };
    const token = (side) =>
      cursor.a[side] >= 0
        ? (side === "row" ? this.a.rows : this.a.columns).labels[cursor.a[side]]
        : cursor.b[side] >= 0
          ? (side === "row" ? this.b.rows : this.b.columns).labels[cursor.b[side]]
          : null;
    const [query, key] = [token("row"), token("column")];
    fill(
      this.read,
      el(
        "span",
        { class: "pair" },
        query === null ? null : el("q", { class: "token" }, query),
        query !== null && key !== null ? " attends to " : null,
        key === null ? null : el("q", { class: "token" }, key),
      ),
      values.a === null ? null : el("b", { "data-of": "a" }, digits(values.a)),
      values.b === null ? null : [el("span", { class: "faint" }, "and"), el("b", { "data-of": "b" }, digits(values.b))],
      values.d === null
        ? null
        : [el("span", { class: "faint" }, "difference"), el("b", { "data-of": "d" }, digits(values.d, true))],
    );
  }

  async figure() {
    const parts = this.panels.map(({ which }) => ({
      which,
      ...seenOf(this.panels.find((panel) => panel.which === which).heat, 420),
    }));
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
    const { rows, columns, values } = this.d;
    const lines = [["query", "key", "first", "second", "difference"]];
    rows.pairs.forEach(([ra, rb], row) =>
      columns.pairs.forEach(([ca, cb], column) => {
        lines.push([
          rows.labels[row],
          columns.labels[column],
          this.a.values[ra * this.a.columns.length + ca].toFixed(4),
          this.b.values[rb * this.b.columns.length + cb].toFixed(4),
          values[row * columns.length + column].toFixed(4),
        ]);
      }),
    );
    return lines;
  }
}
