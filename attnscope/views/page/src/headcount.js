// Head count: the same queries, keys and values with 1, 2 and 4 heads, step by step.
import { OUTPUTS, TOKENS, WIDTH, worked } from "./attention.js";
import { inkOn, shadeBy, stepOf } from "./colour.js";
import { digits } from "./data.js";
import { button, el, fill, rowOf, segmented, toolbar } from "./dom.js";
import { state, update } from "./state.js";

/** Mathematics as it is set: a capital, or a letter with an underscore, is a variable, and what follows that its index. */
function maths(text) {
  return text.split(/([A-Za-z]_\w+|\b[A-Z]\b)/).map((part, at) => {
    const [base, below] = part.split("_");
    return at % 2 ? [el("var", {}, base), below ? el("sub", {}, below) : null] : part;
  });
}

/** A step: its name, formula, line of NumPy, what it means, and the rows (or tables) of numbers of a view's token. */
const STEPS = [
  {
    name: "project",
    formula: () => "Q = X W_Q,  K = X W_K,  V = X W_V",
    numpy: () => "Q, K, V = X @ W_Q, X @ W_K, X @ W_V",
    what: () =>
      "Each token asks (query), offers itself (key) and has something to give (value). Embeddings are one-hot here, so a token's rows of W are what it gets.",
    caption: "before and after",
    rows: (view, at) => ["X", "Q", "K", "V"].map((name) => view.vector(name.toLowerCase(), view.now[name][at])),
  },
  {
    name: "split",
    formula: (n) => `q_h = Q[:, ${WIDTH / n}h : ${WIDTH / n}(h + 1)],  h = 0 … ${n - 1};  d_head = ${WIDTH} / ${n} = ${WIDTH / n}`,
    numpy: (n) => `q, k, v = (M.reshape(${TOKENS.length}, ${n}, ${WIDTH / n}).transpose(1, 0, 2) for M in (Q, K, V))`,
    what: (n) =>
      n === 1
        ? "One head has all four columns."
        : `The ${WIDTH} columns are dealt out to ${n} heads, ${WIDTH / n} to each. Nothing is computed, and nothing is added: more heads are narrower heads.`,
    caption: "columns by head",
    rows: (view, at) => ["Q", "K", "V"].map((name) => view.vector(name.toLowerCase(), view.now[name][at], view.now.width)),
  },
  {
    name: "attend",
    formula: () => "A_h = softmax(q_h k_hᵀ / √d_head),  Z_h = A_h v_h",
    numpy: (n) => `E = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(${WIDTH / n})); A = E / E.sum(-1, keepdims=True); Z = A @ v`,
    what: () =>
      "Each head compares its own columns alone, and so has a map of its own; its output is the mean of the values by its weights.",
  },
  {
    name: "concatenate",
    formula: (n) => `C = [${Array.from({ length: n }, (_, head) => `Z_${head}`).join(" | ")}]`,
    numpy: () => `C = Z.transpose(1, 0, 2).reshape(${TOKENS.length}, ${WIDTH})`,
    what: () => "The heads' outputs stand side by side again, as wide as before.",
    caption: "the heads' outputs, joined",
    rows: (view, at) => [
      ...view.now.heads.map(({ output }, head, { length }) => view.vector(length === 1 ? "z" : `z, head ${head}`, output[at])),
      view.vector("c", view.now.joined[at], view.now.width),
    ],
  },
  {
    name: "project",
    formula: () => "O = C W_O",
    numpy: () => "O = C @ W_O",
    what: () =>
      "Only here do heads meet: each column of the output is a sum over all of them. With the identity they stay side by side.",
    caption: "after the output projection",
    rows: (view, at) => [view.vector("c", view.now.joined[at], view.now.width), view.vector("o", view.now.output[at])],
  },
];

const COUNTS = [1, 2, 4];
const value = (number) => digits(number).replace(/\.0000$/, "");
const inRow = (numbers, write = digits) => numbers.map((number) => write(number)).join("  ");
const nameOfHead = (head, n) => (n === 1 ? "the one head" : `head ${head}`);
const nameOfCount = (n) => (n === 1 ? "1 head" : `${n} heads`);

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
    this.counts = segmented("Heads", COUNTS.map((n) => [n, nameOfCount(n)]), (n) => update({ n }));
    this.tokens = segmented("Token", TOKENS.map((token, at) => [at, token]), (tok) => update({ tok }));
    this.outputs = segmented("Output projection", Object.keys(OUTPUTS).map((name) => [name, name]), (wo) => update({ wo }));
    const steps = STEPS.map(({ name }, step) => {
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
      toolbar(this.counts, field("token", this.tokens), field(el("span", {}, maths("W_O")), this.outputs)),
      this.steps,
      this.card,
      el("section", {}, el("h2", {}, "The maps"), el("p", { class: "faint" }, hint), this.maps),
      el("section", {}, el("h2", {}, "The same queries, keys and values with 1, 2 and 4 heads"), this.bars),
    );
  }

  show() {
    const { n, step } = state;
    this.now = worked(n, OUTPUTS[state.wo]);
    this.counts.show(n);
    this.tokens.show(state.tok);
    this.outputs.show(state.wo);
    for (const choice of this.steps.querySelectorAll("button"))
      choice.setAttribute("aria-current", Number(choice.dataset.step) === step ? "step" : "false");
    const { formula, numpy, what } = STEPS[step];
    fill(
      this.card,
      el("div", { class: "formula", role: "math" }, maths(formula(n))),
      el("pre", { class: "numpy" }, el("code", {}, numpy(n))),
      el("p", {}, what(n)),
      el("div", { class: "numbers" }, this.numbers()),
    );
    const figureOf = ({ weights }, head) => el("figure", {}, el("figcaption", {}, nameOfHead(head, n)), this.map(weights, head));
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

  numbers() {
    const { tok: at, step } = state;
    const { caption, rows } = STEPS[step];
    if (!rows) return this.now.heads.map((head, number) => this.attended(head, number));
    return el("table", { class: "vectors" }, el("caption", {}, `“${TOKENS[at]}”: ${caption}`), el("tbody", {}, rows(this, at)));
  }

  weight(weight, shown, attributes = {}) {
    return shadeBy(el("td", attributes, shown), stepOf(weight, 0, 1), this.app.palette.one);
  }

  /** What the chosen token attends to in a head, key by key, and what comes out. */
  attended({ scores, weights, v, output }, number) {
    const at = state.tok;
    const rows = TOKENS.map((key, place) => {
      const weight = this.weight(weights[at][place], digits(weights[at][place]), { "data-weight": place });
      return rowOf(key, [value(scores[at][place]), weight, inRow(v[place], value)]);
    });
    const sum = rowOf("z", ["", "1", el("td", { "data-z": number }, inRow(output[at]))], { class: "sum" });
    const which = this.now.heads.length === 1 ? "" : `, head ${number}`;
    return tableOfHead(
      { class: "vectors attend", "data-head": number },
      this.colour(number),
      el("caption", {}, `“${TOKENS[at]}” attends${which}`),
      columnNames("key", "score", "weight", "v"),
      el("tbody", {}, rows, sum),
    );
  }

  map(weights, head) {
    const rows = weights.map((row, query) => {
      const cells = row.map((weight) => this.weight(weight, digits(weight).slice(0, 6)));
      return rowOf(TOKENS[query], cells, { class: query === state.tok ? "mine" : null });
    });
    return tableOfHead(
      { class: "map", "data-head": head },
      this.colour(head),
      columnNames("", ...TOKENS),
      el("tbody", {}, rows),
    );
  }

  /** What the chosen token attends to under each number of heads, and what comes out. */
  showBars() {
    const at = state.tok;
    const part = (weight, key) => {
      const bar = el("span", { title: `${TOKENS[key]} ${digits(weight)}` }, weight > 0.09 ? TOKENS[key] : "");
      bar.style.flexGrow = String(weight);
      return shadeBy(bar, stepOf(weight, 0, 0.6), this.app.palette.one);
    };
    const stack = ({ weights }) => el("div", { class: "stack" }, weights[at].map(part));
    const counts = COUNTS.map((n) => {
      const { heads, output } = worked(n, OUTPUTS[state.wo]);
      return el(
        "div",
        { class: n === state.n ? "count now" : "count" },
        el("b", {}, nameOfCount(n)),
        el("div", { class: "stacks" }, heads.map(stack)),
        el("span", { class: "faint", "data-output": n }, `o = ${inRow(output[at])}`),
      );
    });
    fill(this.bars, counts);
  }

  focus() {
    this.root.querySelector("[aria-current], [role=radio][tabindex='0']")?.focus();
  }

  name() {
    return `head count ${state.n}`;
  }

  async figure() {
    const { heads } = this.now;
    const colours = this.app.palette;
    const [cell, left, top] = [46, 44, 70];
    const wide = left + cell * TOKENS.length;
    const draw = (pen) => {
      const title = `The cat sat on mat, ${nameOfCount(state.n)}: attention weights`;
      const label = (text, x, y, how) => pen.text(text, x, y, { size: 12, colour: colours.ink, ...how });
      label(title, 0, 10, { size: 13, weight: 600 });
      heads.forEach(({ weights }, head) => {
        const x = head * (wide + 24) + left;
        label(nameOfHead(head, state.n), x, 34, { colour: this.colour(head), weight: 600 });
        TOKENS.forEach((token, at) => {
          label(token, x + (at + 0.5) * cell, top - 10, { align: "center" });
          label(token, x - 6, top + (at + 0.5) * cell, { align: "right" });
        });
        weights.forEach((row, query) =>
          row.forEach((weight, key) => {
            const step = stepOf(weight, 0, 1);
            const how = { size: 11, align: "center", colour: inkOn(colours.one.rgb[step]) };
            pen.rect(x + key * cell, top + query * cell, cell, cell, colours.one.css[step]);
            label(digits(weight), x + (key + 0.5) * cell, top + (query + 0.5) * cell, how);
          }),
        );
        pen.frame(x - 1, top + state.tok * cell, TOKENS.length * cell + 2, cell, colours.mark, 2);
      });
    };
    return { width: Math.max(heads.length * (wide + 24) - 24, 380), height: top + TOKENS.length * cell + 6, draw };
  }

  async rows() {
    const lineOf = (row, head, query) => [state.n, head, TOKENS[query], ...row.map((weight) => weight.toFixed(4))];
    const lines = this.now.heads.flatMap(({ weights }, head) => weights.map((row, query) => lineOf(row, head, query)));
    return [["n_heads", "head", "query", ...TOKENS], ...lines];
  }
}
