// Text: the text as it reads, shaded by what a token attends to or by who attends to it.
import { inkOn, stepOf } from "./colour.js";
import { manifest, nameOf, prose } from "./data.js";
import { el, faint, fill, tokenOf, toolbar } from "./dom.js";
import { loadMap } from "./heads.js";
import { Legend, drawScale, endOf } from "./heat.js";
import { strongest, titleOf } from "./matrix.js";
import { widthOf } from "./pen.js";
import { mapOf, state, update } from "./state.js";
import { WordsView, attends, pageOf, shadeToken } from "./words.js";

const largestIn = (weights) => weights.reduce((most, weight) => Math.max(most, weight), 0);

export class TextView extends WordsView {
  constructor(app) {
    super(app, "token");
    this.listName = "";
    this.legend = new Legend();
    this.root = el("div", { class: "view text" }, toolbar(this.title, this.read, this.sides), this.legend.root, this.pages);
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
    const map = await loadMap(this);
    if (!map) return;
    Object.assign(this, map);
    this.build();
    this.sides.show(state.side);
    this.shade();
    fill(this.title, titleOf(state.h));
    this.hear(null);
    this.root.dataset.shown = [state.t, state.m, state.h].join();
  }

  build() {
    const { rows, columns } = this.shown;
    const name = [state.t, state.m, rows.length, columns.length, rows.plain, columns.plain, state.words, state.hide].join();
    if (name === this.builtName) return;
    this.builtName = name;
    this.isCross = !!mapOf().keys;
    const isOfPhotos = !!manifest.texts[state.t].photos;
    const both = isOfPhotos ? ["Queries", "Keys"] : ["Queries: what the decoder reads", "Keys: what the encoder read"];
    const opening = !mapOf().before; // what stands before the first row is none of the queries
    const queries = pageOf(rows, "q", this.isCross && both[0], { opening });
    const keys = this.isCross ? pageOf(columns, "k", both[1]) : null;
    this.spans = { q: queries.spans, k: (keys || queries).spans };
    fill(this.pages, queries.root, keys?.root);
  }

  keptToken() {
    const { side } = state;
    const token = state[side];
    const at = token < 0 ? -1 : this.axis(side).place[token];
    return at < 0 ? null : { side, at };
  }

  weights() {
    const { side, at } = this.keptToken() || { side: "q", at: null };
    return this.weightsOf(side, at, Array.from(this.shown.rows.labels.keys()));
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
    const table = this.app.palette.sequential;
    const largest = largestIn(weights);
    this.legend.show({ low: 0, high, table }, endOf(high), largest, focus ? this.shown.largest : largest);
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
    const label = focus && this.axis(focus.side).labels[focus.at];
    if (!focus) this.listName = "attended most, on average";
    else this.listName = focus.side === "q" ? `what “${label}” attends to` : `who attends to “${label}”`;
    fill(this.list, strongest(this.listName, this.axis(other).labels, weights, { most: 10, high }));
  }

  choose(span) {
    if (!span) return;
    const at = Number(span.dataset.at);
    const side = this.isCross ? span.dataset.side : state.side;
    const focus = this.keptToken();
    if (focus?.at === at && focus.side === side) return update({ [side]: -1 });
    return update({ side, [side]: this.axis(side).groups[at].first });
  }

  hear(span) {
    if (!this.shown) return;
    const focus = this.keptToken();
    if (!focus)
      return fill(this.read, faint("shaded: the attention that each token gets, averaged over all queries · choose a token"));
    const { side } = focus;
    const token = tokenOf(this.axis(side).labels[focus.at]);
    const at = span && (!this.isCross || span.dataset.side !== side) ? Number(span.dataset.at) : -1;
    if (at < 0)
      return fill(this.read, el("span", {}, token, ` ${side === "q" ? "attends to" : "is attended by"} what is shaded`));
    const other = tokenOf(this.axis(side === "q" ? "k" : "q").labels[at]);
    fill(this.read, attends(side, token, other, this.weights()[at]));
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
    const look = { low: 0, high: this.top(weights), table: colours.sequential, colours };
    const tokens = [];
    let [x, y] = [0, 40];
    const layOut = (axis, side) => {
      prose(axis).forEach(({ before, shown, chip }, at) => {
        for (const letter of before) {
          if (letter === "\n") [x, y] = [0, y + line];
          else x += widthOf(letter, size);
        }
        const text = shown.replace(/\s+/g, " ");
        const width = widthOf(text, size);
        if (x + width > wide && x > 0) [x, y] = [0, y + line];
        tokens.push({ x, y, width, text, side, at, chip });
        x += width + (chip ? 6 : 0);
      });
    };
    layOut(rows, "q");
    if (this.isCross) {
      [x, y] = [0, y + 2 * line];
      layOut(columns, "k");
    }
    return {
      width: wide,
      height: y + line + 34,
      draw: (pen) => {
        pen.text(`${nameOf(state.h)} · ${this.listName}`, 0, 12, { size: 12, weight: 600, colour: colours.ink });
        for (const { x, y, width, text, side, at, chip } of tokens) {
          const isFocus = focus && at === focus.at && (side === focus.side || !this.isCross);
          const step = side === other || !this.isCross ? stepOf(weights[at], 0, look.high) : 0;
          const ink = step >= 2 ? inkOn(colours.sequential.rgb[step]) : chip ? colours.special : colours.ink;
          if (step >= 2) pen.rect(x - 1, y - line / 2 + 3, width + 2, line - 6, colours.sequential.css[step]);
          if (isFocus) pen.frame(x - 1.5, y - line / 2 + 2.5, width + 3, line - 5, colours.mark, 2);
          pen.text(text, x, y, { size, colour: ink });
        }
        drawScale(pen, look, 0, y + line, 160, ["0", endOf(look.high)]);
      },
    };
  }

  async rows() {
    const focus = this.keptToken();
    const [mine, theirs] = focus?.side === "k" ? ["k", "q"] : ["q", "k"];
    const names = { q: "query", k: "key" };
    const label = focus ? this.axis(mine).labels[focus.at] : "(mean over queries)";
    const { labels } = this.axis(theirs);
    return [
      ["head", names[mine], "place", names[theirs], "weight"],
      ...this.weights().map((weight, at) => [nameOf(state.h), label, at, labels[at], weight.toFixed(4)]),
    ];
  }
}
