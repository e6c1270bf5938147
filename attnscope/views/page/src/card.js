// A head's card: what is known of it in numbers, how far it looks, which tokens, and what is like it.
import { markOf } from "./atlas.js";
import { figureOfCard } from "./cardfigure.js";
import { bare, catalogs, commandOfExample, detailsOf, evenNumber, headOf, percent, predictedOf, sampleOf, shortNumber, warningOf } from "./catalog.js";
import { manifest } from "./data.js";
import { canvas, dotOf, el, fill, say, segmented } from "./dom.js";
import { CanvasPen } from "./pen.js";
import { Plane } from "./plane.js";
import { filterOf, isAsked } from "./query.js";
import { state, update } from "./state.js";
import { copyButton, inQuotes, modelOf, wordOf } from "./why.js";

const FEW = 7; // measures that are shown before the others are asked for
const FURTHEST = 64; // as records have it
const LOWEST = 1e-4; // the least share that the profile shows
const SIDES = { pairs: "pairs, query \u2192 key", gets: "keys that receive most", asks: "queries that give most" };
const MOST_TOKENS = 8;
const OVER_ALL_KEYS = "what uniform attention over all keys would give"; // what lifts are over where a record does not say
const MOST_PARTNERS = 9;
const LOOKING = "--image photo.jpg 'A question of your own.'"; // of heads that were measured on photos and words

function interval(low, high, said = shortNumber) {
  return Number.isFinite(low) && Number.isFinite(high) ? ` [${said(low)}, ${said(high)}]` : "";
}

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
    pen.line(left, y(share), right, y(share), colours.line, 1, 0.7);
    pen.text(share >= 0.01 ? `${share * 100}%` : `${share * 100}%`, left - 6, y(share), { size: 10, align: "right", colour: colours.faint });
  }
  const bins = profile.map((share, at) => {
    if (at === 0) return [left + 2, left + rest, share, even[at]];
    if (at === profile.length - 1) return [right - rest, right - 2, share, even[at]];
    const offset = at - 1 - FURTHEST;
    return [x(offset - 0.5), x(offset + 0.5), share, even[at]];
  });
  bins.forEach(([from, to, share], at) => {
    if (share > LOWEST) pen.rect(from + (to - from > 4 ? 0.5 : 0), y(share), Math.max(0.8, to - from - (to - from > 4 ? 1 : 0)), low - y(share), at === chosen ? colours.mark : colours.accent, 0.9);
  });
  for (const [from, to, , share] of bins) if (share > 0) pen.line(from, y(share), to, y(share), colours.ink, 1.5, 0.75);
  pen.line(left, low + 0.5, right, low + 0.5, colours.faint);
  for (const offset of [-64, -16, -4, -1, 0, 1, 4, 16, 64])
    pen.text(offset > 0 ? `+${offset}` : String(offset).replace("-", "\u2212"), x(offset), low + 11, { size: 10, align: "center", colour: colours.faint });
  pen.text("<", left + rest / 2, low + 11, { size: 10, align: "center", colour: colours.faint });
  pen.text(">", right - rest / 2, low + 11, { size: 10, align: "center", colour: colours.faint });
  pen.text("tokens from the query to the key", (left + right) / 2, low + 26, { size: 11, align: "center", colour: colours.faint });
  return bins;
}

function nameOfBin(at, n) {
  if (at === 0) return `more than ${FURTHEST} back`;
  if (at === n - 1) return `more than ${FURTHEST} ahead`;
  const offset = at - 1 - FURTHEST;
  return offset === 0 ? "the token itself" : `${Math.abs(offset)} ${offset < 0 ? "back" : "ahead"}`;
}

export class Card {
  constructor(app) {
    this.app = app;
    this.title = el("div", { class: "cardtitle" });
    this.profile = canvas(
      { tabindex: "0", role: "application", "aria-roledescription": "profile of offsets", "aria-label": "Attention by offset. Arrow keys go from one offset to the next." },
      () => this.drawProfile(),
    );
    this.profileHost = el("div", { class: "profile" }, this.profile);
    this.profileRead = el("p", { class: "faint" });
    this.profile.addEventListener("pointermove", (event) => this.pointProfile(this.bins?.findIndex(([from, to]) => event.offsetX >= from && event.offsetX < to) ?? -1));
    this.profile.addEventListener("pointerleave", () => this.pointProfile(-1));
    this.profile.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || !this.card) return;
      event.preventDefault();
      event.stopPropagation();
      const n = this.card.profile.length;
      this.pointProfile(Math.max(0, Math.min(n - 1, (this.bin ?? FURTHEST + 1) + step)));
      say(this.profileRead.textContent);
    });
    this.by = "lift";
    this.order = segmented("Order of tokens", [["lift", "by lift", "by the lower end of its interval"], ["mass", "by mass"]], (value) => {
      this.by = value;
      this.order.show(value);
      this.showTables();
    });
    this.order.show(this.by);
    this.measures = el("section", { "aria-label": "Measures" });
    this.offsets = el("section", {}, el("h2", {}, "How far it looks"), this.profileHost, this.profileRead);
    this.tables = el("section", {}, el("div", { class: "sectionhead" }, el("h2", {}, "Which tokens"), this.order), (this.tableHost = el("div", { class: "tables" })));
    this.evidence = el("section", { class: "evidence", "aria-label": "By other records" });
    this.plane = new Plane(app);
    this.near = el("section", {});
    this.command = el("section", {});
    this.root = el("div", { class: "headcard", tabindex: "-1" }, this.offsets, this.measures, this.evidence, this.tables, this.plane.root, this.near, this.command);
  }

  show(card) {
    this.card = card;
    const head = headOf();
    if (this.head !== head) this.all = false;
    this.head = head;
    this.offsets.hidden = !card;
    this.tables.hidden = !card?.tables?.length;
    this.showMeasures();
    this.plane.show(card, head);
    this.showNear(card?.near || head.near || []);
    this.showCommand(card);
    if (!card) return;
    this.drawProfile();
    this.pointProfile(-1);
    this.showTables();
  }

  /** Name, roles, and the description with what it explains. */
  showTitle(host) {
    const head = headOf();
    const { description } = head;
    const { record } = catalogs.shown;
    const warning = description ? warningOf(description) : "";
    fill(
      host,
      el(
        "div",
        { class: "rolelist" },
        head.roles.map((role) => {
          const mark = manifest.roles.marks[role.name];
          const even = Number.isFinite(role.baseline) ? `, at chance ${shortNumber(role.baseline)}` : "";
          return el(
            "span",
            { class: "role", title: `${mark.what}; threshold ${shortNumber(role.threshold ?? NaN)}, q ${role.q === null ? "\u2013" : Number(role.q).toExponential(0)}` },
            dotOf(mark.color),
            el("b", {}, mark.label),
            ` ${shortNumber(role.value ?? NaN)}${interval(role.low ?? NaN, role.high ?? NaN)}${even}${role.tentative ? " (tentative)" : ""}`,
          );
        }),
        head.roles.length ? null : el("span", { class: "faint" }, "no role"),
      ),
      description
        ? el(
            "p",
            { class: "does" },
            head.words,
            " · ",
            el(
              "span",
              { class: "faint" },
              predictedOf(description, interval),
            ),
            warning ? el("strong", { class: "unstable" }, ` ! ${warning}`) : null,
            el("span", { class: "faint sampled" }, ["", sampleOf(record.descriptions, record.corpus), detailsOf(description)].filter((said, at) => !at || said).join(" · ")),
          )
        : null,
    );
  }

  showMeasures() {
    const { columns } = catalogs.shown;
    const { at, roles } = this.head;
    const [measures, effects] = ["measure", "effect"].map((kind) => catalogs.shown.namesOf(kind));
    const resting = roles.map((role) => role.measure);
    const ranked = measures
      .filter((name) => Number.isFinite(columns.get(name).values[at]) && !columns.get(name).source)
      .sort((a, b) => resting.includes(b) - resting.includes(a) || columns.get(a).rank(at) - columns.get(b).rank(at));
    const names = [...effects, ...(this.all ? ranked : ranked.slice(0, Math.max(FEW, resting.length)))];
    this.measuresSeen = names;
    const n = catalogs.shown.heads.length;
    fill(
      this.measures,
      el("h2", {}, "Measures ", el("span", { class: "faint" }, `among all ${n} heads`)),
      names.length ? this.tableOf(names) : el("p", { class: "faint" }, "none"),
      ranked.length > FEW
        ? el(
            "button",
            {
              type: "button",
              class: "more-measures",
              "aria-expanded": String(!!this.all),
              onclick: () => {
                this.all = !this.all;
                this.showMeasures();
                this.measures.querySelector(".more-measures").focus();
              },
            },
            this.all ? "fewer" : `all ${ranked.length}`,
          )
        : null,
    );
    this.showEvidence();
  }

  /** What records of relations, ablations, circuits and needles say of the head, where the atlas was given any. */
  showEvidence() {
    const { columns, record } = catalogs.shown;
    const { at, roles } = this.head;
    const of = (source) => [...columns.values()].filter((column) => column.source === source);
    const known = (source) => of(source).filter(({ values }) => Number.isFinite(values[at])).map(({ name }) => name);
    const relations = of("relations").filter(({ relation }) => roles.some(({ name }) => name === relation)).map(({ name }) => name);
    const [without, weights, needles] = [known("ablation"), known("circuits"), known("needles")];
    const hasRelations = of("relations").length > 0;
    fill(
      this.evidence,
      hasRelations ? el("h2", {}, "Relations that it expresses") : null,
      relations.length ? this.tableOf(relations) : hasRelations ? el("p", { class: "faint" }, "none of those in the record") : null,
      without.length ? [el("h2", {}, "What changes without it"), this.tableOf(without)] : null,
      weights.length ? [el("h2", {}, "By its weights"), this.tableOf(weights)] : null,
      needles.length ? [el("h2", {}, "On needles in long texts"), this.tableOf(needles)] : null,
      this.partners("Reads what these write", "receiver", "sender", record.compositions),
      this.partners("Is read by", "sender", "receiver", record.compositions),
    );
  }

  /** Heads that it composes with, the strongest above random directions first; each one click away. */
  partners(title, mine, other, compositions = []) {
    const { heads } = catalogs.shown;
    const found = compositions.filter((one) => one[mine] === this.head.at && one.share > one.expected).sort((a, b) => b.share - b.expected - a.share + a.expected);
    if (!found.length) return null;
    return [
      el("h2", {}, `${title} `, el("span", { class: "faint" }, "share above random directions")),
      el(
        "div",
        { class: "roles" },
        found.slice(0, MOST_PARTNERS).map(({ by, share, expected, deviations, ...ends }) => {
          const head = heads[ends[other]];
          const said = `${by}: share ${shortNumber(share)}, of random directions ${shortNumber(expected)}; ${shortNumber(deviations)} standard deviations above chance`;
          return el(
            "button",
            { type: "button", class: "chip", "data-partner": head.name, title: said, onclick: () => update({ head: head.name, ex: -1, q: -1 }) },
            head.name,
            el("small", {}, `${by} +${shortNumber(share - expected)}`),
          );
        }),
      ),
    ];
  }

  /** A table of measures, each with all heads as a strip. */
  tableOf(names) {
    const { columns } = catalogs.shown;
    const { at } = this.head;
    const hasEven = names.some((name) => columns.get(name).uniforms.some(Number.isFinite));
    const line = (name) => {
      const column = columns.get(name);
      const [value, low, high, even] = [column.values[at], column.lows[at], column.highs[at], column.uniforms[at]];
      const picture = el("canvas", { "aria-hidden": "true" });
      this.drawStrip(picture, column, at);
      return el(
        "tr",
        {},
        el("th", { scope: "row", title: `${[column.title, column.what].filter(Boolean).join(": ")} (${name})` }, column.title),
        el("td", { class: "strip" }, picture),
        el("td", { class: "number value" }, el("b", {}, shortNumber(value)), el("span", { class: "faint" }, interval(low, high))),
        el("td", { class: "number faint" }, evenNumber(even)),
        el("td", { class: "number faint" }, `${column.rank(at)}`),
      );
    };
    return el(
      "table",
      { class: "measures" },
      el("thead", {}, el("tr", {}, [["measure", ""], ["", "strip"], ["value", "number value"], [hasEven ? catalogs.shown.record.even || "uniform" : "", "number"], ["rank", "number"]].map(([said, kind]) => (said ? el("th", { scope: "col", class: kind }, said) : el("td", { class: kind }))))),
      el("tbody", {}, names.map(line)),
    );
  }

  /** All heads as faint lines, this one with its interval, and what uniform attention would give. */
  drawStrip(picture, { values, lows, highs, uniforms }, at) {
    const [width, height] = [84, 16];
    const ratio = devicePixelRatio || 1;
    [picture.width, picture.height] = [width * ratio, height * ratio];
    const pen = picture.getContext("2d");
    pen.scale(ratio, ratio);
    const { colours } = this;
    const known = [...values].filter(Number.isFinite);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const x = (value) => 4 + ((value - low) / (high - low || 1)) * (width - 8);
    pen.fillStyle = colours.faint;
    pen.globalAlpha = Math.max(0.12, Math.min(0.5, 20 / known.length));
    for (const value of known) pen.fillRect(x(value) - 0.5, 4, 1, height - 8);
    pen.globalAlpha = 1;
    if (uniforms[at] >= low && uniforms[at] <= high) {
      pen.fillStyle = colours.ink;
      pen.fillRect(x(uniforms[at]) - 0.5, 1, 1, height - 2);
    }
    pen.fillStyle = colours.mark;
    if (Number.isFinite(lows[at])) pen.fillRect(x(lows[at]), height / 2 - 1, x(highs[at]) - x(lows[at]), 2);
    pen.beginPath();
    pen.arc(x(values[at]), height / 2, 3.5, 0, 7);
    pen.fill();
  }

  get colours() {
    return this.app.palette;
  }

  drawProfile() {
    const [width, height] = [this.profileHost.clientWidth, 170];
    if (!this.card || !width) return;
    const context = this.profile.fit(width, height);
    context.clearRect(0, 0, width, height);
    this.bins = drawProfile(new CanvasPen(context), { ...this.card, colours: this.colours, width, height, chosen: this.bin });
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
    const { asked } = filterOf(state.f, catalogs.shown.facts);
    return (this.card.tables || [])
      .filter((row) => row.side === side)
      .map((row) => ({ ...row, asked: isAsked(asked, row.tokens.map(bare)) }))
      .sort((a, b) => b.asked - a.asked || this.key(b) - this.key(a))
      .slice(0, MOST_TOKENS);
  }

  showTables() {
    fill(
      this.tableHost,
      Object.entries(SIDES).map(([side, title]) => {
        const mine = this.rowsOf(side);
        if (!mine.length) return null;
        return el(
          "table",
          { class: "tokens" },
          el("caption", {}, title),
          el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "token"), el("th", { scope: "col", class: "number" }, "mass"), el("th", { scope: "col", class: "number", title: `mass divided by ${side === "asks" ? OVER_ALL_KEYS : catalogs.shown.options.lift || OVER_ALL_KEYS}, with its 95% interval over texts` }, "lift"), el("th", { scope: "col", class: "number" }, "texts"))),
          el(
            "tbody",
            {},
            mine.map((row) =>
              el(
                "tr",
                { class: row.asked ? "asked" : "", title: `seen with ${row.count} queries in ${row.n_texts} texts` },
                el("th", { scope: "row" }, row.tokens.flatMap((token, at) => [at ? el("span", { class: "faint" }, "\u2192") : null, el("q", { class: "token" }, token)])),
                el("td", { class: "number" }, percent(row.mass)),
                el("td", { class: "number" }, el("b", {}, `${shortNumber(row.lift ?? NaN)}\u00d7`), el("span", { class: "faint" }, interval(row.low ?? NaN, row.high ?? NaN))),
                el("td", { class: "number faint" }, String(row.n_texts)),
              ),
            ),
          ),
        );
      }),
    );
  }

  showNear(near) {
    const { heads } = catalogs.shown;
    this.near.hidden = !near.length;
    fill(
      this.near,
      el("h2", {}, "Heads like it ", el("span", { class: "faint" }, "distance")),
      el(
        "div",
        { class: "roles" },
        near.map(([at, distance]) =>
          el(
            "button",
            { type: "button", class: "chip", "data-near": heads[at].name, title: heads[at].words, onclick: () => update({ head: heads[at].name, ex: -1, q: -1 }) },
            dotOf(markOf(heads[at])?.color || this.colours.line),
            heads[at].name,
            el("small", {}, shortNumber(distance)),
          ),
        ),
      ),
    );
  }

  /** The command that draws this head on the example that is chosen, else the first that is shown, and its query. */
  showCommand(card) {
    const { run } = catalogs.shown;
    const seen = (card?.examples || []).filter(({ why }) => why === state.tab);
    if (state.tab === "decile") seen.reverse(); // the highest first
    const shown = card?.examples?.[state.ex] || seen.find((example) => example.length === example.n_tokens) || seen[0]; // one without gaps
    const query = shown && state.q >= 0 && shown === card.examples[state.ex] ? state.q : (shown?.focus ?? -1);
    const { text, asked } = shown ? commandOfExample(shown, query) : { text: "", asked: "" };
    const { record } = catalogs.shown;
    const others = { pictures: "--image photo.jpg", "pictures among words": LOOKING, recordings: "--audio speech.wav" };
    const given = text ? inQuotes(text) : record.shape === "pictures" ? LOOKING : others[record.corpus?.of] || inQuotes("A text of your own.");
    const command = `attnscope heatmap ${given} -m ${wordOf(modelOf(run))} --pick L${this.head.layer}H${this.head.head}${asked ? ` --query ${wordOf(asked)}` : ""}`;
    const code = el("code", {}, command);
    const copy = copyButton(command, code);
    const part = shown && shown.length < shown.n_tokens ? el("p", { class: "faint" }, `The atlas keeps ${shown.length} of the ${shown.n_tokens} tokens of this text: without the rest, weights may be others.`) : null;
    fill(this.command, el("div", { class: "sectionhead" }, el("h2", {}, "Draw it"), copy), el("pre", { class: "numpy", tabindex: "0" }, code), part);
  }

  /** All of the card, as it is seen. */
  figure() {
    const { card, head, colours } = this;
    return figureOfCard({
      head,
      measures: this.measuresSeen,
      tables: card ? Object.entries(SIDES).map(([side, title]) => [title, this.rowsOf(side)]).filter(([, rows]) => rows.length) : [],
      near: card?.near || head.near || [],
      drawProfile: card && ((pen, width, height) => drawProfile(pen, { ...card, colours, width, height })),
      colours,
    });
  }

  rows() {
    const { columns } = catalogs.shown;
    const { at } = this.head;
    return [
      ["head", "measure", "value", "low", "high", "uniform", "rank"],
      ...[...catalogs.shown.namesOf("measure"), ...catalogs.shown.namesOf("effect")].map((name) => {
        const column = columns.get(name);
        const known = (value) => (Number.isFinite(value) ? value : "");
        return [this.head.name, name, known(column.values[at]), known(column.lows[at]), known(column.highs[at]), known(column.uniforms[at]), column.rank(at)];
      }),
    ];
  }
}
