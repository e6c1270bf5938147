// A head's card: what is known of it in numbers, how far it looks, which tokens, and what is like it.
import { markOf } from "./atlas.js";
import { atHead, bare, catalogs, commandOfExample, headOf } from "./catalog.js";
import { manifest } from "./data.js";
import {
  SIDEWAYS, button, clamp, dotOf, el, faint, fill, keyedCanvas, onSteps, rowOf, say, segmented, tokenOf,
} from "./dom.js";
import { CanvasPen, fitted } from "./pen.js";
import { filterOf, isNamed } from "./query.js";
import { state, update } from "./state.js";
import { copyButton, inQuotes, modelOf, wordOf } from "./why.js";
import { baselineNumber, intervalText, percent, shortNumber } from "./wording.js";

const FEW = 7; // measures that are shown before the others are asked for
const FURTHEST = 64; // as records have it
const LOWEST = 1e-4; // the least share that the profile shows
const SIDES = { pairs: "pairs, query \u2192 key", gets: "keys that receive most", asks: "queries that give most" };
const MOST_TOKENS = 8;
const OVER_ALL_KEYS = "what uniform attention over all keys would give"; // what lifts of queries are over

/** Where an offset stands, near ones further apart: from -1 to 1, with what is beyond at both ends. */
function placeOfOffset(offset) {
  const most = Math.sqrt(FURTHEST + 0.5);
  const size = Math.min(Math.abs(offset), FURTHEST + 0.5);
  return (Math.sign(offset) * Math.sqrt(size)) / most;
}

/** Draws a profile with any pen: share of attention by offset, on a scale of powers of ten. */
function drawProfile(pen, { profile, even, colours, width, height, chosen = null }) {
  const [left, right, top, low] = [40, width - 6, 6, height - 34];
  const rest = 26; // what is further away has a bin of its own at each end
  const x = (offset) => left + rest + 6 + ((placeOfOffset(offset) + 1) / 2) * (right - left - 2 * rest - 12);
  const y = (share) => low - (Math.log10(Math.max(share, LOWEST) / LOWEST) / -Math.log10(LOWEST)) * (low - top);
  for (const share of [1, 0.1, 0.01, 0.001, LOWEST]) {
    pen.line(left, y(share), right, y(share), colours.rule, 1, 0.7);
    pen.text(`${share * 100}%`, left - 6, y(share), { size: 10, align: "right", colour: colours.faint });
  }
  const bins = profile.map((share, at) => {
    if (at === 0) return [left + 2, left + rest, share, even[at]];
    if (at === profile.length - 1) return [right - rest, right - 2, share, even[at]];
    const offset = at - 1 - FURTHEST;
    return [x(offset - 0.5), x(offset + 0.5), share, even[at]];
  });
  bins.forEach(([from, to, share], at) => {
    if (share <= LOWEST) return;
    const gap = to - from > 4 ? 0.5 : 0;
    const colour = at === chosen ? colours.mark : colours.accent;
    pen.rect(from + gap, y(share), Math.max(0.8, to - from - 2 * gap), low - y(share), colour, 0.9);
  });
  for (const [from, to, , share] of bins) if (share > 0) pen.line(from, y(share), to, y(share), colours.ink, 1.5, 0.75);
  pen.line(left, low + 0.5, right, low + 0.5, colours.faint);
  const mark = (text, at) => pen.text(text, at, low + 11, { size: 10, align: "center", colour: colours.faint });
  for (const offset of [-64, -16, -4, -1, 0, 1, 4, 16, 64])
    mark(offset > 0 ? `+${offset}` : String(offset).replace("-", "\u2212"), x(offset));
  mark("<", left + rest / 2);
  mark(">", right - rest / 2);
  pen.text("tokens from the query to the key", (left + right) / 2, low + 26, { size: 11, align: "center", colour: colours.faint });
  return bins;
}

function nameOfBin(at, n) {
  if (at === 0) return `more than ${FURTHEST} back`;
  if (at === n - 1) return `more than ${FURTHEST} ahead`;
  const offset = at - 1 - FURTHEST;
  return offset === 0 ? "the token itself" : `${Math.abs(offset)} ${offset < 0 ? "back" : "ahead"}`;
}

/** The header of a table: [text, class, title] of each column; one without a text is no heading. */
function headerOf(columns) {
  const cell = ([text, kind, title]) => (text ? el("th", { scope: "col", class: kind, title }, text) : el("td", { class: kind }));
  return el("thead", {}, el("tr", {}, columns.map(cell)));
}

function lineOfTokens({ tokens, mass, lift, low, high, n_queries, n_texts, isInFilter }) {
  const names = tokens.flatMap((token, at) => [at ? faint("\u2192") : null, tokenOf(token)]);
  const number = (kind, ...children) => el("td", { class: `number${kind}` }, children);
  const cells = [
    number("", percent(mass)),
    number("", el("b", {}, `${shortNumber(lift)}\u00d7`), faint(intervalText(low, high))),
    number(" faint", String(n_texts)),
  ];
  const title = `seen with ${n_queries} queries in ${n_texts} texts`;
  return rowOf(names, cells, { class: isInFilter ? "asked" : "", title });
}

export class Card {
  constructor(app) {
    this.app = app;
    this.title = el("div", { class: "cardtitle" });
    const label = "Attention by offset. Arrow keys go from one offset to the next.";
    this.profile = keyedCanvas("profile of offsets", label, () => this.drawProfile());
    this.profileHost = el("div", { class: "profile" }, this.profile);
    this.profileRead = el("p", { class: "faint" });
    const binAt = ({ offsetX }) => this.bins?.findIndex(([from, to]) => offsetX >= from && offsetX < to) ?? -1;
    this.profile.addEventListener("pointermove", (event) => this.pointProfile(binAt(event)));
    this.profile.addEventListener("pointerleave", () => this.pointProfile(-1));
    onSteps(this.profile, SIDEWAYS, (step) => {
      if (!this.card) return;
      this.pointProfile(clamp((this.bin ?? FURTHEST + 1) + step, this.card.profile.length - 1));
      say(this.profileRead.textContent);
    });
    this.by = "lift";
    const orders = [["lift", "by lift", "by the lower end of its interval"], ["mass", "by mass"]];
    this.order = segmented("Order of tokens", orders, (value) => {
      this.by = value;
      this.order.show(value);
      this.showTables();
    });
    this.order.show(this.by);
    this.measures = el("section", { "aria-label": "Measures" });
    this.offsets = el("section", {}, el("h2", {}, "How far it looks"), this.profileHost, this.profileRead);
    this.tableHost = el("div", { class: "tables" });
    this.tables = el("section", {}, el("div", { class: "sectionhead" }, el("h2", {}, "Which tokens"), this.order), this.tableHost);
    this.likes = el("section", {});
    this.command = el("section", {});
    const parts = [this.offsets, this.measures, this.tables, this.likes, this.command];
    this.root = el("div", { class: "headcard", tabindex: "-1" }, parts);
  }

  show(card) {
    this.card = card;
    const head = headOf();
    if (this.head !== head) this.all = false;
    this.head = head;
    this.offsets.hidden = !card;
    this.tables.hidden = !card?.tables?.length;
    this.showMeasures();
    this.near = card?.near || [];
    this.showNear();
    this.showCommand(card);
    if (!card) return;
    this.drawProfile();
    this.pointProfile(-1);
    this.showTables();
  }

  showTitle(host) {
    const head = headOf();
    const { explained, warning } = head;
    const roles = head.roles.map((role) => {
      const mark = manifest.roles.marks[role.name];
      const q = role.q === null ? "\u2013" : Number(role.q).toExponential(0);
      const title = `${mark.what}; threshold ${shortNumber(role.threshold)}, q ${q}`;
      const even = Number.isFinite(role.baseline) ? `, at chance ${shortNumber(role.baseline)}` : "";
      const value = ` ${shortNumber(role.value)}${intervalText(role.low, role.high)}${even}${role.tentative ? " (tentative)" : ""}`;
      return el("span", { class: "role", title }, dotOf(mark.color), el("b", {}, mark.label), value);
    });
    fill(host, el("div", { class: "rolelist" }, roles.length ? roles : faint("no role")));
    if (!explained) return;
    host.append(
      el("p", { class: "does" }, head.words, " · ", faint(explained), warning ? el("strong", { class: "unstable" }, ` ! ${warning}`) : null),
      el(
        "details",
        { class: "faint sampled" },
        el("summary", {}, "more"),
        el("p", {}, catalogs.current.record.sampled),
      ),
    );
  }

  showMeasures() {
    const { columns } = catalogs.current;
    const { at, roles } = this.head;
    const [measures, effects] = ["measure", "effect"].map((kind) => catalogs.current.namesOf(kind));
    const resting = roles.map((role) => role.measure);
    const ranked = measures
      .filter((name) => Number.isFinite(columns.get(name).values[at]))
      .sort((a, b) => resting.includes(b) - resting.includes(a) || columns.get(a).rank(at) - columns.get(b).rank(at));
    const names = [...effects, ...(this.all ? ranked : ranked.slice(0, Math.max(FEW, resting.length)))];
    const turnAll = () => {
      this.all = !this.all;
      this.showMeasures();
      this.measures.querySelector(".more-measures").focus();
    };
    const facts = { class: "more-measures", "aria-expanded": String(!!this.all) };
    fill(
      this.measures,
      el("h2", {}, "Measures ", faint(`among all ${catalogs.current.heads.length} heads`)),
      names.length ? this.tableOf(names) : el("p", { class: "faint" }, "none"),
      ranked.length > FEW ? button(this.all ? "fewer" : `all ${ranked.length}`, turnAll, facts) : null,
    );
  }

  chip(attribute, { name }, { title, note, dot = null }) {
    const children = [dot, name, el("small", {}, note)];
    return button(children, () => update(atHead(name)), { class: "chip", [attribute]: name, title });
  }

  /** A table of measures, each with all heads as a strip. */
  tableOf(names) {
    const { columns } = catalogs.current;
    const { at } = this.head;
    const hasEven = names.some((name) => columns.get(name).baselines.some(Number.isFinite));
    const number = (kind, ...children) => el("td", { class: `number ${kind}` }, children);
    const line = (name) => {
      const column = columns.get(name);
      const title = `${[column.title, column.meaning].filter(Boolean).join(": ")} (${name})`;
      return el(
        "tr",
        {},
        el("th", { scope: "row", title }, column.title),
        el("td", { class: "strip" }, this.stripOf(column, at)),
        number("value", el("b", {}, shortNumber(column.values[at])), faint(intervalText(column.lows[at], column.highs[at]))),
        number("faint", baselineNumber(column.baselines[at])),
        number("faint", `${column.rank(at)}`),
      );
    };
    const even = hasEven ? catalogs.current.baseline : "";
    const header = [["measure", ""], ["", "strip"], ["value", "number value"], [even, "number"], ["rank", "number"]];
    return el("table", { class: "measures" }, headerOf(header), el("tbody", {}, names.map(line)));
  }

  /** All heads as faint lines, this one with its interval, and what uniform attention would give. */
  stripOf({ values, lows, highs, baselines }, at) {
    const [width, height] = [84, 16];
    const ratio = devicePixelRatio || 1;
    const picture = el("canvas", { "aria-hidden": "true" });
    Object.assign(picture, { width: width * ratio, height: height * ratio });
    const pen = picture.getContext("2d");
    pen.scale(ratio, ratio);
    const { colours } = this;
    const finite = [...values].filter(Number.isFinite);
    const [low, high] = [Math.min(...finite), Math.max(...finite)];
    const x = (value) => 4 + ((value - low) / (high - low || 1)) * (width - 8);
    pen.fillStyle = colours.faint;
    pen.globalAlpha = Math.max(0.12, Math.min(0.5, 20 / finite.length));
    for (const value of finite) pen.fillRect(x(value) - 0.5, 4, 1, height - 8);
    pen.globalAlpha = 1;
    if (baselines[at] >= low && baselines[at] <= high) {
      pen.fillStyle = colours.ink;
      pen.fillRect(x(baselines[at]) - 0.5, 1, 1, height - 2);
    }
    pen.fillStyle = colours.mark;
    if (Number.isFinite(lows[at])) pen.fillRect(x(lows[at]), height / 2 - 1, x(highs[at]) - x(lows[at]), 2);
    pen.beginPath();
    pen.arc(x(values[at]), height / 2, 3.5, 0, 7);
    pen.fill();
    return picture;
  }

  get colours() {
    return this.app.palette;
  }

  drawProfile() {
    const [width, height] = [this.profileHost.clientWidth, 170];
    if (!this.card || !width) return;
    this.bins = drawProfile(new CanvasPen(this.profile.fit(width, height)), { ...this.card, colours: this.colours, width, height, chosen: this.bin });
  }

  pointProfile(at) {
    this.bin = at >= 0 ? at : null;
    this.drawProfile();
    const { profile, even } = this.card;
    const share = (value) => (value >= 0.0995 ? percent(value) : `${Number((100 * value).toPrecision(2))}%`);
    fill(
      this.profileRead,
      at < 0
        ? "bars: share of its attention; line: uniform attention over the same keys"
        : [el("b", {}, nameOfBin(at, profile.length)), `: ${share(profile[at])}, uniform ${share(even[at])}`],
    );
  }

  /** What rows are ranked by: of the lift the lower end of its interval, so that a token that was seen by chance is not first. */
  key(row) {
    return this.by === "mass" ? row.mass : (row.low ?? row.lift ?? 0);
  }

  /** The rows of a table, those that the filter asks for first. */
  rowsOf(side) {
    const { namedPairs } = filterOf(state.f, catalogs.current.facts);
    return (this.card.tables || [])
      .filter((row) => row.side === side)
      .map((row) => ({ ...row, isInFilter: isNamed(namedPairs, row.tokens.map(bare)) }))
      .sort((a, b) => b.isInFilter - a.isInFilter || this.key(b) - this.key(a))
      .slice(0, MOST_TOKENS);
  }

  showTables() {
    fill(
      this.tableHost,
      Object.entries(SIDES).map(([side, title]) => {
        const rows = this.rowsOf(side);
        if (!rows.length) return null;
        const even = side === "asks" ? OVER_ALL_KEYS : catalogs.current.record.meanings.lift;
        const lift = `mass divided by ${even}, with its 95% interval over texts`;
        const header = headerOf([["token"], ["mass", "number"], ["lift", "number", lift], ["texts", "number"]]);
        return el("table", { class: "tokens" }, el("caption", {}, title), header, el("tbody", {}, rows.map(lineOfTokens)));
      }),
    );
  }

  showNear() {
    const { heads } = catalogs.current;
    this.likes.hidden = !this.near.length;
    const chips = this.near.map(([at, distance]) => {
      const dot = dotOf(markOf(heads[at])?.color || this.colours.rule);
      return this.chip("data-near", heads[at], { title: heads[at].words, note: shortNumber(distance), dot });
    });
    fill(this.likes, el("h2", {}, "Heads like it ", faint("distance")), el("div", { class: "roles" }, chips));
  }

  /** The command that draws this head on the example that is chosen, else the first that is shown, and its query. */
  showCommand(card) {
    const { run, record } = catalogs.current;
    const examples = card?.examples || [];
    const tab = examples.filter(({ why }) => why === state.tab);
    if (state.tab === "decile") tab.reverse(); // the highest first
    const example = examples[state.ex] || tab.find(({ length, n_tokens }) => length === n_tokens) || tab[0]; // one without gaps
    const query = example && state.q >= 0 && example === examples[state.ex] ? state.q : (example?.focus ?? -1);
    const { text, label } = example ? commandOfExample(example, query) : { text: "", label: "" };
    const others = { pictures: "--image photo.jpg", recordings: "--audio speech.wav" };
    const other = others[record.corpus?.of] || inQuotes("A text of your own.");
    const pick = `--pick L${this.head.layer}H${this.head.head}${label ? ` --query ${wordOf(label)}` : ""}`;
    const command = `attnscope heatmap ${text ? inQuotes(text) : other} -m ${wordOf(modelOf(run))} ${pick}`;
    const code = el("code", {}, command);
    const cut = `The atlas keeps ${example?.length} of the ${example?.n_tokens} tokens of this text: without the rest, weights may be others.`;
    fill(
      this.command,
      el("div", { class: "sectionhead" }, el("h2", {}, "Draw it"), copyButton(command, code)),
      el("pre", { class: "command", tabindex: "0" }, code),
      example?.length < example?.n_tokens ? el("p", { class: "faint" }, cut) : null,
    );
  }

  /** What a head does and how far it looks; its numbers are in the CSV. */
  figure() {
    const { card, head, colours } = this;
    const [width, height] = [620, card ? 260 : 46];
    const draw = (pen) => {
      pen.text(head.name, 0, 12, { size: 17, weight: 700, colour: colours.ink });
      pen.text(fitted(head.words, 13, width), 0, 36, { size: 13, colour: colours.ink });
      if (card) pen.moved(0, 60, () => drawProfile(pen, { ...card, colours, width, height: 200 }));
    };
    return { width, height, draw };
  }

  rows() {
    const { columns } = catalogs.current;
    const { at, name: head } = this.head;
    const lines = ["measure", "effect"].flatMap((kind) => catalogs.current.namesOf(kind)).map((name) => {
      const { values, lows, highs, baselines } = columns.get(name);
      const numbers = [values, lows, highs, baselines].map((some) => (Number.isFinite(some[at]) ? some[at] : ""));
      return [head, name, ...numbers, columns.get(name).rank(at)];
    });
    return [["head", "measure", "value", "low", "high", "uniform", "rank"], ...lines];
  }
}
