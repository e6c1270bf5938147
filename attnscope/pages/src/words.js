// Words: tokens as they read, each to be pointed at and chosen; what the views of a text and of a photo begin with.
import { shadeBy } from "./colour.js";
import { digits, prose } from "./data.js";
import { clamp, el, isChoice, isShortcut, pairOf, readout, say, segmented } from "./dom.js";

/**
 * Tokens as they read, each to be chosen: the element, and the spans by the tokens' places.
 *
 * @param how `wanted(at)`: which tokens there are; `opening`: whether what stands before the first one is part of it
 */
export function pageOf(axis, side, heading, { wanted = () => true, opening = true } = {}) {
  const body = el("p", { class: "prose", dir: "auto", role: "group", "aria-label": heading || "The text" });
  const spans = [];
  let segment = 0;
  prose(axis).forEach(({ before, shown, chip }, at) => {
    if (!wanted(at)) return;
    const next = axis.tokens.segments ? axis.tokens.segments[axis.groups[at].first] : 0;
    if (next !== segment) body.append(el("br"), el("br"));
    segment = next;
    if (before && opening) body.append(before);
    opening ||= !chip;
    const kind = `tok${chip ? " chip-token" : ""}${axis.written[at] ? " written" : ""}`;
    const facts = { role: "button", tabindex: "-1", "data-at": at, "data-side": side, "aria-pressed": "false" };
    spans[at] = el("span", { class: kind, ...facts }, shown);
    body.append(spans[at]);
    if (chip) body.append(" ");
  });
  return { root: heading ? el("section", {}, el("h2", {}, heading), body) : body, spans };
}

/** Shades a token by the step of its colour; what is hardly weighed stays bare. */
export function shadeToken(span, step, table) {
  if (step < 2) span.style.backgroundColor = span.style.color = "";
  else shadeBy(span, step, table);
}

const JUMPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 };

/** The token that a key leads to from one of some; none where it is no key for that. */
export function nextToken(event, span, spans) {
  const step = JUMPS[event.key];
  if (!step) return null;
  event.preventDefault();
  return spans[clamp(spans.indexOf(span) + step, spans.length - 1)];
}

/** Buttons for the two ways of attention, each with its title. */
export function directions(titles, turn) {
  return segmented("Direction", [["q", "attends to", titles.q], ["k", "attended by", titles.k]], turn);
}

/** What the token of a side attends to, or who attends to it, in words; with the weight. */
export function attends(side, token, other, weight) {
  return [side === "q" ? pairOf(token, other) : pairOf(other, token), el("b", { class: "value" }, digits(weight))];
}

/**
 * A view of tokens: what it is made of beside its own parts, and their keys and pointers.
 *
 * One that extends it has `choose(span)`, `hear(span)` for the token that is pointed at (null = none), `turn(side)`,
 * `walked(span)`: the tokens that keys go through, and `heard(span)`: what is said of the one that they come to.
 */
export class WordsView {
  constructor(app, what) {
    this.app = app;
    this.title = el("div", { class: "title" });
    this.read = readout();
    const titles = { q: `what the chosen ${what} attends to`, k: `who attends to the chosen ${what}` };
    this.sides = directions(titles, (side) => this.turn(side));
    this.pages = el("div", { class: "pages" });
    this.list = el("div", {});
    const of = (event) => event.target.closest("[data-at]");
    this.pages.addEventListener("click", (event) => this.choose(of(event)));
    this.pages.addEventListener("pointerover", (event) => this.hear(of(event)));
    this.pages.addEventListener("pointerleave", () => this.hear(null));
    this.pages.addEventListener("focusin", (event) => this.focused(of(event)));
    this.pages.addEventListener("keydown", (event) => this.key(event, of(event)));
  }

  focused(span) {
    this.hear(span);
  }

  axis(side) {
    return side === "q" ? this.shown.rows : this.shown.columns;
  }

  /** What the token of a side gives to each key, or gets from each query; without a token the mean over `of` rows. */
  weightsOf(side, at, of) {
    const { rows, columns, values } = this.shown;
    const n = columns.length;
    if (side === "k") return Array.from(rows.labels, (_, row) => values[row * n + at]);
    if (at !== null) return Array.from(values.subarray(at * n, (at + 1) * n));
    return Array.from(columns.labels, (_, column) => of.reduce((sum, row) => sum + values[row * n + column], 0) / (of.length || 1));
  }

  beside() {
    return [this.list];
  }

  key(event, span) {
    if (!span || isShortcut(event)) return;
    if (isChoice(event)) {
      event.preventDefault();
      this.choose(span);
      say(span.textContent);
      return;
    }
    const next = nextToken(event, span, this.walked(span));
    if (!next) return;
    next.focus();
    say(this.heard(next));
  }
}
