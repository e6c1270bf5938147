// Examples of a head: texts whose tokens show what they attend to, and who attends to them.
import { stepOf } from "./colour.js";
import { areFew, catalogs, headOf, openExample, percent, piecesOf, shortNumber } from "./catalog.js";
import { el, fill, say, segmented } from "./dom.js";
import { state, update } from "./state.js";
import { nextToken, shadeToken } from "./words.js";

const TABS = { top: "Top", decile: "Deciles", failure: "Failures" };
const TOLD = {
  top: "the texts where it scores highest",
  decile: "a text from each tenth of all its scores, lowest first: what is typical",
  failure: "the texts with tokens whose attention its description explains worst",
};
const LEAST_SAID = 0.05; // weights from which on a number stands over the token

export class Examples {
  constructor(app) {
    this.app = app;
    this.tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "Examples" });
    this.tabs.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      const open = Object.keys(TABS).filter((tab) => this.numbers(tab).length);
      update({ tab: open[(open.indexOf(state.tab) + step + open.length) % open.length], ex: -1, q: -1 });
      this.byKeys = true;
    });
    this.side = segmented(
      "Direction",
      [
        ["q", "attends to", "what a token attends to"],
        ["k", "attended by", "who attends to a token"],
      ],
      (side) => update({ side }),
    );
    this.about = el("p", { class: "faint about" });
    this.list = el("div", { class: "examples", id: "examples", role: "tabpanel" });
    this.root = el("div", { class: "showcase" }, el("div", { class: "sectionhead" }, this.tabs, this.side), this.about, this.list);
    const token = (event) => event.target.closest("[data-token]");
    this.list.addEventListener("pointerover", (event) => token(event) && this.point(token(event)));
    this.list.addEventListener("pointerout", (event) => token(event) && !event.relatedTarget?.closest?.("[data-token]") && this.rest(token(event)));
    this.list.addEventListener("focusin", (event) => token(event) && this.point(token(event)));
    this.list.addEventListener("focusout", (event) => token(event) && this.rest(token(event)));
    this.list.addEventListener("click", (event) => token(event) && this.pin(token(event)));
    this.list.addEventListener("keydown", (event) => this.key(event));
  }

  numbers(tab) {
    return this.card.examples.map((_, at) => at).filter((at) => this.card.examples[at].why === tab);
  }

  show(card) {
    this.card = card;
    this.few = areFew(card.examples);
    const tabs = Object.keys(TABS).filter((tab) => this.numbers(tab).length);
    if (!tabs.includes(state.tab)) state.tab = tabs[0] || "top";
    fill(
      this.tabs,
      tabs.map((tab) =>
        el(
          "button",
          {
            type: "button",
            role: "tab",
            "data-tab": tab,
            "aria-selected": String(tab === state.tab),
            "aria-controls": "examples",
            tabindex: tab === state.tab ? "0" : "-1",
            onclick: () => update({ tab, ex: -1, q: -1 }),
          },
          `${tab === "decile" && this.few ? "All texts" : TABS[tab]} ${this.numbers(tab).length}`,
        ),
      ),
    );
    if (this.byKeys) this.tabs.querySelector("[aria-selected=true]")?.focus();
    this.byKeys = false;
    this.side.show(state.side);
    const { rank } = catalogs.shown.record;
    const score = el("abbr", { title: catalogs.shown.options.rank || "" }, rank.replaceAll("_", " "));
    const n = this.numbers("decile").length;
    const all = `${n === 1 ? "the only text" : `all ${n} texts, lowest score first`}: there are too few for deciles`;
    fill(this.about, state.tab === "decile" && this.few ? all : TOLD[state.tab], state.tab === "failure" ? null : [" (", score, ")"], " \u00b7 point at a token, or walk with the arrow keys");
    const name = [state.head, state.tab].join();
    if (this.built !== card || this.name !== name) this.build(card);
    [this.built, this.name] = [card, name];
    for (const number of this.numbers(state.tab)) this.shade(number);
  }

  build(card) {
    this.spans = new Map();
    this.reads = new Map();
    fill(this.list, this.numbers(state.tab).map((number) => this.article(card.examples[number], number)), state.tab === "failure" && card.worst?.length ? this.worst(card.worst) : null);
  }

  /** The tokens that suffer most with the head's line in place, and whether its description fails there too. */
  worst(tokens) {
    const failures = headOf().description?.failures || [];
    const also = (token) => failures.some((one) => one.text === token.text && (one.place === token.place || one.place === token.place - 1));
    const change = ({ loss, change }) => (Number.isFinite(loss) ? `loss ${shortNumber(loss)} to ${shortNumber(loss + change)} nats` : `its hidden state changes by ${percent(change)}`);
    return el(
      "section",
      { class: "worst" },
      el("h2", {}, "With its line in place, the model suffers most at"),
      tokens.map((token) =>
        el("p", { class: "prose", dir: "auto" }, `${token.before} `, el("b", {}, token.token), el("span", { class: "faint" }, ` ${change(token)} \u00b7 ${token.source}${also(token) ? " \u00b7 its description fails here too" : ""}`)),
      ),
    );
  }

  article(example, number) {
    const spans = [];
    const body = el("p", { class: "prose", dir: "auto", role: "group", "aria-label": `Example ${number + 1}` });
    piecesOf(example).forEach(([before, shown], at) => {
      if (before) body.append(before);
      const span = el(
        "span",
        { class: example.special.has(at) ? "tok chip-token" : "tok", ...(example.special.has(at) && { dir: "ltr" }), role: "button", tabindex: at === Math.max(0, example.focus) ? "0" : "-1", "data-token": at, "data-example": number },
        shown,
      );
      spans.push(span);
      body.append(span);
      if (example.special.has(at)) body.append(" ");
    });
    this.spans.set(number, spans);
    const read = el("div", { class: "reading" });
    this.reads.set(number, read);
    const open = (view, said) =>
      el("button", { type: "button", "data-open": view, title: `open as ${said}`, onclick: () => openExample(number, view).then(update) }, said);
    const { why, rank } = example;
    const inDecile = why === "decile" && !this.few;
    const place = why === "decile" ? this.numbers("decile").indexOf(number) : rank;
    const ends = inDecile && catalogs.shown.record.deciles?.[headOf().at]?.slice(rank, rank + 2).map((end) => shortNumber(end ?? NaN));
    const failure = this.failureOf(example);
    const cut = example.length < example.n_tokens ? `${example.length} of ${example.n_tokens} tokens` : `${example.n_tokens} tokens`;
    return el(
      "article",
      { "data-example": number },
      el(
        "div",
        { class: "exhead" },
        el("b", {}, inDecile ? `${10 * rank}\u2013${10 * rank + 10}%` : String(place + 1)),
        Number.isFinite(example.score) ? el("span", {}, "score ", el("b", {}, shortNumber(example.score))) : null,
        ends ? el("span", { class: "faint ends", title: "the lowest scores of this tenth of the sampled texts and of the next" }, `${ends[0]} to ${ends[1]}`) : null,
        failure ? el("span", {}, el("b", {}, shortNumber(failure.nats)), " nats off") : null,
        el("span", { class: "faint source" }, `${example.source} \u00b7 ${cut}`),
        el("span", { class: "buttons" }, open("matrix", "matrix"), open("links", "links")),
      ),
      body,
      read,
    );
  }

  /** Of an example that the description fails on, what it fails by. */
  failureOf({ why, rank }) {
    return why === "failure" ? headOf().description?.failures?.[rank] : null;
  }

  /** What the description expects of the token that it fails on, while that one is looked at: keys with weights. */
  expectedOf(number, focus) {
    const example = this.card.examples[number];
    return (focus === example.focus && state.side === "q" && this.failureOf(example)?.predicted) || [];
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
    const weights = new Map();
    if (focus >= 0 && focus < example.length) for (const [token, weight] of state.side === "q" ? example.row(focus) : example.column(focus)) weights.set(token, weight);
    const expected = new Set(this.expectedOf(number, focus).map(({ place }) => example.places.indexOf(place)));
    spans.forEach((span, at) => {
      span.classList.toggle("expected", expected.has(at));
      const weight = weights.get(at) || 0;
      shadeToken(span, stepOf(weight, 0, 1), this.app.palette.one);
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
    const named = (token, also = "") => el("q", { class: `token${also}` }, this.spans.get(number)[token].textContent.trim() || example.labels[token]);
    const listed = (found) => {
      const rest = found.length > 4 ? el("span", { class: "faint" }, ` and ${found.length - 4} more`) : null;
      return [
        found.slice(0, 4).map(([token, weight], at) => [at ? ", " : " ", named(token), ` ${weight.toFixed(2)}`]),
        rest,
      ];
    };
    const [gives, gets] = [example.row(focus), example.column(focus)];
    const expected = this.expectedOf(number, focus);
    const words = expected.map(({ place, token, weight }, at) => {
      const shown = example.places.indexOf(place);
      return [at ? ", " : " ", shown < 0 ? el("q", { class: "token" }, token) : named(shown), ` ${weight.toFixed(2)}`];
    });
    fill(
      read,
      el("span", {}, named(focus, " mine"), " attends to", gives.length ? listed(gives) : " nothing"),
      words.length ? el("span", { class: "wanted" }, "its description expects", words) : null,
      el("span", { class: "faint" }, gets.length ? ["attended by", listed(gets)] : "hardly attended to"),
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
    if (!span || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Enter" || event.key === " ") {
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
