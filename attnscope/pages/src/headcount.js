// Head count: the same queries, keys and values with 1, 2 and 4 heads, step by step.
import { inkOn, shadeBy, stepOf } from "./colour.js";
import { digits, manifest } from "./data.js";
import { button, el, fill, rowOf, segmented, toolbar } from "./dom.js";
import { state, update } from "./state.js";

/** Mathematics as it is set: a capital, or a letter with an underscore, is a variable, and what follows that its index. */
function maths(text) {
  return text.split(/([A-Za-z]_\w+|\b[A-Z]\b)/).map((part, at) => {
    const [base, below] = part.split("_");
    return at % 2 ? [el("var", {}, base), below ? el("sub", {}, below) : null] : part;
  });
}

const value = (number) => digits(number).replace(/\.0000$/, "");
const inRow = (numbers, write = digits) => numbers.map((number) => write(number)).join("  ");

/** The names of a table's columns; one without a name is that of its rows' names. */
const columnNames = (...names) =>
  el("thead", {}, el("tr", {}, names.map((name) => (name ? el("th", { scope: "col" }, name) : el("td", {})))));

/** A table with a line above it in a head's colour. */
function tableOfHead(attributes, colour, ...children) {
  const table = el("table", attributes, children);
  table.style.borderTopColor = colour;
  return table;
}

export class HeadCountView {
  constructor(app) {
    this.app = app;
    const { tokens, counts, outputs } = (this.example = manifest.headcount);
    this.counts = segmented("Heads", counts.map(({ n, name }) => [n, name]), (n) => update({ n }));
    this.tokens = segmented("Token", tokens.map((token, at) => [at, token]), (tok) => update({ tok }));
    this.outputs = segmented("Output projection", outputs.map((name) => [name, name]), (wo) => update({ wo }));
    const steps = counts[0].steps.map(({ name }, step) => {
      const text = [el("small", {}, String(step + 1)), name];
      return el("li", {}, button(text, () => update({ step }), { "data-step": step }));
    });
    this.steps = el("ol", { class: "pipeline", "aria-label": "Steps" }, steps);
    this.card = el("div", { class: "card" });
    this.maps = el("div", { class: "maps" });
    this.bars = el("div", { class: "bars" });
    const field = (label, control) => el("span", { class: "field" }, label, control);
    const hint = "Rows are queries, columns keys; every row sums to 1. The chosen token's row is marked.";
    this.root = el(
      "div",
      { class: "view headcount" },
      el("p", { class: "faint" }, "A worked example of five tokens, not your text or model."),
      toolbar(this.counts, field("token", this.tokens), field(el("span", {}, maths("W_O")), this.outputs)),
      this.steps,
      this.card,
      el("section", {}, el("h2", {}, "The maps"), el("p", { class: "faint" }, hint), this.maps),
      el("section", {}, el("h2", {}, "The same queries, keys and values with 1, 2 and 4 heads"), this.bars),
    );
  }

  show() {
    const { n, step } = state;
    this.now = this.example.counts.find((count) => count.n === n);
    this.counts.show(n);
    this.tokens.show(state.tok);
    this.outputs.show(state.wo);
    for (const choice of this.steps.querySelectorAll("button"))
      choice.setAttribute("aria-current", Number(choice.dataset.step) === step ? "step" : "false");
    const { formula, numpy, what } = this.now.steps[step];
    fill(
      this.card,
      el("div", { class: "formula", role: "math" }, maths(formula)),
      el("pre", { class: "numpy" }, el("code", {}, numpy)),
      el("p", {}, what),
      el("div", { class: "numbers" }, this.numbers()),
    );
    const figureOf = ({ name, weights }, head) => el("figure", {}, el("figcaption", {}, name), this.map(weights, head));
    fill(this.maps, this.now.heads.map(figureOf));
    this.showBars();
  }

  colour(head) {
    return this.app.palette.several[head];
  }

  /** A row of numbers with its name; each head's `split` columns under its colour. */
  vector(name, numbers, split = 0) {
    const cells = numbers.map((number, at) => {
      const cell = el("td", {}, value(number));
      if (split) cell.style.borderBottomColor = this.colour(Math.floor(at / split));
      return cell;
    });
    return rowOf(name, cells, { "data-name": name });
  }

  /** What the chosen token has in a matrix; without a name in the output. */
  numbersOf({ vectors }, name) {
    return vectors.find(([other]) => other === (name || state.wo))[1][state.tok];
  }

  numbers() {
    const { tok: at, step } = state;
    const { width, heads, steps } = this.now;
    const { caption, rows: names } = steps[step];
    if (!names) return heads.map((head, number) => this.attended(head, number));
    const rows = names.map(([label, name, isSplit]) => this.vector(label, this.numbersOf(this.now, name), isSplit ? width : 0));
    const title = el("caption", {}, `“${this.example.tokens[at]}”: ${caption}`);
    return el("table", { class: "vectors" }, title, el("tbody", {}, rows));
  }

  weight(weight, shown, attributes = {}) {
    return shadeBy(el("td", attributes, shown), stepOf(weight, 0, 1), this.app.palette.sequential);
  }

  /** What the chosen token attends to in a head, key by key, and what comes out. */
  attended({ scores, weights, v, output }, number) {
    const at = state.tok;
    const { tokens } = this.example;
    const rows = tokens.map((key, place) => {
      const weight = this.weight(weights[at][place], digits(weights[at][place]), { "data-weight": place });
      return rowOf(key, [value(scores[at][place]), weight, inRow(v[place], value)]);
    });
    const sum = rowOf("z", ["", "1", el("td", { "data-z": number }, inRow(output[at]))], { class: "sum" });
    const which = this.now.heads.length === 1 ? "" : `, head ${number}`;
    return tableOfHead(
      { class: "vectors attend", "data-head": number },
      this.colour(number),
      el("caption", {}, `“${tokens[at]}” attends${which}`),
      columnNames("key", "score", "weight", "v"),
      el("tbody", {}, rows, sum),
    );
  }

  map(weights, head) {
    const { tokens } = this.example;
    const rows = weights.map((row, query) => {
      const cells = row.map((weight) => this.weight(weight, digits(weight).slice(0, 6)));
      return rowOf(tokens[query], cells, { class: query === state.tok ? "mine" : null });
    });
    return tableOfHead(
      { class: "map", "data-head": head },
      this.colour(head),
      columnNames("", ...tokens),
      el("tbody", {}, rows),
    );
  }

  /** What the chosen token attends to under each number of heads, and what comes out. */
  showBars() {
    const at = state.tok;
    const { tokens, counts } = this.example;
    const part = (weight, key) => {
      const bar = el("span", { title: `${tokens[key]} ${digits(weight)}` }, weight > 0.09 ? tokens[key] : "");
      bar.style.flexGrow = String(weight);
      return shadeBy(bar, stepOf(weight, 0, 0.6), this.app.palette.sequential);
    };
    const stack = ({ weights }) => el("div", { class: "stack" }, weights[at].map(part));
    const lineOf = ({ n, name, heads, ...count }) =>
      el(
        "div",
        { class: n === state.n ? "count now" : "count" },
        el("b", {}, name),
        el("div", { class: "stacks" }, heads.map(stack)),
        el("span", { class: "faint", "data-output": n }, `o = ${inRow(this.numbersOf(count, ""))}`),
      );
    fill(this.bars, counts.map(lineOf));
  }

  focus() {
    this.root.querySelector("[aria-current], [role=radio][tabindex='0']")?.focus();
  }

  name() {
    return `head count ${state.n}`;
  }

  async figure() {
    const { heads, name } = this.now;
    const { tokens } = this.example;
    const colours = this.app.palette;
    const [cell, left, top] = [46, 44, 70];
    const wide = left + cell * tokens.length;
    const draw = (pen) => {
      const title = `The cat sat on mat, ${name}: attention weights`;
      const label = (text, x, y, how) => pen.text(text, x, y, { size: 12, colour: colours.ink, ...how });
      label(title, 0, 10, { size: 13, weight: 600 });
      heads.forEach(({ name: nameOfHead, weights }, head) => {
        const x = head * (wide + 24) + left;
        label(nameOfHead, x, 34, { colour: this.colour(head), weight: 600 });
        tokens.forEach((token, at) => {
          label(token, x + (at + 0.5) * cell, top - 10, { align: "center" });
          label(token, x - 6, top + (at + 0.5) * cell, { align: "right" });
        });
        weights.forEach((row, query) =>
          row.forEach((weight, key) => {
            const step = stepOf(weight, 0, 1);
            const how = { size: 11, align: "center", colour: inkOn(colours.sequential.rgb[step]) };
            pen.rect(x + key * cell, top + query * cell, cell, cell, colours.sequential.css[step]);
            label(digits(weight), x + (key + 0.5) * cell, top + (query + 0.5) * cell, how);
          }),
        );
        pen.frame(x - 1, top + state.tok * cell, tokens.length * cell + 2, cell, colours.mark, 2);
      });
    };
    return { width: Math.max(heads.length * (wide + 24) - 24, 380), height: top + tokens.length * cell + 6, draw };
  }

  async rows() {
    const { tokens } = this.example;
    const lineOf = (row, head, query) => [state.n, head, tokens[query], ...row.map((weight) => weight.toFixed(4))];
    const lines = this.now.heads.flatMap(({ weights }, head) => weights.map((row, query) => lineOf(row, head, query)));
    return [["n_heads", "head", "query", ...tokens], ...lines];
  }
}
