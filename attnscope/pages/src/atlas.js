// Atlas: all heads of a record as a scatter and a list, filtered by an expression and by a brush.
import { stepOf } from "./colour.js";
import { atHead, catalogs, colourColumn, headOf, sidesOf } from "./catalog.js";
import { manifest } from "./data.js";
import { button, el, faint, fill, isChoice, isShortcut, neighbour, readout, say, select, showGradient, takeEvent, toolbar } from "./dom.js";
import { roleChip, showRoles } from "./heads.js";
import { filterOf, isNamed } from "./query.js";
import { Scatter } from "./scatter.js";
import { addressOf, state, update } from "./state.js";
import { percent, shortNumber } from "./wording.js";

const FAINTEST = 50; // the step of the colour scale that the least value has: below it dots would be as the ground

/** The role that a head's colour and mark stand for. */
export function markOf(head) {
  const [role] = head.roles;
  return role ? manifest.roles.marks[role.name] : null;
}

export class AtlasView {
  constructor(app) {
    this.app = app;
    const { columns } = catalogs.current;
    this.input = el("input", {
      type: "search",
      class: "filter",
      "aria-label": "Filter heads",
      "aria-describedby": "filterwrong",
      placeholder: this.hint(),
      spellcheck: "false",
      autocomplete: "off",
      oninput: () => update({ f: this.input.value }),
      onkeydown: (event) => {
        if (event.key === "ArrowDown") this.list.focus();
        else if (event.key === "Escape" && this.input.value) update({ f: "" });
        else return;
        takeEvent(event);
      },
    });
    this.wrong = el("span", { class: "wrong", id: "filterwrong", role: "status" });
    this.count = readout("span");
    this.names = this.help(columns);
    const choices = [...columns.values()].map((column) => [column.name, column.title]);
    this.x = select("Across", choices, (value) => update({ ax: value, br: "" }));
    this.y = select("Up", choices, (value) => update({ ay: value, br: "" }));
    const colours = [...(catalogs.current.hasRoles ? [["role", "role"]] : []), ...choices];
    this.colour = select("Colour", colours, (value) => update({ ac: value }));
    this.legend = el("div", { class: "roles", role: "group", "aria-label": "What colours mean" });
    this.scatter = new Scatter({
      hover: (head) => this.hover(head, "plot"),
      open: (head) => this.open(head),
      brush: (area) => update({ br: area ? area.map((end) => String(Number(end.toPrecision(5)))).join(",") : "" }),
    });
    this.header = el("div", { class: "row head", role: "group", "aria-label": "Sort by" });
    const facts = { class: "rows", role: "listbox", tabindex: "0", "aria-label": "Heads" };
    this.list = el("div", facts);
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.list.addEventListener("pointermove", (event) => this.hover(this.headAt(event.target), "list"));
    this.list.addEventListener("pointerleave", () => this.hover(-1, "list"));
    this.list.addEventListener("click", (event) => this.open(this.headAt(event.target)));
    const about = { class: "icon", title: "what can be filtered by", "aria-label": "What can be filtered by" };
    const explain = button("\u2026", () => this.explain(), about);
    const plot = el("div", { class: "plot" }, el("div", { class: "fields" }, this.x, this.y, this.colour), this.legend, this.scatter.root);
    const list = el("div", { class: "list" }, this.header, this.list);
    const bar = toolbar(this.input, explain, this.wrong, this.count);
    this.root = el("div", { class: "view atlas" }, bar, el("div", { class: "landing" }, plot, list), this.names);
    this.root.classList.toggle("roleless", !catalogs.current.hasRoles);
    this.active = -1;
  }

  hint() {
    const { columns } = catalogs.current;
    return `words, ")" -> "(", or ${columns.has("induction") ? "induction > 0.4" : "layer > 3"}`;
  }

  help(columns) {
    const rows = [...columns.values()].map(({ name, meaning }) => [el("dt", {}, el("code", {}, name)), el("dd", {}, meaning || "\u00a0")]);
    return el(
      "dialog",
      { class: "help names", "aria-label": "What can be filtered by" },
      el("h2", { tabindex: "-1" }, "Filter"),
      el(
        "p",
        {},
        "Comparisons of the names below with numbers or each other, with + - * / between them, and words, which are looked for in names, roles, descriptions and tokens; joined by & | ! and brackets. With an arrow between two tokens, a pair of query and key that stands out.",
      ),
      el("p", {}, el("code", {}, 'layer > 3 & !role:first_token & (near | token:"[CLS]" | it -> animal)')),
      el("dl", {}, rows),
      el("form", { method: "dialog" }, el("button", {}, "Close")),
    );
  }

  /** Shows what can be filtered by, from its beginning: the browser would open it at the button at its end. */
  explain() {
    this.names.showModal();
    this.names.firstElementChild.focus();
    this.names.scrollTop = 0;
  }

  focus() {
    this.list.focus({ preventScroll: true });
  }

  name() {
    return "atlas";
  }

  select() {
    const { heads, columns, facts } = catalogs.current;
    if (this.filtered !== state.f) {
      this.filtered = state.f;
      const { test, namedPairs, wrong } = filterOf(state.f, facts);
      if (!wrong || !this.passes) {
        this.passes = heads.map(({ at }) => test(at));
        // As the card and the docs sort pairs: by the lower end of the lift, so that a chance pair is not first.
        const named = (at) => facts.pairs[at].filter((pair) => isNamed(namedPairs, pair)).map(([, , lift, low]) => ({ lift, low: low ?? 0 }));
        const best = (at) => named(at).sort((a, b) => b.low - a.low)[0] || null;
        this.lifts = namedPairs.length ? heads.map(({ at }) => best(at)) : null;
      }
      fill(this.wrong, wrong);
      this.input.setAttribute("aria-invalid", String(!!wrong));
    }
    const [x, y] = sidesOf();
    const area = state.br ? state.br.split(",").map(Number) : null;
    const within = (at) =>
      !area || (x.values[at] >= area[0] && x.values[at] <= area[1] && y.values[at] >= area[2] && y.values[at] <= area[3]);
    this.area = area;
    this.shown = this.passes.map((pass, at) => pass && within(at));
    const by = state.o.replace("-", "");
    const down = state.o.startsWith("-") ? -1 : 1;
    const marks = Object.keys(manifest.roles?.marks || {});
    const keyOf = {
      "": (at) => (this.lifts ? -(this.lifts[at]?.low ?? -1) : at),
      name: (at) => at,
      role: (at) => (heads[at].roles.length ? marks.indexOf(heads[at].roles[0].name) : marks.length),
      words: (at) => heads[at].words,
    }[by];
    const values = columns.get(by)?.values;
    const order = heads.map(({ at }) => at).filter((at) => this.shown[at]);
    if (values) order.sort((a, b) => (values[b] === values[b]) - (values[a] === values[a]) || down * (values[a] - values[b]) || a - b);
    else order.sort((a, b) => down * (keyOf(a) < keyOf(b) ? -1 : keyOf(a) > keyOf(b) ? 1 : 0) || a - b);
    this.order = order;
  }

  show() {
    this.select();
    if (document.activeElement !== this.input) this.input.value = state.f;
    else if (!state.f && this.input.value) this.input.value = "";
    const [x, y] = sidesOf();
    this.x.show(x.name);
    this.y.show(y.name);
    this.colour.show(colourColumn()?.name || "role");
    for (const side of [x, y]) side.usual ??= this.usualBaseline(side);
    this.colours = this.app.palette;
    const { colours, shown, area } = this;
    const { baseline } = catalogs.current;
    this.scatter.set({ x, y, colours, shown, area, baseline, colourOf: this.colourOf(), tell: (head) => this.tell(head) });
    this.showHeader(x, y);
    this.paint();
    this.tellCount();
    this.root.dataset.shown = String(this.order.length);
  }

  /** The baseline of a column: one number where all heads have about the same. */
  usualBaseline({ baselines }) {
    const sorted = [...baselines].filter(Number.isFinite).sort((a, b) => a - b);
    const [low, middle, high] = [0.1, 0.5, 0.9].map((share) => sorted[Math.floor(sorted.length * share)]);
    return high - low <= 0.1 * Math.abs(high) + 1e-9 ? middle : NaN;
  }

  colourOf() {
    const { heads } = catalogs.current;
    const column = colourColumn();
    const name = [column?.name, this.colours.scheme, state.f].join("|");
    if (!column) {
      if (this.legendName !== name) this.showRoles();
      this.legendName = name;
      return (at) => markOf(heads[at])?.color || this.colours.faint;
    }
    const finite = [...column.values].filter(Number.isFinite);
    const [low, high] = [Math.min(...finite), Math.max(...finite)];
    const { css } = this.colours.sequential;
    if (this.legendName !== name) {
      const bar = el("i", {});
      showGradient(bar, [FAINTEST, 100, 150, 200, 255].map((step) => css[step]));
      fill(this.legend, el("span", { class: "scale" }, shortNumber(low), bar, shortNumber(high), faint(column.title)));
    }
    this.legendName = name;
    return (at) => {
      const value = column.values[at];
      return value === value ? css[FAINTEST + Math.round((stepOf(value, low, high) * (255 - FAINTEST)) / 255)] : this.colours.rule;
    };
  }

  showRoles() {
    // As the filter of the chip finds them: a head with two roles counts for both, and has the colour of the first.
    const roles = catalogs.current.heads.map((head) => (head.roles.length ? head.roles.map(({ name }) => name) : ["unclassified"]));
    const chosen = state.f.startsWith("role:") ? state.f.slice(5) : "";
    showRoles(this.legend, roles, chosen, (name) => update({ f: chosen === name ? "" : `role:${name}` }));
  }

  /** Columns of numbers in the list: what the scatter shows, and what the colour is. */
  numbers() {
    const [x, y] = sidesOf();
    return [...new Set([y, x, colourColumn(), catalogs.current.columns.get(state.o.replace("-", ""))])]
      .filter((column) => column && column.name !== "layer" && column.name !== "head")
      .slice(0, 3);
  }

  showHeader() {
    const numbers = this.numbers();
    const name = [state.o, ...numbers.map((column) => column.name)].join();
    if (this.headerName === name) return;
    this.headerName = name;
    const [isDown, now] = [state.o.startsWith("-"), state.o.replace("-", "")];
    const cell = (by, text, title, kind = "") => {
      const isSorted = now === by;
      const [first, second] = kind ? [`-${by}`, by] : [by, `-${by}`]; // of numbers the largest first
      const turn = () => update({ o: state.o === first ? second : state.o === second ? "" : first });
      const facts = { class: kind, "data-sort": by, title: `sort by ${title}`, "aria-pressed": String(isSorted) };
      return button([el("span", {}, text), isSorted ? (isDown ? " \u2193" : " \u2191") : ""], turn, facts);
    };
    const focused = document.activeElement?.dataset?.sort;
    fill(
      this.header,
      cell("name", "head", "layer and head"),
      cell("role", "role", "role"),
      catalogs.current.heads.some(({ words }) => words) ? cell("words", "what it does", "description") : el("span", {}),
      numbers.map((column) => cell(column.name, column.label, column.title, "number")),
    );
    if (focused) this.header.querySelector(`[data-sort="${CSS.escape(focused)}"]`)?.focus();
    this.root.style.setProperty("--numbers", String(numbers.length));
  }

  /** Puts the lines of the list in order; they are made anew where other numbers stand in them. */
  paint() {
    const { heads } = catalogs.current;
    const numbers = this.numbers();
    const name = [state.f, ...numbers.map((column) => column.name)].join("|");
    if (name !== this.linesName) this.lines = heads.map((head) => this.line(head, numbers));
    this.linesName = name;
    this.list.replaceChildren(...this.order.map((at) => this.lines[at]));
    this.order.forEach((at, place) => this.lines[at].setAttribute("aria-posinset", place + 1));
    this.showActive();
  }

  line(head, numbers) {
    const [role] = head.roles;
    const lift = this.lifts?.[head.at]?.lift;
    const what = "how much more attention the key gets of the query than an even share";
    const isPercent = ({ unit, name }) => unit === "share" && name === "kl_explained";
    return el(
      "div",
      { class: "row", role: "option", id: `head${head.at}`, "data-at": head.at, "aria-setsize": this.order.length },
      el("b", {}, head.name),
      role ? roleChip(role, "", true) : faint("\u2013"),
      el("span", { class: "words" }, lift ? el("strong", { title: what }, `${shortNumber(lift)}\u00d7 `) : null, head.words),
      numbers.map((column) => el("span", { class: "number" }, (isPercent(column) ? percent : shortNumber)(column.values[head.at]))),
    );
  }

  showActive() {
    this.lines.forEach((line, at) => {
      line.classList.toggle("active", at === this.active);
      line.setAttribute("aria-selected", String(at === this.active));
    });
    if (this.order.includes(this.active)) this.list.setAttribute("aria-activedescendant", `head${this.active}`);
    else this.list.removeAttribute("aria-activedescendant");
  }

  headAt(target) {
    const line = target.closest?.("[data-at]");
    return line ? Number(line.dataset.at) : -1;
  }

  hover(head, where) {
    if (head === this.active && where === "list") return;
    this.active = head;
    if (where === "list") this.scatter.point(head);
    this.showActive();
    if (head >= 0 && where === "plot") say(`${catalogs.current.heads[head].name}: ${catalogs.current.heads[head].words}`);
  }

  open(head) {
    if (head < 0) return;
    update({ v: "head", ...atHead(catalogs.current.heads[head].name) });
  }

  key(event) {
    if (isShortcut(event)) return;
    const place = this.order.indexOf(this.active);
    const page = 10;
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 }[event.key];
    if (step) {
      const next = Math.max(0, Math.min(this.order.length - 1, place < 0 ? 0 : place + step));
      this.active = this.order[next] ?? -1;
      this.lines[this.active]?.scrollIntoView({ block: "nearest" });
      this.showActive();
      this.scatter.point(this.active);
    } else if (isChoice(event)) this.open(this.active);
    else return;
    takeEvent(event);
  }

  tell(at) {
    const head = catalogs.current.heads[at];
    const columns = [...new Set([...sidesOf(), colourColumn()])].filter(Boolean);
    return [
      el("p", {}, el("b", {}, head.name), head.roles.map((role) => roleChip(role))),
      head.words ? el("p", {}, head.words) : null,
      el("p", { class: "faint" }, columns.map((column) => `${column.label} ${shortNumber(column.values[at])}`).join(" \u00b7 ")),
    ].filter(Boolean);
  }

  tellCount() {
    const { heads } = catalogs.current;
    const n = this.order.length;
    const count = el("b", {}, n === heads.length ? `${n}` : `${n} of ${heads.length}`);
    const noun = ` head${heads.length === 1 ? "" : "s"}${n ? "" : `: type ${this.hint()}`}`;
    const clear = state.br ? button("clear the brush", () => update({ br: "" }), { class: "chip" }) : null;
    fill(this.count, el("span", {}, count, noun), clear);
  }

  async figure() {
    return this.scatter.figure();
  }

  async rows() {
    const { heads, columns } = catalogs.current;
    const all = [...columns.values()].filter(({ name }) => name !== "layer" && name !== "head");
    return [
      ["kind", "layer", "head", "roles", "description", ...all.map(({ name }) => name), "address"],
      ...this.order.map((at) => {
        const head = heads[at];
        const numbers = all.map(({ values }) => (values[at] === values[at] ? values[at] : ""));
        const roles = head.roles.map(({ name }) => name).join("+");
        const address = addressOf({ ...state, v: "head", head: head.name, ex: -1 });
        return [head.kind, head.layer, head.head, roles, head.words, ...numbers, address];
      }),
    ];
  }

  /** The heads one after the other, as the list has them. */
  step(by) {
    if (!this.order) this.select();
    const { heads } = catalogs.current;
    const { at } = headOf();
    const order = this.order.includes(at) ? this.order : [...heads.keys()];
    return heads[neighbour(order, at, by)].name;
  }
}
