// Queries and keys: the sampled tokens of a head as points in the directions that make its scores, or its outputs.
import { catalogs } from "./catalog.js";
import { dotOf, el, faint, fill, segmented, select, showGradient, tokenOf } from "./dom.js";
import { Scatter } from "./scatter.js";
import { update } from "./state.js";
import { percent, shortNumber } from "./wording.js";

const CODES = 127; // as records have it
const PLANES = [["0,1", "1 and 2"], ["0,2", "1 and 3"], ["1,2", "2 and 3"]];
const COLOURS = [["side", "query or key"], ["what", "kind of token"], ["place", "position"], ["label", "token"]];
const LETTERS = { word: "word", capitalised: "capitalised", piece: "piece of a word", number: "number", punctuation: "punctuation" };
const MOST_NAMED = 8; // tokens that have a colour of their own
const MOST_KEYS = 5;
const TURNED = {
  never: "",
  before: " Queries and keys are as they are before rotary positions: scores are those of two tokens at the same position.",
  after: " Queries and keys are as rotary positions turned them, each at its own position.",
};

export class Plane {
  constructor(app) {
    this.app = app;
    [this.what, this.axes, this.by] = ["scores", "0,1", "side"];
    const change = (name, control) => (value) => {
      this[name] = value;
      control().show(value);
      this.draw();
    };
    this.side = segmented("What is shown", [["scores", "queries, keys"], ["outputs", "outputs"]], change("what", () => this.side));
    this.directions = select("Directions", PLANES, change("axes", () => this.directions));
    this.colour = select("Colour", COLOURS, change("by", () => this.colour));
    this.legend = el("div", { class: "roles" });
    this.scatter = new Scatter(
      { hover: (at) => this.point(at), open: (at) => this.open(at), brush: () => {} },
      { kind: "plot of queries and keys", label: "Tokens as points. Arrow keys go to the next one, Enter opens the example that has it." },
    );
    this.read = el("p", { class: "faint planeread" });
    this.facts = el("p", { class: "faint" });
    this.about = el("span", { class: "faint" });
    this.root = el(
      "section",
      { class: "plane", "aria-label": "Queries and keys" },
      el("div", { class: "sectionhead" }, el("h2", {}, "Queries and keys ", this.about), this.side),
      el("div", { class: "fields" }, this.directions, this.colour),
      this.legend,
      this.scatter.root,
      this.read,
      this.facts,
    );
    for (const [control, value] of [[this.side, this.what], [this.directions, this.axes], [this.colour, this.by]]) control.show(value);
  }

  /** Shows the points of a head; hidden where the record has none. */
  show(card, head) {
    const { planes, plane_tokens: tokens } = catalogs.current.record;
    this.root.hidden = !card?.points || !planes?.length;
    if (this.root.hidden) return;
    const anew = this.card !== card;
    [this.card, this.head, this.plane] = [card, head, planes[head.at]];
    this.tokens = tokens.filter(({ kind }) => kind === head.kind);
    const n = new Set(this.tokens.map(({ text }) => text)).size;
    fill(this.about, `${this.tokens.length} tokens of ${n} texts`);
    this.draw(anew);
  }

  /** The codes of a point, by side, in all directions. */
  at(side, token) {
    return Array.from(this.card.points[side].subarray(3 * token, 3 * token + 3));
  }

  get sides() {
    return this.what === "outputs" ? ["outputs"] : ["queries", "keys"];
  }

  draw(anew = true) {
    const { colours, tokens, sides, plane } = this;
    const [a, b] = this.axes.split(",").map(Number);
    const outputs = this.what === "outputs";
    const worth = (outputs ? plane.largest_output : plane.largest) / CODES;
    const explained = outputs ? plane.explained_outputs : plane.explained;
    const column = (axis) => ({
      name: "",
      title: `${outputs ? "component" : "direction"} ${axis + 1}: ${percent(explained[axis] ?? NaN)} of ${outputs ? "the outputs'" : "the scores'"} variance`,
      values: Float64Array.from(sides.flatMap((side) => tokens.map((_, token) => worth * this.card.points[side][3 * token + axis]))),
      even: 0,
    });
    if (anew) this.scatter.point(-1);
    this.scatter.beside = [];
    const colourOf = this.colourOf();
    this.scatter.set({
      x: column(a), y: column(b), colours, shown: sides.flatMap(() => tokens.map(() => true)), area: null, even: "", square: true,
      colourOf: (at) => colourOf(at % tokens.length, at),
      shapeOf: (at) => (at < tokens.length ? "dot" : "box"),
      tell: (at) => this.tell(at),
    });
    this.point(this.scatter.head);
    const common = plane.common[a] > 0.5 ? ` ${percent(plane.common[a])} of direction ${a + 1} is common to all queries: they look for the same keys along it.` : "";
    const shareByPlace = (axis) => `${percent(plane.by_place[axis])} of the keys' spread along direction ${axis + 1}`;
    const byPlace = [a, b].filter((axis) => plane.by_place[axis] > 0.5).map(shareByPlace);
    const places = byPlace.length ? ` Position in the text accounts for ${byPlace.join(", and ")}.` : "";
    const chance = `Were all directions alike, each would have ${percent(1 / plane.d_head)}.`;
    const scores = `A query looks for keys that lie in its own direction from 0, the further out the more. ${chance}${common}${places}${TURNED[plane.turned] || ""}`;
    fill(this.facts, outputs ? "What the head adds to the stream at each token: its principal components." : scores);
  }

  get colours() {
    return this.app.palette;
  }

  colourOf() {
    const { tokens, colours } = this;
    const outputs = this.what === "outputs";
    if (this.by === "side") {
      const [query, key] = colours.several;
      const entry = (mark, colour, name) => {
        const shape = el("b", {}, mark);
        shape.style.color = colour;
        return el("span", {}, shape, ` ${name}`);
      };
      fill(this.legend, entry("\u25cf", query, outputs ? "output" : "query"), outputs ? null : entry("\u25a0", key, "key"));
      return (_, at) => (at < tokens.length ? query : key);
    }
    const shapes = outputs ? null : faint("\u25cf query \u25a0 key");
    if (this.by === "place") {
      const last = Math.max(1, ...tokens.map(({ place }) => place));
      const { css } = colours.sequential;
      const step = (place) => css[60 + Math.round((195 * Math.log1p(place)) / Math.log1p(last))];
      const bar = el("i", {});
      showGradient(bar, [0, 0.25, 0.5, 0.75, 1].map((share) => css[60 + Math.round(195 * share)]));
      fill(this.legend, shapes, el("span", { class: "scale" }, "1", bar, String(last), faint("position in its text")));
      return (token) => step(tokens[token].place);
    }
    const counts = new Map();
    for (const token of tokens) counts.set(token[this.by], (counts.get(token[this.by]) || 0) + 1);
    const byCount = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a)).slice(0, MOST_NAMED);
    const names = this.by === "what" ? Object.keys(LETTERS).filter((name) => counts.has(name)) : byCount;
    const colour = new Map(names.map((name, at) => [name, colours.several[at]]));
    fill(
      this.legend,
      shapes,
      names.map((name) => {
        const label = this.by === "what" ? LETTERS[name] : name;
        return el("span", { class: "role" }, dotOf(colour.get(name)), label, el("small", { class: "faint" }, ` ${counts.get(name)}`));
      }),
    );
    return (token) => colour.get(tokens[token][this.by]) || colours.rule;
  }

  /** The keys that a query scores highest, or the queries that score a key highest, by the directions that are kept: [token, score]. */
  strongest(at) {
    const n = this.tokens.length;
    const [mine, others] = at < n ? ["queries", "keys"] : ["keys", "queries"];
    const from = this.at(mine, at % n);
    const worth = (this.plane.largest / CODES) ** 2;
    const product = (codes) => codes.reduce((sum, code, axis) => sum + code * from[axis], 0);
    const scores = this.tokens.map((_, token) => [token, worth * product(this.at(others, token))]);
    return scores.sort((a, b) => b[1] - a[1]).slice(0, MOST_KEYS);
  }

  point(at) {
    const outputs = this.what === "outputs";
    const n = this.tokens.length;
    const best = at < 0 || outputs ? [] : this.strongest(at);
    this.scatter.beside = best.map(([token]) => (at < n ? token + n : token));
    this.scatter.mark();
    if (at < 0) return fill(this.read, "point at a token, or walk with the arrow keys");
    const [side, verb] = outputs ? ["", ""] : at < n ? ["query ", " scores highest:"] : ["key ", " is scored highest by:"];
    const others = best.map(([other, score], rank) => [rank ? ", " : " ", tokenOf(this.tokens[other].label), ` ${shortNumber(score)}`]);
    fill(this.read, side, tokenOf(this.tokens[at % n].label), verb, others);
  }

  tell(at) {
    const token = this.tokens[at % this.tokens.length];
    const letters = Array.from(token.excerpt);
    const part = (from, to) => letters.slice(from, to).join("");
    return [
      el("div", {}, part(0, token.start), el("b", {}, part(token.start, token.stop) || token.label), part(token.stop)),
      el("div", { class: "faint" }, `position ${token.place}${this.exampleOf(at) >= 0 ? " \u00b7 click: its example" : ""}`),
    ];
  }

  /** The example of this head that has the token; -1 = none. */
  exampleOf(at) {
    const { text, place, label } = this.tokens[at % this.tokens.length];
    return this.card.examples.findIndex((example) => example.text === text && example.labels[example.places.indexOf(place)] === label);
  }

  open(at) {
    const ex = this.exampleOf(at);
    if (ex < 0) return;
    const example = this.card.examples[ex];
    const keys = this.what !== "outputs" && at >= this.tokens.length;
    update({ tab: example.why, ex, q: example.places.indexOf(this.tokens[at % this.tokens.length].place), side: keys ? "k" : "q" });
    setTimeout(() => document.querySelector(`article[data-example="${ex}"]`)?.scrollIntoView({ block: "nearest" }), 100);
  }
}
