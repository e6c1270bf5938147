// Links: the text twice, and lines between tokens; several heads at once.
import { digits, matrix, nameOf } from "./data.js";
import { canvas, dotOf, el, fill, say, select } from "./dom.js";
import { tellKept } from "./kept.js";
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

export class LinksView {
  constructor(app) {
    this.app = app;
    this.picture = canvas({
      tabindex: "0",
      role: "application",
      "aria-roledescription": "links between tokens",
      "aria-label": "Links between tokens. Up and down choose a token, left and right the side.",
      class: "stuck",
    });
    this.space = el("div", { class: "space" }, this.picture);
    this.scroller = el("div", { class: "scroller" }, this.space);
    this.read = el("div", { class: "read", id: "readout" });
    this.legend = el("div", { class: "legend", role: "group", "aria-label": "Heads that are drawn" });
    this.slider = el("input", {
      type: "range",
      min: "0.02",
      max: "0.9",
      step: "0.01",
      "aria-label": "Least weight that is drawn",
      oninput: () => update({ min: Number(this.slider.value) }),
    });
    this.least = el("span", {});
    this.add = select("Add a head", [], (spec) => spec && this.toggle(spec), "");
    this.more = [
      el("label", { class: "range" }, el("span", {}, "weights from ", this.least), this.slider),
      el("p", { class: "faint" }),
    ];
    this.root = el(
      "div",
      { class: "view links" },
      el("div", { class: "toolbar" }, this.legend, this.add, this.read),
      (this.kept = el("div", {})),
      this.scroller,
    );
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
    return this.more;
  }

  open(spec, event) {
    if (!event) {
      update({ h: spec, hs: "" }); // from the list of heads: this one alone
      return true;
    }
    this.toggle(spec);
    return true;
  }

  /** Adds a head to those that are drawn, or takes it away. */
  toggle(spec) {
    const held = specs();
    const next = held.includes(spec) ? held.filter((other) => other !== spec) : [...held, spec].slice(-10);
    if (next.length)
      update({
        h: spec === state.h && !next.includes(spec) ? next.at(-1) : next.includes(spec) ? spec : state.h,
        hs: next.join(","),
      });
  }

  async show() {
    const asked = (this.asked = {});
    if (!state.h.includes(".")) return update({ h: this.app.choices(this)[0] });
    if (state.hs && !specs().includes(state.h)) return update({ hs: "" }); // stepped to another head
    const heads = [];
    for (const spec of specs())
      heads.push({ spec, shown: await matrix(state.t, state.m, spec, state.hide, state.words) });
    if (this.asked !== asked) return;
    this.heads = heads;
    const colours = this.app.palette.several;
    heads.forEach((head, number) => (head.colour = colours[number % colours.length]));
    this.slider.value = state.min;
    this.least.textContent = state.min.toFixed(2);
    fill(
      this.legend,
      heads.map(({ spec, colour }) => {
        return el(
          "button",
          {
            type: "button",
            class: "chip",
            "data-spec": spec,
            title: heads.length > 1 ? "take it away" : null,
            "aria-label": `${nameOf(spec)}${heads.length > 1 ? ": take it away" : ""}`,
            onclick: () => heads.length > 1 && this.toggle(spec),
          },
          dotOf(colour),
          nameOf(spec),
          heads.length > 1 ? el("small", { "aria-hidden": "true" }, "×") : null,
        );
      }),
    );
    const others = this.app.choices(this).filter((spec) => !specs().includes(spec));
    this.add.offer([["", "add a head"], ...others.map((spec) => [spec, nameOf(spec)])]);
    this.add.show("");
    this.add.hidden = !others.length; // of an example the atlas has this head alone
    fill(this.more[1], others.length ? HOW_TO_ADD : "Point at a token for its own links; click to keep them.");
    this.find();
    this.draw();
    if (Math.abs(this.scroller.scrollTop - state.y * this.line) > this.line)
      this.scroller.scrollTop = state.y * this.line;
    this.root.dataset.shown = [state.t, state.m, specs()].join();
  }

  /** The links of at least the least weight, strongest first. */
  find() {
    const { rows, columns } = this.axes();
    this.all = [];
    this.heads.forEach(({ shown }, number) => {
      for (let at = 0; at < shown.values.length; at++)
        if (shown.values[at] >= state.min)
          this.all.push({
            number,
            row: Math.floor(at / columns.length),
            column: at % columns.length,
            weight: shown.values[at],
          });
    });
    this.all.sort((a, b) => b.weight - a.weight);
    this.found = this.all.length;
    if (this.found > MOST * 4) this.all.length = MOST * 4;
    this.n = Math.max(rows.length, columns.length);
  }

  axes() {
    return this.heads.length ? { rows: this.heads[0].shown.rows, columns: this.heads[0].shown.columns } : axesOf();
  }

  /** The token that is looked at: pointed at, else kept. */
  focused() {
    if (this.over) return this.over;
    const { rows, columns } = this.axes();
    const [axis, token] = state.side === "q" ? [rows, state.q] : [columns, state.k];
    const at = token < 0 ? -1 : axis.place[token];
    return at < 0 ? null : { side: state.side, at };
  }

  /** The links that are drawn, [link, alpha]. */
  drawn(focus) {
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
    const room = (axis) =>
      Math.min(
        most,
        axis.labels
          .slice(0, 400)
          .reduce((longest, label) => Math.max(longest, label.length > 40 ? most : widthOf(label, SIZE)), 40),
      ) + 14;
    const [left, right] = [room(rows), room(columns)];
    const gap = Math.min(wide - left - right, 600);
    return { left, right: left + gap, end: left + gap + right };
  }

  /** Draws the part between two heights. */
  paint(pen, { left, right, end }, from, to, focus) {
    const { rows, columns } = this.axes();
    const colours = this.app.palette;
    const y = (at) => TOP + (at + 0.5) * this.line;
    const links = this.drawn(focus).filter(
      ({ row, column }) => Math.max(y(row), y(column)) > from - 40 && Math.min(y(row), y(column)) < to + 40,
    );
    const middle = (right - left) / 2;
    for (let at = links.length - 1; at >= 0; at--) {
      const { number, row, column, weight } = links[at];
      pen.curve(
        left,
        y(row),
        left + middle,
        y(row),
        right - middle,
        y(column),
        right,
        y(column),
        this.heads[number].colour,
        0.8 + 2.4 * weight,
        Math.min(1, 0.12 + 0.88 * weight),
      );
    }
    pen.text("query", left - 6, 10, { size: 11, align: "right", colour: colours.faint });
    pen.text("key", right + 6, 10, { size: 11, colour: colours.faint });
    const strength = { q: new Map(), k: new Map() };
    if (focus) {
      for (const link of links) {
        const [side, at] = focus.side === "q" ? ["k", link.column] : ["q", link.row];
        if (!((strength[side].get(at)?.weight || 0) >= link.weight)) strength[side].set(at, link);
      }
    }
    for (const [side, axis] of [
      ["q", rows],
      ["k", columns],
    ]) {
      const first = Math.max(0, Math.floor((from - TOP) / this.line) - 1);
      const last = Math.min(axis.length, Math.ceil((to - TOP) / this.line) + 1);
      for (let at = first; at < last; at++) {
        const mine = focus && focus.side === side && focus.at === at;
        const link = strength[side].get(at);
        const [x, w] = side === "q" ? [0, left - 3] : [right + 3, end - right - 3];
        if (link)
          pen.rect(
            x,
            y(at) - this.line / 2 + 1,
            w,
            this.line - 2,
            this.heads[link.number].colour,
            0.015 + 0.5 * link.weight,
          );
        if (mine) pen.frame(x + 0.5, y(at) - this.line / 2 + 1.5, w - 1, this.line - 3, colours.mark, 1.5);
        const dim = focus && !mine && !link;
        const colour = dim
          ? colours.faint
          : axis.special[at]
            ? colours.special
            : axis.written[at]
              ? colours.written
              : colours.ink;
        pen.text(fitted(axis.labels[at], SIZE, w - 10), side === "q" ? left - 8 : right + 8, y(at), {
          size: SIZE,
          align: side === "q" ? "right" : "left",
          colour,
          weight: mine ? 600 : 400,
        });
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
    context.clearRect(0, 0, w, h);
    const from = this.scroller.scrollTop;
    context.translate(0, -from);
    const focus = this.focused();
    this.paint(new CanvasPen(context), this.lay, from, from + h, focus);
    this.tell(focus);
  }

  tell(focus) {
    const { rows, columns } = this.axes();
    fill(this.kept, tellKept(focus?.side === "q" ? rows.groups[focus.at].first : -1));
    if (!focus) {
      const drawn = Math.min(this.found, MOST);
      return fill(
        this.read,
        el(
          "span",
          { class: "faint" },
          drawn < this.found
            ? `the ${drawn.toLocaleString("en")} strongest of ${this.found.toLocaleString("en")} links`
            : `${drawn} links`,
        ),
      );
    }
    const links = this.drawn(focus).slice(0, 5);
    const [axis, other] = focus.side === "q" ? [rows, columns] : [columns, rows];
    return fill(
      this.read,
      el(
        "span",
        {},
        el("q", { class: "token" }, axis.labels[focus.at]),
        focus.side === "q" ? " attends to" : " is attended by",
      ),
      links.map((link) => {
        const at = focus.side === "q" ? link.column : link.row;
        return el(
          "span",
          { class: "role link", "data-at": at, "data-spec": this.heads[link.number].spec },
          this.heads.length > 1 ? dotOf(this.heads[link.number].colour) : null,
          `${other.labels[at]} `,
          el("b", {}, digits(link.weight)),
        );
      }),
    );
  }

  at(event) {
    if (!this.lay) return null;
    const box = this.picture.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top + this.scroller.scrollTop];
    const at = Math.floor((y - TOP) / this.line);
    const side = x < this.lay.left ? "q" : x > this.lay.right && x < this.lay.end ? "k" : null;
    const { rows, columns } = this.axes();
    return side && at >= 0 && at < (side === "q" ? rows : columns).length ? { side, at } : null;
  }

  keep(focus) {
    const { rows, columns } = this.axes();
    if (!focus) return update({ q: -1, k: -1 });
    const token = (focus.side === "q" ? rows : columns).groups[focus.at].first;
    return update({ side: focus.side, [focus.side]: token });
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
      clearTimeout(this.told);
      this.told = setTimeout(() => update({}), 200);
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
      const held = (this.over = null) || this.focused();
      this.keep(next && held && next.side === held.side && next.at === held.at ? null : next);
    });
    picture.addEventListener("keydown", (event) => {
      const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      const side = { ArrowLeft: "q", ArrowRight: "k" }[event.key];
      if ((!step && !side) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      const { rows, columns } = this.axes();
      const now = this.focused() || { side: "q", at: step > 0 ? -1 : 0 };
      const next = { side: side || now.side, at: now.at + (step || 0) * (event.shiftKey ? 10 : 1) };
      const axis = next.side === "q" ? rows : columns;
      next.at = Math.max(0, Math.min(axis.length - 1, next.at));
      this.over = null;
      this.keep(next);
      const y = TOP + next.at * this.line;
      if (y < this.scroller.scrollTop + TOP) this.scroller.scrollTop = y - TOP;
      if (y + this.line > this.scroller.scrollTop + this.scroller.clientHeight)
        this.scroller.scrollTop = y + this.line - this.scroller.clientHeight;
      const other = next.side === "q" ? columns : rows;
      const said = this.drawn(next)
        .slice(0, 3)
        .map((link) => `${other.labels[next.side === "q" ? link.column : link.row]} ${digits(link.weight)}`);
      say(
        `${axis.labels[next.at]} ${next.side === "q" ? "attends to" : "is attended by"} ${said.join(", ") || "nothing"}`,
      );
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
      ...this.drawn(this.focused()).map(({ number, row, column, weight }) => [
        nameOf(this.heads[number].spec),
        row,
        rows.labels[row],
        column,
        columns.labels[column],
        weight.toFixed(4),
      ]),
    ];
  }
}
