// Examples of a head: texts whose tokens show what they attend to, and who attends to them.
import { stepOf } from "./colour.js";
import { areFew, catalogs, headOf, openExample, piecesOf } from "./catalog.js";
import { SIDEWAYS, button, el, faint, fill, isChoice, isShortcut, neighbour, onSteps, say, tokenOf } from "./dom.js";
import { state, update } from "./state.js";
import { directions, nextToken, shadeToken } from "./words.js";
import { shortNumber } from "./wording.js";

const TABS = { top: "Top", decile: "Deciles" };
const WHAT = {
  top: "the texts where it scores highest",
  decile: "a text from each tenth of all its scores, lowest first: what is typical",
};
const LEAST_SAID = 0.05; // weights from which on a number stands over the token

export class Examples {
  constructor(app) {
    this.app = app;
    this.tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "Examples" });
    onSteps(this.tabs, SIDEWAYS, (step) => {
      update({ tab: neighbour(this.openTabs(), state.tab, step), ex: -1, q: -1 });
      this.byKeys = true;
    });
    this.side = directions({ q: "what a token attends to", k: "who attends to a token" }, (side) => update({ side }));
    this.about = el("p", { class: "faint about" });
    this.list = el("div", { class: "examples", id: "examples", role: "tabpanel" });
    this.root = el("div", { class: "showcase" }, el("div", { class: "sectionhead" }, this.tabs, this.side), this.about, this.list);
    const on = (name, act) => this.list.addEventListener(name, (event) => {
      const token = event.target.closest("[data-token]");
      if (token) act(token, event);
    });
    on("pointerover", (token) => this.point(token));
    on("pointerout", (token, { relatedTarget }) => relatedTarget?.closest?.("[data-token]") || this.rest(token));
    on("focusin", (token) => this.point(token));
    on("focusout", (token) => this.rest(token));
    on("click", (token) => this.pin(token));
    this.list.addEventListener("keydown", (event) => this.key(event));
  }

  numbers(tab) {
    return this.card.examples.map((_, at) => at).filter((at) => this.card.examples[at].why === tab);
  }

  openTabs() {
    return Object.keys(TABS).filter((tab) => this.numbers(tab).length);
  }

  show(card) {
    this.card = card;
    this.few = areFew(card.examples);
    const tabs = this.openTabs();
    if (!tabs.includes(state.tab)) state.tab = tabs[0] || "top";
    fill(
      this.tabs,
      tabs.map((tab) => {
        const isSelected = tab === state.tab;
        const facts = { role: "tab", "data-tab": tab, "aria-selected": String(isSelected), "aria-controls": "examples" };
        const text = `${tab === "decile" && this.few ? "All texts" : TABS[tab]} ${this.numbers(tab).length}`;
        return button(text, () => update({ tab, ex: -1, q: -1 }), { ...facts, tabindex: isSelected ? "0" : "-1" });
      }),
    );
    if (this.byKeys) this.tabs.querySelector("[aria-selected=true]")?.focus();
    this.byKeys = false;
    this.side.show(state.side);
    const { rank, score: meaning } = catalogs.current.record.meanings;
    const score = el("abbr", { title: meaning }, rank.replaceAll("_", " "));
    const n = this.numbers("decile").length;
    const all = `${n === 1 ? "the only text" : `all ${n} texts, lowest score first`}: there are too few for deciles`;
    const what = state.tab === "decile" && this.few ? all : WHAT[state.tab];
    const hint = " \u00b7 point at a token, or walk with the arrow keys";
    fill(this.about, what, " (", score, ")", hint);
    const name = [state.head, state.tab].join();
    if (this.built !== card || this.name !== name) this.build(card);
    [this.built, this.name] = [card, name];
    for (const number of this.numbers(state.tab)) this.shade(number);
  }

  build(card) {
    this.spans = new Map();
    this.reads = new Map();
    const articles = this.numbers(state.tab).map((number) => this.article(card.examples[number], number));
    fill(this.list, articles);
  }

  article(example, number) {
    const spans = [];
    const body = el("p", { class: "prose", dir: "auto", role: "group", "aria-label": `Example ${number + 1}` });
    piecesOf(example).forEach(([before, shown], at) => {
      if (before) body.append(before);
      const isSpecial = example.special.has(at);
      const kind = isSpecial ? { class: "tok chip-token", dir: "ltr" } : { class: "tok" };
      const tabindex = at === Math.max(0, example.focus) ? "0" : "-1";
      spans.push(el("span", { ...kind, role: "button", tabindex, "data-token": at, "data-example": number }, shown));
      body.append(spans.at(-1));
      if (isSpecial) body.append(" ");
    });
    this.spans.set(number, spans);
    const read = el("div", { class: "reading" });
    this.reads.set(number, read);
    return el("article", { "data-example": number }, this.headOfArticle(example, number), body, read);
  }

  /** What stands above an example: its rank, its score, where it is from; and what opens it as a map. */
  headOfArticle(example, number) {
    const open = (view) =>
      button(view, () => openExample(number, view).then(update), { "data-open": view, title: `open as ${view}` });
    const { why, rank, n_tokens: n } = example;
    const inDecile = why === "decile" && !this.few;
    const place = why === "decile" ? this.numbers("decile").indexOf(number) : rank;
    const ends = inDecile && catalogs.current.record.deciles?.[headOf().at]?.slice(rank, rank + 2).map((end) => shortNumber(end));
    const title = "the lowest scores of this tenth of the sampled texts and of the next";
    return el(
      "div",
      { class: "exhead" },
      el("b", {}, inDecile ? `${10 * rank}\u2013${10 * rank + 10}%` : String(place + 1)),
      Number.isFinite(example.score) ? el("span", {}, "score ", el("b", {}, shortNumber(example.score))) : null,
      ends ? el("span", { class: "faint ends", title }, `${ends[0]} to ${ends[1]}`) : null,
      el("span", { class: "faint source" }, `${example.source} \u00b7 ${example.length < n ? `${example.length} of ${n}` : n} tokens`),
      el("span", { class: "buttons" }, open("matrix"), open("links")),
    );
  }

  /** The token of an example that is looked at: pointed at, chosen, else its own; -1 = none. */
  focusOf(number) {
    if (this.over?.number === number) return this.over.token;
    if (state.ex === number && state.q >= 0) return state.q;
    return this.card.examples[number].focus;
  }

  shade(number) {
    const example = this.card.examples[number];
    const spans = this.spans.get(number);
    const focus = this.focusOf(number);
    const isThere = focus >= 0 && focus < example.length;
    const weights = new Map(!isThere ? [] : state.side === "q" ? example.row(focus) : example.column(focus));
    spans.forEach((span, at) => {
      const weight = weights.get(at) || 0;
      shadeToken(span, stepOf(weight, 0, 1), this.app.palette.sequential);
      span.classList.toggle("focus", at === focus);
      span.setAttribute("aria-pressed", String(state.ex === number && state.q === at));
      if (weight >= LEAST_SAID) span.dataset.weight = weight.toFixed(2).slice(1).replace(".00", "1.0");
      else delete span.dataset.weight;
    });
    this.tell(number, focus);
  }

  tell(number, focus) {
    const example = this.card.examples[number];
    const read = this.reads.get(number);
    if (focus < 0) return fill(read);
    const spans = this.spans.get(number);
    const named = (at, attributes) => tokenOf(spans[at].textContent.trim() || example.labels[at], attributes);
    const list = (entries) => entries.map(([token, weight], at) => [at ? ", " : " ", token, ` ${weight.toFixed(2)}`]);
    const shortened = (entries) => [
      list(entries.slice(0, 4).map(([at, weight]) => [named(at), weight])),
      entries.length > 4 ? faint(` and ${entries.length - 4} more`) : null,
    ];
    const [gives, gets] = [example.row(focus), example.column(focus)];
    fill(
      read,
      el("span", {}, named(focus, { class: "token mine" }), " attends to", gives.length ? shortened(gives) : " nothing"),
      faint(gets.length ? ["attended by", shortened(gets)] : "hardly attended to"),
    );
  }

  point(span) {
    const before = this.over?.number;
    this.over = { number: Number(span.dataset.example), token: Number(span.dataset.token) };
    if (before !== undefined && before !== this.over.number && this.spans.has(before)) this.shade(before);
    this.shade(this.over.number);
  }

  rest(span) {
    const number = Number(span.dataset.example);
    this.over = null;
    if (this.spans.has(number)) this.shade(number);
  }

  pin(span) {
    const [ex, q] = [Number(span.dataset.example), Number(span.dataset.token)];
    update(state.ex === ex && state.q === q ? { ex: -1, q: -1 } : { ex, q });
  }

  key(event) {
    const span = event.target.closest("[data-token]");
    if (!span || isShortcut(event)) return;
    if (isChoice(event)) {
      event.preventDefault();
      return this.pin(span);
    }
    const next = nextToken(event, span, this.spans.get(Number(span.dataset.example)));
    if (!next) return;
    event.stopPropagation();
    span.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    say(this.reads.get(Number(span.dataset.example)).textContent);
  }
}
