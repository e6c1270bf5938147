// Links: the text twice, and lines between tokens; several heads at once.
import { countText, digits, matrix, nameOf } from "./data.js";
import { button, clamp, dotOf, el, faint, fill, isShortcut, keyedCanvas, readout, say, select, tokenOf, toolbar } from "./dom.js";
import { labelColour } from "./heat.js";
import { missingLine } from "./matrix.js";
import { CanvasPen, fitted, widthOf } from "./pen.js";
import { axesOf, state, update } from "./state.js";

const LEAST_LINE = 20;
const MOST_LINE = 30;
const TOP = 26;
const SIZE = 13;
const MOST = 1500; // links drawn at once where no token is looked at
const HOW_TO_ADD =
  "Choose heads in the small grid, or from the list beside their names, to add them; again, to take them away. Point at a token for its own links; click to keep them.";
const LEAST = 0.005; // the least link of a token that is looked at

/** The heads that are shown: those that were added, else the one that is chosen. */
function specs() {
  return state.hs ? state.hs.split(",") : [state.h.includes(".") ? state.h : ""].filter(Boolean);
}

const verbOf = (side) => (side === "q" ? "attends to" : "is attended by");

export class LinksView {
  constructor(app) {
    this.app = app;
    const label = "Links between tokens. Up and down choose a token, left and right the side.";
    this.picture = keyedCanvas("links between tokens", label, undefined, { class: "stuck" });
    this.space = el("div", { class: "space" }, this.picture);
    this.scroller = el("div", { class: "scroller" }, this.space);
    this.read = readout();
    this.legend = el("div", { class: "legend", role: "group", "aria-label": "Heads that are drawn" });
    this.slider = el("input", {
      type: "range", min: "0.02", max: "0.9", step: "0.01",
      "aria-label": "Least weight that is drawn",
      oninput: () => update({ min: Number(this.slider.value) }),
    });
    this.least = el("span", {});
    this.range = el("label", { class: "range" }, el("span", {}, "weights from ", this.least), this.slider);
    this.add = select("Add a head", [], (spec) => spec && this.toggle(spec), "");
    this.hint = el("p", { class: "faint" });
    this.missing = el("div", {});
    this.root = el("div", { class: "view links" }, toolbar(this.legend, this.add, this.read), this.missing, this.scroller);
    this.heads = [];
    this.over = null;
    this.listen();
    new ResizeObserver(() => this.root.isConnected && this.draw()).observe(this.scroller);
  }

  focus() {
    this.picture.focus({ preventScroll: true });
  }

  name() {
    return `links ${specs().map(nameOf).join(" ")}`;
  }

  chosen() {
    return specs();
  }

  beside() {
    return [this.range, this.hint];
  }

  open(spec, event) {
    if (event) this.toggle(spec);
    else update({ h: spec, hs: "" }); // from the list of heads: this one alone
    return true;
  }

  /** Adds a head to those that are drawn, or takes it away. */
  toggle(spec) {
    const now = specs();
    const next = now.includes(spec) ? now.filter((other) => other !== spec) : [...now, spec].slice(-10);
    if (!next.length) return;
    const h = next.includes(spec) ? spec : spec === state.h ? next.at(-1) : state.h;
    update({ h, hs: next.join(",") });
  }

  async show() {
    const call = (this.lastCall = {});
    if (!state.h.includes(".")) return update({ h: this.app.choices(this)[0] });
    if (state.hs && !specs().includes(state.h)) return update({ hs: "" }); // stepped to another head
    const colours = this.app.palette.several;
    const heads = [];
    for (const spec of specs()) {
      const shown = await matrix(state.t, state.m, spec, state.hide, state.words);
      heads.push({ spec, shown, colour: colours[heads.length % colours.length] });
    }
    if (this.lastCall !== call) return;
    this.heads = heads;
    this.slider.value = state.min;
    this.least.textContent = state.min.toFixed(2);
    this.showLegend();
    const others = this.app.choices(this).filter((spec) => !specs().includes(spec));
    this.add.offer([["", "add a head"], ...others.map((spec) => [spec, nameOf(spec)])]);
    this.add.show("");
    this.add.hidden = !others.length; // of an example the atlas has this head alone
    fill(this.hint, others.length ? HOW_TO_ADD : "Point at a token for its own links; click to keep them.");
    this.rank();
    this.draw();
    if (Math.abs(this.scroller.scrollTop - state.y * this.line) > this.line) this.scroller.scrollTop = state.y * this.line;
    this.revealKept();
    this.root.dataset.shown = [state.t, state.m, specs()].join();
  }

  /** Brings the token that is kept into sight, the first time that it is shown. */
  revealKept() {
    const kept = this.kept();
    const name = [state.t, state.m, kept?.side, kept?.at].join();
    if (kept && name !== this.revealed) this.scrollTo(kept.at, this.scroller.clientHeight / 2);
    this.revealed = name;
  }

  /** Scrolls until a token is in sight, with so much room above it where it was out of sight. */
  scrollTo(at, room) {
    const y = TOP + at * this.line;
    const { scrollTop, clientHeight } = this.scroller;
    if (y < scrollTop + TOP) this.scroller.scrollTop = y - Math.max(room, TOP);
    else if (y + this.line > scrollTop + clientHeight) this.scroller.scrollTop = y + this.line - clientHeight + room;
  }

  showLegend() {
    const isOne = this.heads.length === 1;
    const chips = this.heads.map(({ spec, colour }) => {
      const label = `${nameOf(spec)}${isOne ? "" : ": take it away"}`;
      const facts = { class: "chip", "data-spec": spec, title: isOne ? null : "take it away", "aria-label": label };
      const cross = isOne ? null : el("small", { "aria-hidden": "true" }, "×");
      return button([dotOf(colour), nameOf(spec), cross], () => isOne || this.toggle(spec), facts);
    });
    fill(this.legend, chips);
  }

  /** The links of at least the least weight, strongest first. */
  rank() {
    const { rows, columns } = this.axes();
    const n = columns.length;
    this.all = [];
    this.heads.forEach(({ shown }, number) => {
      const { values } = shown;
      for (let at = 0; at < values.length; at++)
        if (values[at] >= state.min) this.all.push({ number, row: Math.floor(at / n), column: at % n, weight: values[at] });
    });
    this.all.sort((a, b) => b.weight - a.weight);
    this.count = this.all.length;
    if (this.count > MOST * 4) this.all.length = MOST * 4;
    this.n = Math.max(rows.length, n);
  }

  axes() {
    return this.heads.length ? this.heads[0].shown : axesOf();
  }

  axis(side) {
    const { rows, columns } = this.axes();
    return side === "q" ? rows : columns;
  }

  /** The token that is looked at: pointed at, else kept. */
  focused() {
    return this.over || this.kept();
  }

  /** The token that is kept; null = there is none, or it is hidden. */
  kept() {
    const sides = state.side === "q" ? ["q", "k"] : ["k", "q"];
    const side = sides.find((each) => state[each] >= 0);
    const at = side ? this.axis(side).place[state[side]] : -1;
    return at < 0 ? null : { side, at };
  }

  /** The links to be drawn, the strongest first. */
  linksOf(focus) {
    const { rows, columns } = this.axes();
    if (!focus) return this.all.slice(0, MOST);
    const links = [];
    const n = columns.length;
    this.heads.forEach(({ shown }, number) => {
      const count = focus.side === "q" ? n : rows.length;
      for (let other = 0; other < count; other++) {
        const [row, column] = focus.side === "q" ? [focus.at, other] : [other, focus.at];
        const weight = shown.values[row * n + column];
        if (weight >= LEAST) links.push({ number, row, column, weight });
      }
    });
    return links.sort((a, b) => b.weight - a.weight);
  }

  geometry(width, height = 0) {
    this.line = Math.max(LEAST_LINE, Math.min(MOST_LINE, Math.floor((height - TOP - 14) / Math.max(1, this.n))));
    const { rows, columns } = this.axes();
    const wide = Math.min(width, 1000);
    const most = Math.max(60, Math.min(230, wide * 0.32));
    const [left, right] = [rows, columns].map(({ labels }) => {
      const widths = labels.slice(0, 400).map((label) => (label.length > 40 ? most : widthOf(label, SIZE)));
      return Math.min(most, Math.max(40, ...widths)) + 14;
    });
    const gap = Math.min(wide - left - right, 600);
    return { left, right: left + gap, end: left + gap + right };
  }

  paint(pen, { left, right, end }, from, to, focus) {
    const { rows, columns } = this.axes();
    const colours = this.app.palette;
    const y = (at) => TOP + (at + 0.5) * this.line;
    const isInSight = (one, other) => Math.max(one, other) > from - 40 && Math.min(one, other) < to + 40;
    const links = this.linksOf(focus).filter(({ row, column }) => isInSight(y(row), y(column)));
    const middle = (right - left) / 2;
    for (const { number, row, column, weight } of [...links].reverse()) {
      const { colour } = this.heads[number];
      const [thick, alpha] = [0.8 + 2.4 * weight, Math.min(1, 0.12 + 0.88 * weight)];
      const [start, end] = [y(row), y(column)];
      pen.curve(left, start, left + middle, start, right - middle, end, right, end, colour, thick, alpha);
    }
    pen.text("query", left - 6, 10, { size: 11, align: "right", colour: colours.faint });
    pen.text("key", right + 6, 10, { size: 11, colour: colours.faint });
    const strength = { q: new Map(), k: new Map() };
    for (const link of focus ? links : []) {
      const [side, at] = focus.side === "q" ? ["k", link.column] : ["q", link.row];
      if (!((strength[side].get(at)?.weight || 0) >= link.weight)) strength[side].set(at, link);
    }
    for (const [side, axis] of Object.entries({ q: rows, k: columns })) {
      const first = Math.max(0, Math.floor((from - TOP) / this.line) - 1);
      const last = Math.min(axis.length, Math.ceil((to - TOP) / this.line) + 1);
      for (let at = first; at < last; at++) {
        const isFocus = focus && focus.side === side && focus.at === at;
        const link = strength[side].get(at);
        const [x, w] = side === "q" ? [0, left - 3] : [right + 3, end - right - 3];
        const [top, height] = [y(at) - this.line / 2 + 1, this.line - 2];
        if (link) pen.rect(x, top, w, height, this.heads[link.number].colour, 0.015 + 0.5 * link.weight);
        if (isFocus) pen.frame(x + 0.5, top + 0.5, w - 1, height - 1, colours.mark, 1.5);
        const isDim = focus && !isFocus && !link;
        const how = {
          size: SIZE,
          align: side === "q" ? "right" : "left",
          colour: isDim ? colours.faint : labelColour(axis, at, colours),
          weight: isFocus ? 600 : 400,
        };
        pen.text(fitted(axis.labels[at], SIZE, w - 10), side === "q" ? left - 8 : right + 8, y(at), how);
      }
    }
  }

  draw() {
    if (!this.heads.length || !this.root.isConnected) return;
    const [w, h] = [this.scroller.clientWidth, this.scroller.clientHeight];
    this.lay = this.geometry(w, h);
    const height = TOP + this.n * this.line + 12;
    this.root.dataset.place = [this.lay.left, this.lay.right, TOP, this.line].join();
    this.space.style.height = `${height}px`;
    const context = this.picture.fit(w, Math.min(h, height));
    const from = this.scroller.scrollTop;
    context.translate(0, -from);
    const focus = this.focused();
    this.paint(new CanvasPen(context), this.lay, from, from + h, focus);
    this.tell(focus);
  }

  tell(focus) {
    fill(this.missing, missingLine(focus?.side === "q" ? this.axis("q").groups[focus.at].first : -1));
    if (!focus) {
      const n = Math.min(this.count, MOST);
      const some = `the ${countText(n)} strongest of ${countText(this.count)} links`;
      return fill(this.read, faint(n < this.count ? some : `${n} links`));
    }
    const links = this.linksOf(focus).slice(0, 5).map((link) => {
      const [at, { spec, colour }] = [this.otherEnd(focus, link), this.heads[link.number]];
      const dot = this.heads.length > 1 ? dotOf(colour) : null;
      const facts = { class: "role link", "data-at": at, "data-spec": spec };
      return el("span", facts, dot, `${this.otherLabel(focus, link)} `, el("b", {}, digits(link.weight)));
    });
    fill(this.read, el("span", {}, tokenOf(this.axis(focus.side).labels[focus.at]), ` ${verbOf(focus.side)}`), links);
  }

  /** Where a link of the token that is looked at ends. */
  otherEnd({ side }, { row, column }) {
    return side === "q" ? column : row;
  }

  otherLabel(focus, link) {
    return this.axis(focus.side === "q" ? "k" : "q").labels[this.otherEnd(focus, link)];
  }

  at(event) {
    if (!this.lay) return null;
    const box = this.picture.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top + this.scroller.scrollTop];
    const at = Math.floor((y - TOP) / this.line);
    const side = x < this.lay.left ? "q" : x > this.lay.right && x < this.lay.end ? "k" : null;
    return side && at >= 0 && at < this.axis(side).length ? { side, at } : null;
  }

  keep(focus) {
    if (!focus) update({ q: -1, k: -1 });
    else update({ side: focus.side, [focus.side]: this.axis(focus.side).groups[focus.at].first });
  }

  listen() {
    const { picture } = this;
    let frame = 0;
    const later = () => {
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(() => this.draw());
    };
    this.scroller.addEventListener("scroll", () => {
      later();
      state.y = Math.round(this.scroller.scrollTop / this.line);
      clearTimeout(this.writing);
      this.writing = setTimeout(() => update({}), 200);
    });
    picture.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch") return;
      const next = this.at(event);
      if (next?.side === this.over?.side && next?.at === this.over?.at) return;
      this.over = next;
      later();
    });
    picture.addEventListener("pointerleave", () => {
      this.over = null;
      later();
    });
    picture.addEventListener("click", (event) => {
      const next = this.at(event);
      this.over = null;
      const focus = this.focused();
      this.keep(next && next.side === focus?.side && next.at === focus.at ? null : next);
    });
    picture.addEventListener("keydown", (event) => {
      const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      const side = { ArrowLeft: "q", ArrowRight: "k" }[event.key];
      if ((!step && !side) || isShortcut(event)) return;
      event.preventDefault();
      const now = this.focused() || { side: "q", at: step > 0 ? -1 : 0 };
      const next = { side: side || now.side };
      const { labels } = this.axis(next.side);
      next.at = clamp(now.at + (step || 0) * (event.shiftKey ? 10 : 1), labels.length - 1);
      this.over = null;
      this.keep(next);
      this.scrollTo(next.at, 0);
      const links = this.linksOf(next).slice(0, 3);
      const ends = links.map((link) => `${this.otherLabel(next, link)} ${digits(link.weight)}`).join(", ");
      say(`${labels[next.at]} ${verbOf(next.side)} ${ends || "nothing"}`);
    });
  }

  async figure() {
    const lay = this.geometry(880);
    const height = TOP + this.n * this.line + 8;
    return {
      width: lay.end + 4,
      height: height + 24,
      draw: (pen) => {
        let x = 0;
        for (const { spec, colour } of this.heads) {
          pen.rect(x, 4, 10, 10, colour);
          pen.text(nameOf(spec), x + 15, 9, { size: 12, colour: this.app.palette.ink });
          x += 26 + widthOf(nameOf(spec), 12);
        }
        pen.moved(0, 24, () => this.paint(pen, lay, 0, height, this.focused()));
      },
    };
  }

  async rows() {
    const { rows, columns } = this.axes();
    return [
      ["head", "query_place", "query", "key_place", "key", "weight"],
      ...this.linksOf(this.focused()).map(({ number, row, column, weight }) => {
        const head = nameOf(this.heads[number].spec);
        return [head, row, rows.labels[row], column, columns.labels[column], weight.toFixed(4)];
      }),
    ];
  }
}
