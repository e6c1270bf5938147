// Head count: the same queries, keys and values with 1, 2 and 4 heads, step by step.
import { OUTPUTS, TOKENS, WIDTH, worked } from "./attention.js";
import { inkOn, stepOf } from "./colour.js";
import { digits } from "./data.js";
import { el, fill, segmented } from "./dom.js";
import { state, update } from "./state.js";

const sub = (base, below) => [el("var", {}, base), el("sub", {}, below)];

const STEPS = [
  {
    name: "project",
    formula: () => [
      sub("Q", ""),
      " = ",
      sub("X", ""),
      sub("W", "Q"),
      ",  ",
      sub("K", ""),
      " = ",
      sub("X", ""),
      sub("W", "K"),
      ",  ",
      sub("V", ""),
      " = ",
      sub("X", ""),
      sub("W", "V"),
    ],
    numpy: () => "Q, K, V = X @ W_Q, X @ W_K, X @ W_V",
    what: () =>
      "Each token asks (query), offers itself (key) and has something to give (value). Embeddings are one-hot here, so a token's rows of W are what it gets.",
  },
  {
    name: "split",
    formula: (n) => [
      sub("q", "h"),
      " = ",
      sub("Q", ""),
      `[:, ${WIDTH / n}h : ${WIDTH / n}(h + 1)],  h = 0 … ${n - 1};  `,
      sub("d", "head"),
      ` = ${WIDTH} / ${n} = ${WIDTH / n}`,
    ],
    numpy: (n) => `q, k, v = (M.reshape(${TOKENS.length}, ${n}, ${WIDTH / n}).transpose(1, 0, 2) for M in (Q, K, V))`,
    what: (n) =>
      n === 1
        ? "One head has all four columns."
        : `The ${WIDTH} columns are dealt out to ${n} heads, ${WIDTH / n} to each. Nothing is computed, and nothing is added: more heads are narrower heads.`,
  },
  {
    name: "attend",
    formula: () => [
      sub("A", "h"),
      " = softmax(",
      sub("q", "h"),
      sub("k", "h"),
      "ᵀ / √",
      sub("d", "head"),
      "),  ",
      sub("Z", "h"),
      " = ",
      sub("A", "h"),
      sub("v", "h"),
    ],
    numpy: (n) =>
      `E = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(${WIDTH / n})); A = E / E.sum(-1, keepdims=True); Z = A @ v`,
    what: () =>
      "Each head compares its own columns alone, and so has a map of its own; its output is the mean of the values by its weights.",
  },
  {
    name: "concatenate",
    formula: (n) => [
      sub("C", ""),
      " = [",
      Array.from({ length: n }, (_, head) => [head ? " | " : "", sub("Z", String(head))]),
      "]",
    ],
    numpy: () => `C = Z.transpose(1, 0, 2).reshape(${TOKENS.length}, ${WIDTH})`,
    what: () => "The heads' outputs stand side by side again, as wide as before.",
  },
  {
    name: "project",
    formula: () => [sub("O", ""), " = ", sub("C", ""), sub("W", "O")],
    numpy: () => "O = C @ W_O",
    what: () =>
      "Only here do heads meet: each column of the output is a sum over all of them. With the identity they stay side by side.",
  },
];

const value = (number) => digits(number).replace(/\.0000$/, "");

export class HeadCountView {
  constructor(app) {
    this.app = app;
    this.counts = segmented(
      "Heads",
      [
        ["1", "1 head"],
        ["2", "2 heads"],
        ["4", "4 heads"],
      ],
      (n) => update({ n: Number(n) }),
    );
    this.tokens = segmented(
      "Token",
      TOKENS.map((token, at) => [String(at), token]),
      (at) => update({ tok: Number(at) }),
    );
    this.outputs = segmented(
      "Output projection",
      [
        ["identity", "identity"],
        ["mixing", "mixing"],
      ],
      (wo) => update({ wo }),
    );
    this.steps = el(
      "ol",
      { class: "pipeline", "aria-label": "Steps" },
      STEPS.map((step, at) =>
        el(
          "li",
          {},
          el(
            "button",
            { type: "button", "data-step": at, onclick: () => update({ step: at }) },
            el("small", {}, String(at + 1)),
            step.name,
          ),
        ),
      ),
    );
    this.card = el("div", { class: "card" });
    this.maps = el("div", { class: "maps" });
    this.bars = el("div", { class: "bars" });
    this.root = el(
      "div",
      { class: "view headcount" },
      el(
        "div",
        { class: "toolbar" },
        this.counts,
        el("span", { class: "field" }, "token", this.tokens),
        el("span", { class: "field" }, el("span", {}, sub("W", "O")), this.outputs),
      ),
      this.steps,
      this.card,
      el(
        "section",
        {},
        el("h2", {}, "The maps"),
        el(
          "p",
          { class: "faint" },
          "Rows are queries, columns keys; every row sums to 1. The chosen token's row is marked.",
        ),
        this.maps,
      ),
      el("section", {}, el("h2", {}, "The same queries, keys and values with 1, 2 and 4 heads"), this.bars),
    );
  }

  show() {
    const n = state.n;
    this.now = worked(n, OUTPUTS[state.wo]);
    this.counts.show(n);
    this.tokens.show(state.tok);
    this.outputs.show(state.wo);
    for (const button of this.steps.querySelectorAll("button"))
      button.setAttribute("aria-current", Number(button.dataset.step) === state.step ? "step" : "false");
    const step = STEPS[state.step];
    fill(
      this.card,
      el("div", { class: "formula", role: "math" }, step.formula(n)),
      el("pre", { class: "numpy" }, el("code", {}, step.numpy(n))),
      el("p", {}, step.what(n)),
      el("div", { class: "numbers" }, this.numbers()),
    );
    fill(
      this.maps,
      this.now.heads.map(({ weights }, head) =>
        el("figure", {}, el("figcaption", {}, n === 1 ? "the one head" : `head ${head}`), this.map(weights, head)),
      ),
    );
    this.showBars();
  }

  colour(head) {
    return this.app.palette.several[head];
  }

  /** A row of numbers with its name; each head's columns under its colour. */
  vector(name, numbers, { split = 0, label } = {}) {
    const cells = numbers.map((number, at) => {
      const cell = el("td", {}, value(number));
      if (split) cell.style.borderBottomColor = this.colour(Math.floor(at / split));
      return cell;
    });
    return el("tr", { "data-name": label || name }, el("th", { scope: "row" }, name), cells);
  }

  numbers() {
    const { X, Q, K, V, heads, joined, output, width } = this.now;
    const at = state.tok;
    const token = TOKENS[at];
    const table = (caption, ...rows) =>
      el("table", { class: "vectors" }, el("caption", {}, caption), el("tbody", {}, rows));
    if (state.step === 0)
      return [
        table(
          `“${token}” before and after`,
          this.vector("x", X[at]),
          this.vector("q", Q[at]),
          this.vector("k", K[at]),
          this.vector("v", V[at]),
        ),
      ];
    if (state.step === 1)
      return [
        table(
          `“${token}”: columns by head`,
          this.vector("q", Q[at], { split: width }),
          this.vector("k", K[at], { split: width }),
          this.vector("v", V[at], { split: width }),
        ),
      ];
    if (state.step === 2) {
      return heads.map((head, number) => {
        const title = el(
          "caption",
          {},
          heads.length === 1 ? `“${token}” attends` : `“${token}” attends, head ${number}`,
        );
        const rows = TOKENS.map((key, place) => {
          const weight = el("td", { "data-weight": place }, digits(head.weights[at][place]));
          const step = stepOf(head.weights[at][place], 0, 1);
          weight.style.backgroundColor = this.app.palette.one.css[step];
          weight.style.color = inkOn(this.app.palette.one.rgb[step]);
          return el(
            "tr",
            {},
            el("th", { scope: "row" }, key),
            el("td", {}, value(head.scores[at][place])),
            weight,
            el("td", {}, head.v[place].map(value).join("  ")),
          );
        });
        const whole = el(
          "table",
          { class: "vectors attend", "data-head": number },
          title,
          el(
            "thead",
            {},
            el(
              "tr",
              {},
              ["key", "score", "weight", "v"].map((name) => el("th", { scope: "col" }, name)),
            ),
          ),
          el(
            "tbody",
            {},
            rows,
            el(
              "tr",
              { class: "sum" },
              el("th", { scope: "row" }, "z"),
              el("td", {}),
              el("td", {}, "1"),
              el("td", { "data-z": number }, head.output[at].map((number) => digits(number)).join("  ")),
            ),
          ),
        );
        whole.style.borderTopColor = this.colour(number);
        return whole;
      });
    }
    if (state.step === 3)
      return [
        table(
          `“${token}”: the heads' outputs, joined`,
          ...heads.map((head, number) => this.vector(heads.length === 1 ? "z" : `z, head ${number}`, head.output[at])),
          this.vector("c", joined[at], { split: width }),
        ),
      ];
    return [
      table(
        `“${token}” after the output projection`,
        this.vector("c", joined[at], { split: width }),
        this.vector("o", output[at]),
      ),
    ];
  }

  map(weights, head) {
    const table = this.app.palette.one;
    const rows = weights.map((row, query) =>
      el(
        "tr",
        { class: query === state.tok ? "mine" : null },
        el("th", { scope: "row" }, TOKENS[query]),
        row.map((weight) => {
          const step = stepOf(weight, 0, 1);
          const cell = el("td", {}, digits(weight).slice(0, 6));
          cell.style.backgroundColor = table.css[step];
          cell.style.color = inkOn(table.rgb[step]);
          return cell;
        }),
      ),
    );
    const whole = el(
      "table",
      { class: "map", "data-head": head },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("td", {}),
          TOKENS.map((token) => el("th", { scope: "col" }, token)),
        ),
      ),
      el("tbody", {}, rows),
    );
    whole.style.borderTopColor = this.colour(head);
    return whole;
  }

  /** What the chosen token attends to under each number of heads, and what comes out. */
  showBars() {
    const at = state.tok;
    fill(
      this.bars,
      [1, 2, 4].map((n) => {
        const { heads, output } = worked(n, OUTPUTS[state.wo]);
        const rows = heads.map((head) =>
          el(
            "div",
            { class: "stack" },
            TOKENS.map((token, key) => {
              const part = el(
                "span",
                { title: `${token} ${digits(head.weights[at][key])}` },
                head.weights[at][key] > 0.09 ? token : "",
              );
              part.style.flexGrow = String(head.weights[at][key]);
              const step = stepOf(head.weights[at][key], 0, 0.6);
              part.style.backgroundColor = this.app.palette.one.css[step];
              part.style.color = inkOn(this.app.palette.one.rgb[step]);
              return part;
            }),
          ),
        );
        return el(
          "div",
          { class: n === state.n ? "count now" : "count" },
          el("b", {}, n === 1 ? "1 head" : `${n} heads`),
          el("div", { class: "stacks" }, rows),
          el(
            "span",
            { class: "faint", "data-output": n },
            `o = ${output[at].map((number) => digits(number)).join("  ")}`,
          ),
        );
      }),
    );
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
      pen.text(`The cat sat on mat, ${state.n === 1 ? "1 head" : `${state.n} heads`}: attention weights`, 0, 10, {
        size: 13,
        weight: 600,
        colour: colours.ink,
      });
      heads.forEach(({ weights }, head) => {
        const x = head * (wide + 24) + left;
        pen.text(state.n === 1 ? "the one head" : `head ${head}`, x, 34, {
          size: 12,
          colour: this.colour(head),
          weight: 600,
        });
        TOKENS.forEach((token, at) => {
          pen.text(token, x + (at + 0.5) * cell, top - 10, { size: 12, align: "center", colour: colours.ink });
          pen.text(token, x - 6, top + (at + 0.5) * cell, { size: 12, align: "right", colour: colours.ink });
        });
        weights.forEach((row, query) =>
          row.forEach((weight, key) => {
            const step = stepOf(weight, 0, 1);
            pen.rect(x + key * cell, top + query * cell, cell, cell, colours.one.css[step]);
            pen.text(digits(weight), x + (key + 0.5) * cell, top + (query + 0.5) * cell, {
              size: 11,
              align: "center",
              colour: inkOn(colours.one.rgb[step]),
            });
          }),
        );
        pen.frame(x - 1, top + state.tok * cell, TOKENS.length * cell + 2, cell, colours.mark, 2);
      });
    };
    return {
      width: Math.max(heads.length * (wide + 24) - 24, 380),
      height: top + TOKENS.length * cell + 6,
      draw,
    };
  }

  async rows() {
    const lines = [["n_heads", "head", "query", ...TOKENS]];
    this.now.heads.forEach(({ weights }, head) =>
      weights.forEach((row, query) =>
        lines.push([state.n, head, TOKENS[query], ...row.map((weight) => weight.toFixed(4))]),
      ),
    );
    return lines;
  }
}
