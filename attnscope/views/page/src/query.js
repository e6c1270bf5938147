// The filter of heads: comparisons of measures, words, and, or, not, brackets. Parsed into closures, never run as code.

const TOKEN = /\s*(?:(->|\u2192)|(-?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?%?)(?=[\s<>=!&|():\u2192]|->|$)|"([^"]*)"|(>=|<=|!=|==|&&|\|\||[<>=!&|():])|((?:(?!->)[^\s<>=!&|():"\u2192])+))/iy;
const COMPARES = {
  ">": (a, b) => a > b,
  "<": (a, b) => a < b,
  ">=": (a, b) => a >= b,
  "<=": (a, b) => a <= b,
  "=": (a, b) => a === b,
  "!=": (a, b) => a !== b,
};
const SAME = { "==": "=", "&&": "&", "||": "|" };

/** Something is wrong with a filter: what, in words. */
class FilterError extends Error {}

function tokensOf(text) {
  const found = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < text.length) {
    if (!text.slice(TOKEN.lastIndex).trim()) break;
    const match = TOKEN.exec(text);
    if (!match) throw new FilterError(`a quote is not closed`);
    const [, arrow, number, quoted, sign, word] = match;
    if (arrow !== undefined) found.push({ is: "sign", shown: arrow, value: "->" });
    else if (number !== undefined) found.push({ is: "number", shown: number, value: number.endsWith("%") ? Number(number.slice(0, -1)) / 100 : Number(number) });
    else if (quoted !== undefined) found.push({ is: "quoted", shown: `"${quoted}"`, value: quoted });
    else if (sign !== undefined) found.push({ is: "sign", shown: sign, value: SAME[sign] || sign });
    else if (/^(and|or|not)$/i.test(word)) found.push({ is: "sign", shown: word, value: { and: "&", or: "|", not: "!" }[word.toLowerCase()] });
    else found.push({ is: "word", shown: word, value: word });
  }
  return found;
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
  constructor(text, fields, texts, pairs) {
    Object.assign(this, { tokens: tokensOf(text), at: 0, fields, texts, pairs });
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
    const test = this.either();
    if (this.next) throw new FilterError(`${this.next.shown} is one too many`);
    return test;
  }

  either() {
    const parts = [this.all()];
    while (this.takes("|")) parts.push(this.all());
    return parts.length === 1 ? parts[0] : (head) => parts.some((test) => test(head));
  }

  all() {
    const parts = [this.one()];
    for (;;) {
      const joined = this.takes("&");
      const { next } = this;
      if (!joined && (!next || (next.is === "sign" && !["(", "!"].includes(next.value)))) break;
      parts.push(this.one());
    }
    return parts.length === 1 ? parts[0] : (head) => parts.every((test) => test(head));
  }

  one() {
    if (this.takes("!")) {
      const test = this.one();
      return (head) => !test(head);
    }
    if (this.takes("(")) {
      const test = this.either();
      if (!this.takes(")")) throw new FilterError("a bracket is not closed: ) is missing");
      return test;
    }
    const { next } = this;
    if (!next) throw new FilterError(this.at ? `something is missing after ${this.tokens[this.at - 1].shown}` : "there is nothing");
    if (next.is === "sign") throw new FilterError(`something is missing before ${next.shown}`);
    this.at++;
    if (this.takes("->")) return this.paired(next);
    const sign = this.takes(":", ...Object.keys(COMPARES));
    if (!sign) return this.search(next.value, Object.keys(this.texts));
    if (next.is === "word" && this.texts[next.value.toLowerCase()] && [":", "=", "!="].includes(sign)) return this.within(next, sign);
    if (sign === ":") throw new FilterError(`before : stands one of ${Object.keys(this.texts).join(", ")}, not ${next.shown}`);
    return this.compared(next, sign);
  }

  /** Such as it -> animal: a query and a key that stand out, both as whole tokens. */
  paired(query) {
    const key = this.next;
    if (!key || key.is === "sign") throw new FilterError("a token is missing after ->");
    this.at++;
    const [from, to] = [query, key].map(({ is, shown, value }) => (is === "number" ? shown : String(value)).toLowerCase());
    return (head) => this.pairs[head].some(([asks, gets]) => asks === from && gets === to);
  }

  /** Such as role:induction. */
  within(place, sign) {
    const wanted = this.next;
    if (!wanted || wanted.is === "sign") throw new FilterError(`a word is missing after ${place.shown}${sign}`);
    this.at++;
    const test = this.search(String(wanted.is === "number" ? wanted.shown : wanted.value), [place.value.toLowerCase()]);
    return sign === "!=" ? (head) => !test(head) : test;
  }

  search(word, places) {
    const wanted = String(word).toLowerCase();
    return (head) => places.some((place) => this.texts[place][head].includes(wanted));
  }

  /** Such as layer > 3, or 0.2 < induction < 0.4. */
  compared(first, sign) {
    const tests = [];
    let left = this.operand(first);
    for (; sign; sign = this.takes(...Object.keys(COMPARES))) {
      const token = this.next;
      if (!token || token.is === "sign") throw new FilterError(`a number is missing after ${sign}`);
      this.at++;
      const [before, right, holds] = [left, this.operand(token), COMPARES[sign]];
      tests.push((head) => {
        const [a, b] = [before(head), right(head)];
        return a === a && b === b && holds(a, b);
      });
      left = right;
    }
    return (head) => tests.every((test) => test(head));
  }

  operand({ is, value, shown }) {
    if (is === "number") return () => value;
    const values = is === "word" && (this.fields.get(value) || this.fields.get(value.toLowerCase()));
    if (!values) throw new FilterError(`no measure is called ${shown}${nearest(value.toLowerCase(), [...this.fields.keys()])}`);
    return (head) => values[head];
  }
}

/**
 * Reads a filter.
 *
 * @param text such as: induction > 0.4 & layer > 3
 * @param fields numbers by head of each name
 * @param texts lower-case texts by head of each place to search in
 * @param pairs by head the pairs of query and key that stand out, in lower case
 * @returns {{test: (head: number) => boolean, wrong: string}} `wrong` says what is amiss; then all heads pass
 */
export function filterOf(text, fields, texts, pairs) {
  if (!text.trim()) return { test: () => true, wrong: "" };
  try {
    return { test: new Parser(text, fields, texts, pairs).whole(), wrong: "" };
  } catch (error) {
    if (!(error instanceof FilterError)) throw error;
    return { test: () => true, wrong: error.message };
  }
}
