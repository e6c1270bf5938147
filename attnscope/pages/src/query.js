// The filter of heads, in the grammar of docs/atlas.md. Parsed into closures, never run as code.

const TOKEN = /\s*(?:(->|\u2192)|((?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?%?)(?=[\s<>=!&|():\u2192+*/]|->|$)|"([^"]*)"|(>=|<=|!=|==|&&|\|\||[-<>=!&|():+*/])|((?:(?!->)[^\s<>=!&|():"\u2192+*/])+))/iy;
const COMPARES = {
  ">": (a, b) => a > b,
  "<": (a, b) => a < b,
  ">=": (a, b) => a >= b,
  "<=": (a, b) => a <= b,
  "=": (a, b) => a === b,
  "!=": (a, b) => a !== b,
};
const OPERATIONS = [{ "+": (a, b) => a + b, "-": (a, b) => a - b }, { "*": (a, b) => a * b, "/": (a, b) => (b ? a / b : NaN) }];
const SIGNS = { "==": "=", "&&": "&", "||": "|", and: "&", or: "|", not: "!" };

/** Something is wrong with a filter: what, in words. */
class FilterError extends Error {}

function tokensOf(text) {
  const tokens = [];
  TOKEN.lastIndex = 0;
  while (text.slice(TOKEN.lastIndex).trim()) {
    const match = TOKEN.exec(text);
    if (!match) throw new FilterError(`a quote is not closed`);
    tokens.push(tokenOfMatch(...match.slice(1)));
  }
  return tokens;
}

function tokenOfMatch(arrow, number, quoted, sign, word) {
  if (arrow) return { is: "sign", shown: arrow, value: "->" };
  if (number) return { is: "number", shown: number, value: number };
  if (quoted !== undefined) return { is: "quoted", shown: `"${quoted}"`, value: quoted };
  if (sign) return { is: "sign", shown: sign, value: SIGNS[sign] || sign };
  const isSign = /^(and|or|not)$/i.test(word);
  return isSign ? { is: "sign", shown: word, value: SIGNS[word.toLowerCase()] } : { is: "word", shown: word, value: word };
}

/** How many letters must change to make one word of another. */
function lettersApart(a, b) {
  let row = Array.from({ length: b.length + 1 }, (_, at) => at);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) next[j] = Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + (a[i - 1] !== b[j - 1]));
    row = next;
  }
  return row[b.length];
}

function nearest(word, names) {
  const ranked = names.map((name) => [name.includes(word) ? 1 : lettersApart(word, name), name]).sort((a, b) => a[0] - b[0]);
  return ranked.length && ranked[0][0] <= Math.max(2, word.length / 3) ? ` \u2013 did you mean ${ranked[0][1]}?` : "";
}

class Parser {
  constructor(text, facts) {
    Object.assign(this, { tokens: tokensOf(text), at: 0, namedPairs: [], ...facts });
  }

  get next() {
    return this.tokens[this.at];
  }

  /** Whether a sign comes next; goes past it. */
  takes(...signs) {
    const { next } = this;
    if (next?.is !== "sign" || !signs.includes(next.value)) return null;
    this.at++;
    return next.value;
  }

  whole() {
    const test = this.test(this.either());
    if (this.next) throw new FilterError(`${this.next.shown} is one too many`);
    return test;
  }

  // A part is {value: (head) => number or truth}, or {token} as long as it is one word or number, searched or compared.

  either() {
    const parts = [this.all()];
    while (this.takes("|")) parts.push(this.all());
    if (parts.length === 1) return parts[0];
    const tests = parts.map((part) => this.test(part));
    return { value: (head) => tests.some((test) => test(head)) };
  }

  all() {
    const parts = [this.not()];
    for (;;) {
      const joined = this.takes("&");
      const { next } = this;
      if (!joined && (!next || (next.is === "sign" && !["(", "!"].includes(next.value)))) break;
      parts.push(this.not());
    }
    if (parts.length === 1) return parts[0];
    const tests = parts.map((part) => this.test(part));
    return { value: (head) => tests.every((test) => test(head)) };
  }

  not() {
    if (!this.takes("!")) return this.compared();
    const test = this.test(this.not());
    return { value: (head) => !test(head) };
  }

  /** Such as layer > 3, or 0.2 < induction < 0.4. */
  compared() {
    const first = this.arithmetic();
    let sign = this.takes(...Object.keys(COMPARES));
    if (!sign) return first;
    const tests = [];
    for (let left = this.number(first); sign; sign = this.takes(...Object.keys(COMPARES))) {
      const { next } = this;
      if (!next || (next.is === "sign" && !["(", "-"].includes(next.value))) throw new FilterError(`a number is missing after ${sign}`);
      const [before, right, holds] = [left, this.number(this.arithmetic()), COMPARES[sign]];
      tests.push((head) => {
        const [a, b] = [before(head), right(head)];
        return a === a && b === b && holds(a, b);
      });
      left = right;
    }
    return { value: (head) => tests.every((test) => test(head)) };
  }

  arithmetic(level = 0) {
    if (level === OPERATIONS.length) return this.negated();
    let left = this.arithmetic(level + 1);
    for (let sign; (sign = this.takes(...Object.keys(OPERATIONS[level]))); ) {
      const [a, b, apply] = [this.number(left), this.number(this.arithmetic(level + 1)), OPERATIONS[level][sign]];
      left = { value: (head) => apply(a(head), b(head)) };
    }
    return left;
  }

  negated() {
    if (!this.takes("-")) return this.primary();
    const number = this.number(this.negated());
    return { value: (head) => -number(head) };
  }

  primary() {
    if (this.takes("(")) {
      const inner = this.either();
      if (!this.takes(")")) throw new FilterError("a bracket is not closed: ) is missing");
      return inner;
    }
    const { next } = this;
    if (!next) throw new FilterError(this.at ? `something is missing after ${this.tokens[this.at - 1].shown}` : "there is nothing");
    if (next.is === "sign") throw new FilterError(`something is missing before ${next.shown}`);
    this.at++;
    if (this.takes("->")) return this.paired(next);
    const place = next.is === "word" && Object.hasOwn(this.texts, next.value.toLowerCase());
    const sign = this.takes(":", ...(place ? ["=", "!="] : []));
    if (sign && place) return this.within(next, sign);
    if (sign) throw new FilterError(`before : stands one of ${Object.keys(this.texts).join(", ")}, not ${next.shown}`);
    return { token: next };
  }

  word(message) {
    const { next } = this;
    if (!next || next.is === "sign") throw new FilterError(message);
    this.at++;
    return next.value.toLowerCase();
  }

  /** Such as it -> animal: a query and a key that stand out, both as whole tokens. */
  paired(query) {
    const [from, to] = [query.value.toLowerCase(), this.word("a token is missing after ->")];
    this.namedPairs.push([from, to]);
    return { value: (head) => this.pairs[head].some(([asks, gets]) => asks === from && gets === to) };
  }

  /** Such as role:induction. */
  within(place, sign) {
    const test = this.search(this.word(`a word is missing after ${place.shown}${sign}`), [place.value.toLowerCase()]);
    return { value: sign === "!=" ? (head) => !test(head) : test };
  }

  search(word, places) {
    return (head) => places.some((place) => this.texts[place][head].includes(word));
  }

  /** A part as a test: a bare word is a role's flag, or is searched. */
  test({ value, token }) {
    if (value) return (head) => !!value(head); // NaN is false
    if (token.is === "word" && this.flags.has(token.value)) return (head) => !!this.fields.get(token.value)[head];
    return this.search(token.value.toLowerCase(), Object.keys(this.texts));
  }

  number({ value, token }) {
    if (value) return (head) => Number(value(head));
    const { is, shown, value: word } = token;
    const number = parseFloat(word) / (word.endsWith("%") ? 100 : 1);
    if (is === "number") return () => number;
    const values = is === "word" && (this.fields.get(word) || this.fields.get(word.toLowerCase()));
    if (!values) throw new FilterError(`no measure is called ${shown}${nearest(word.toLowerCase(), [...this.fields.keys()])}`);
    return (head) => values[head];
  }
}

/** Whether a pair of tokens, as the filter searches for them, is one that it names. */
export function isNamed(namedPairs, [query, key]) {
  return namedPairs.some(([from, to]) => query === from && key === to);
}

/**
 * Reads a filter.
 *
 * @param text such as: induction > 0.4 & layer > 3
 * @param facts by head: `fields`, numbers of each name; `flags`, the names that say yes or no; `texts`, in lower case, of
 *     each place to search in; `pairs` [query, key, lift, its lower end] that stand out, in lower case
 * @returns {{test: (head: number) => boolean, namedPairs: string[][], wrong: string}} `namedPairs`: those that it names;
 *     `wrong` says what is amiss; then all heads pass
 */
export function filterOf(text, facts) {
  if (!text.trim()) return { test: () => true, namedPairs: [], wrong: "" };
  try {
    const parser = new Parser(text, facts);
    return { test: parser.whole(), namedPairs: parser.namedPairs, wrong: "" };
  } catch (error) {
    if (!(error instanceof FilterError)) throw error;
    return { test: () => true, namedPairs: [], wrong: error.message };
  }
}
