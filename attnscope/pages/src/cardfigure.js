// A head's card as a figure: all that stands on it, drawn by the pens that save PNG and SVG.
import { markOf } from "./atlas.js";
import { catalogs } from "./catalog.js";
import { manifest } from "./data.js";
import { fitted, widthOf } from "./pen.js";
import { baselineNumber, intervalText, percent, shortNumber } from "./wording.js";

const WIDE = 620;
const LINE = 18;

function wrap(text, size, width) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (widthOf(longer, size) <= width || !lines.at(-1)) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines.filter(Boolean);
}

/** What draws a line, or more, and how high it is. */
const textLine = (text, how, height = LINE) => ({ height, draw: (pen, y) => pen.text(text, 0, y + height / 2, how) });
const gap = (height) => ({ height, draw: () => {} });

/** Columns of texts: [x, align, text, how] of each. */
const columnsLine = (cells) => ({
  height: LINE,
  draw: (pen, y) => {
    for (const [x, align, text, how] of cells) if (text) pen.text(text, x, y + LINE / 2, { size: 11, align, ...how });
  },
});

/** A role's name and value, after a dot of its colour. */
function roleLine({ name, value, low, high, tentative }, colours) {
  const { label, color } = manifest.roles.marks[name];
  const text = `${label} ${shortNumber(value)}${intervalText(low, high)}${tentative ? " (tentative)" : ""}`;
  const draw = (pen, y) => {
    pen.dot(5, y + LINE / 2, 4, color);
    pen.text(text, 15, y + LINE / 2, { size: 12, colour: colours.ink });
  };
  return { height: LINE, draw };
}

function titleParts({ name, roles, words, explained, warning }, colours) {
  const { sampled } = catalogs.current.record;
  const small = (text, how = { colour: colours.faint }) => textLine(text, { size: 12, ...how });
  return [
    textLine(name, { size: 17, weight: 700, colour: colours.ink }, 24),
    ...roles.map((role) => roleLine(role, colours)),
    ...wrap(words, 13, WIDE).map((line) => textLine(line, { size: 13, colour: colours.ink })),
    ...(explained ? [small(explained)] : []),
    ...(warning ? [small(`! ${warning}`, { weight: 600, colour: colours.ink })] : []),
    ...(explained ? [small(sampled)] : []),
  ];
}

const section = (title, colours) => [gap(14), textLine(title, { size: 13, weight: 600, colour: colours.ink }, 22)];

function measureParts(names, at, colours) {
  const { columns, baseline, heads } = catalogs.current;
  const faint = { colour: colours.faint };
  const line = (name, value, even, rank, [ofName, ofValue] = [faint, faint]) =>
    columnsLine([[0, "left", name, ofName], [460, "right", value, ofValue], [540, "right", even, faint], [WIDE, "right", rank, faint]]);
  return [
    ...section(`Measures among all ${heads.length} heads`, colours),
    line("measure", "value", baseline, "rank"),
    ...names.map((name) => {
      const column = columns.get(name);
      const value = `${shortNumber(column.values[at])}${intervalText(column.lows[at], column.highs[at])}`;
      const inks = [{ colour: colours.ink }, { colour: colours.ink, weight: 600 }];
      return line(fitted(column.title, 11, 280), value, baselineNumber(column.baselines[at]), String(column.rank(at)), inks);
    }),
  ];
}

function tableParts(tables, colours) {
  const faint = { colour: colours.faint };
  return tables.flatMap(([title, rows]) => [
    ...section(title, colours),
    columnsLine([[0, "left", "token", faint], [340, "right", "mass", faint], [500, "right", "lift", faint], [WIDE, "right", "texts", faint]]),
    ...rows.map((row) =>
      columnsLine([
        [0, "left", fitted(row.tokens.join(" \u2192 "), 11, 270), { colour: colours.ink }],
        [340, "right", percent(row.mass), { colour: colours.ink }],
        [500, "right", `${shortNumber(row.lift)}\u00d7${intervalText(row.low, row.high)}`, { colour: colours.ink, weight: 600 }],
        [WIDE, "right", String(row.n_texts), faint],
      ]),
    ),
  ]);
}

function nearParts(near, colours) {
  if (!near.length) return [];
  const { heads } = catalogs.current;
  const names = near.map(([at, distance]) => {
    const mark = markOf(heads[at]);
    return `${heads[at].name}${mark ? ` (${mark.label})` : ""} ${shortNumber(distance)}`;
  });
  const lines = wrap(names.join(" \u00b7 "), 11, WIDE).map((line) => textLine(line, { size: 11, colour: colours.ink }));
  return [...section("Heads like it, and how far they are", colours), ...lines];
}

/** The figure of a card: `measures` are names, `tables` [title, rows]; `drawProfile(pen, width, height)` may be null. */
export function figureOfCard({ head, measures, tables, near, drawProfile, colours }) {
  const profile = { height: 200, draw: (pen, y) => pen.moved(0, y, () => drawProfile(pen, WIDE, 200)) };
  const title = "How far it looks: share of attention by offset (bars), uniform attention (line)";
  const parts = [
    ...titleParts(head, colours),
    ...(drawProfile ? [...section(title, colours), profile] : []),
    ...measureParts(measures, head.at, colours),
    ...tableParts(tables, colours),
    ...nearParts(near, colours),
  ];
  return {
    width: WIDE,
    height: parts.reduce((sum, { height }) => sum + height, 0),
    draw: (pen) => {
      let y = 0;
      for (const part of parts) {
        part.draw(pen, y);
        y += part.height;
      }
    },
  };
}
