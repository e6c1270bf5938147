// Text: the text as it reads, shaded by what a token attends to or by who attends to it.
import { inkOn, stepOf } from "./colour.js";
import { digits, matrix, nameOf, prose } from "./data.js";
import { el, fill } from "./dom.js";
import { topOf } from "./heads.js";
import { Legend, drawScale, endOf } from "./heat.js";
import { strongest, titleOf } from "./matrix.js";
import { widthOf } from "./pen.js";
import { mapOf, state, update } from "./state.js";
import { WordsView, pageOf, shadeToken } from "./words.js";

function largestIn(weights) {
  return weights.reduce((most, weight) => Math.max(most, weight), 0);
}

export class TextView extends WordsView {
  constructor(app) {
    super(app, "token");
    this.listName = "";
    this.legend = new Legend();
    this.root = el(
      "div",
      { class: "view text" },
      el("div", { class: "toolbar" }, this.title, this.read, this.sides),
      this.legend.root,
      this.pages,
    );
  }

  focus() {
    this.pages.querySelector('[tabindex="0"]')?.focus({ preventScroll: true });
  }

  name() {
    return `text ${nameOf(state.h)}`;
  }

  /** The same token, looked at from the other side. */
  turn(side) {
    if (mapOf().keys) update({ side });
    else if (side === "q") update({ side, q: state.side === "k" ? state.k : state.q });
    else update({ side, k: state.side === "q" ? state.q : state.k });
  }

  async show() {
    const asked = (this.asked = {});
    const shown = await matrix(state.t, state.m, state.h, state.hide, state.words);
    const high = await topOf(shown);
    if (this.asked !== asked) return;
    this.shown = shown;
    this.high = high;
    this.build();
    this.sides.show(state.side);
    this.shade();
    fill(this.title, titleOf(state.h));
    this.hear(null);
    this.root.dataset.shown = [state.t, state.m, state.h].join();
  }

  build() {
    const { rows, columns } = this.shown;
    const name = [
      state.t,
      state.m,
      rows.length,
      columns.length,
      rows.plain,
      columns.plain,
      state.words,
      state.hide,
    ].join();
    if (name === this.built) return;
    this.built = name;
    const cross = !!mapOf().keys;
    const isOfPhotos = !!manifest.texts[state.t].photos;
    this.spans = { q: [], k: [] };
    const page = (axis, side, heading) => {
      const opening = side === "k" || !mapOf().before; // what stands before the first row is none of the queries
      const { root, spans } = pageOf(axis, side, heading, { opening });
      this.spans[side] = spans;
      return root;
    };
    if (cross)
      fill(
        this.pages,
        page(rows, "q", isOfPhotos ? "Queries" : "Queries: what the decoder reads"),
        page(columns, "k", isOfPhotos ? "Keys" : "Keys: what the encoder read"),
      );
    else {
      fill(this.pages, page(rows, "q"));
      this.spans.k = this.spans.q;
    }
    this.cross = cross;
  }

  /** The token that is looked at. */
  keptToken() {
    const { rows, columns } = this.shown;
    const side = state.side;
    const token = side === "q" ? state.q : state.k;
    const at = token < 0 ? -1 : (side === "q" ? rows : columns).place[token];
    return at < 0 ? null : { side, at };
  }

  /** The weight of each token on the other side. */
  weights() {
    const { rows, columns, values } = this.shown;
    const focus = this.keptToken();
    const n = columns.length;
    if (!focus)
      return Array.from(
        { length: n },
        (_, column) => rows.groups.reduce((sum, _, row) => sum + values[row * n + column], 0) / rows.length,
      );
    if (focus.side === "q") return Array.from(values.subarray(focus.at * n, (focus.at + 1) * n));
    return Array.from({ length: rows.length }, (_, row) => values[row * n + focus.at]);
  }

  /** What the darkest colour means. Averages over queries have their own largest. */
  top(weights) {
    if (state.scale !== "head" || this.keptToken()) return this.high;
    return largestIn(weights) || 1;
  }

  shade() {
    const focus = this.keptToken();
    const weights = this.weights();
    const high = this.top(weights);
    const look = { low: 0, high, table: this.app.palette.one };
    const largest = largestIn(weights);
    this.legend.show(look, endOf(high), largest, focus ? this.shown.largest : largest);
    const table = this.app.palette.one;
    const other = focus?.side === "k" ? "q" : "k";
    for (const span of new Set([...this.spans.q, ...this.spans.k])) {
      shadeToken(span, 0, table);
      span.setAttribute("aria-pressed", "false");
      span.classList.remove("focus");
      span.tabIndex = -1;
    }
    this.spans[other].forEach((span, at) => shadeToken(span, stepOf(weights[at], 0, high), table));
    const mine = focus && this.spans[focus.side][focus.at];
    (mine || this.spans.q[0] || this.spans.k[0]).tabIndex = 0;
    if (mine) {
      mine.classList.add("focus");
      mine.setAttribute("aria-pressed", "true");
    }
    const axis = other === "k" ? this.shown.columns : this.shown.rows;
    const order = weights
      .map((_, at) => at)
      .sort((a, b) => weights[b] - weights[a])
      .slice(0, 10);
    this.listName = !focus
      ? "attended most, on average"
      : `${focus.side === "q" ? "what" : "who attends to"} “${(focus.side === "q" ? this.shown.rows : this.shown.columns).labels[focus.at]}”${focus.side === "q" ? " attends to" : ""}`;
    fill(
      this.list,
      strongest(
        this.listName,
        order.filter((at) => weights[at] >= 0.0005).map((at) => ({ label: axis.labels[at], weight: weights[at] })),
        high,
      ),
    );
  }

  choose(span) {
    if (!span) return;
    const at = Number(span.dataset.at);
    const side = this.cross ? span.dataset.side : state.side;
    const token = (side === "q" ? this.shown.rows : this.shown.columns).groups[at].first;
    const held = this.keptToken();
    if (held && held.at === at && held.side === side) return update({ [side]: -1 });
    return update({ side, [side]: token });
  }

  hear(span) {
    if (!this.shown) return;
    const { rows, columns, values } = this.shown;
    const focus = this.keptToken();
    if (!focus)
      return fill(
        this.read,
        el(
          "span",
          { class: "faint" },
          "shaded: the attention that each token gets, averaged over all queries · choose a token",
        ),
      );
    const axis = focus.side === "q" ? rows : columns;
    const other = focus.side === "q" ? columns : rows;
    const mine = el("q", { class: "token" }, axis.labels[focus.at]);
    const at = span && (!this.cross || span.dataset.side !== focus.side) ? Number(span.dataset.at) : -1;
    if (at < 0)
      return fill(
        this.read,
        el("span", {}, mine, focus.side === "q" ? " attends to what is shaded" : " is attended by what is shaded"),
      );
    const weight = focus.side === "q" ? values[focus.at * columns.length + at] : values[at * columns.length + focus.at];
    const theirs = el("q", { class: "token" }, other.labels[at]);
    fill(
      this.read,
      el(
        "span",
        { class: "pair" },
        focus.side === "q" ? [mine, " attends to ", theirs] : [theirs, " attends to ", mine],
      ),
      el("b", { class: "value" }, digits(weight)),
    );
  }

  walked(span) {
    return this.spans[span.dataset.side];
  }

  heard() {
    return this.read.textContent;
  }

  async figure() {
    const { rows, columns } = this.shown;
    const colours = this.app.palette;
    const [size, line, wide] = [16, 28, 720];
    const focus = this.keptToken();
    const weights = this.weights();
    const other = focus?.side === "k" ? "q" : "k";
    const look = { low: 0, high: this.top(weights), table: colours.one, colours };
    const placed = [];
    let [x, y] = [0, 40];
    const page = (axis, side) => {
      prose(axis).forEach(({ before, shown, chip }, at) => {
        for (const letter of before) {
          if (letter === "\n") [x, y] = [0, y + line];
          else x += widthOf(letter, size);
        }
        const said = shown.replace(/\s+/g, " ");
        const width = widthOf(said, size);
        if (x + width > wide && x > 0) [x, y] = [0, y + line];
        placed.push({ x, y, width, said, side, at, chip });
        x += width + (chip ? 6 : 0);
      });
    };
    page(rows, "q");
    if (this.cross) {
      [x, y] = [0, y + 2 * line];
      page(columns, "k");
    }
    return {
      width: wide,
      height: y + line + 34,
      draw: (pen) => {
        pen.text(`${nameOf(state.h)} · ${this.listName}`, 0, 12, { size: 12, weight: 600, colour: colours.ink });
        for (const token of placed) {
          const mine = focus && token.at === focus.at && (token.side === focus.side || !this.cross);
          const shaded = token.side === other || !this.cross;
          const step = shaded ? stepOf(weights[token.at], 0, look.high) : 0;
          if (step >= 2)
            pen.rect(token.x - 1, token.y - line / 2 + 3, token.width + 2, line - 6, colours.one.css[step]);
          if (mine) pen.frame(token.x - 1.5, token.y - line / 2 + 2.5, token.width + 3, line - 5, colours.mark, 2);
          pen.text(token.said, token.x, token.y, {
            size,
            colour: step >= 2 ? inkOn(colours.one.rgb[step]) : token.chip ? colours.special : colours.ink,
          });
        }
        drawScale(pen, look, 0, y + line, 160, ["0", endOf(look.high)]);
      },
    };
  }

  async rows() {
    const focus = this.keptToken();
    const axis = focus?.side === "k" ? this.shown.rows : this.shown.columns;
    const mine = focus
      ? (focus.side === "q" ? this.shown.rows : this.shown.columns).labels[focus.at]
      : "(mean over queries)";
    return [
      ["head", focus?.side === "k" ? "key" : "query", "place", focus?.side === "k" ? "query" : "key", "weight"],
      ...this.weights().map((weight, at) => [nameOf(state.h), mine, at, axis.labels[at], weight.toFixed(4)]),
    ];
  }
}
