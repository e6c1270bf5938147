// A head's card as a figure: all that stands on it, drawn by the pens that save PNG and SVG.
import { markOf } from "./atlas.js";
import { catalogs, evenNumber, percent, predictedOf, sampleOf, shortNumber, warningOf } from "./catalog.js";
import { manifest } from "./data.js";
import { fitted, widthOf } from "./pen.js";

const WIDE = 620;
const LINE = 18;
const spanSaid = (low, high, said = shortNumber) => (Number.isFinite(low) && Number.isFinite(high) ? ` [${said(low)}, ${said(high)}]` : "");

/** A text in lines of a width. */
function wrapped(text, size, width) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (widthOf(longer, size) <= width || !lines.at(-1)) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines.filter(Boolean);
}

/** What draws a line, or more, and how high it is. */
const textLine = (said, how, height = LINE) => ({ height, draw: (pen, y) => pen.text(said, 0, y + height / 2, how) });
const gap = (height) => ({ height, draw: () => {} });

/** Columns of texts: [x, align, said, how] of each. */
const columnsLine = (cells) => ({
  height: LINE,
  draw: (pen, y) => {
    for (const [x, align, said, how] of cells) if (said) pen.text(said, x, y + LINE / 2, { size: 11, align, ...how });
  },
});

function titleParts(head, colours) {
  const roles = head.roles.map((role) => {
    const said = `${manifest.roles.marks[role.name].label} ${shortNumber(role.value ?? NaN)}${spanSaid(role.low ?? NaN, role.high ?? NaN)}${role.tentative ? " (tentative)" : ""}`;
    return { said, colour: manifest.roles.marks[role.name].color };
  });
  const { description } = head;
  const explained = !description
    ? ""
    : predictedOf(description, spanSaid);
  return [
    textLine(head.name, { size: 17, weight: 700, colour: colours.ink }, 24),
    ...roles.map(({ said, colour }) => ({
      height: LINE,
      draw: (pen, y) => {
        pen.dot(5, y + LINE / 2, 4, colour);
        pen.text(said, 15, y + LINE / 2, { size: 12, colour: colours.ink });
      },
    })),
    ...wrapped(head.words, 13, WIDE).map((said) => textLine(said, { size: 13, colour: colours.ink })),
    ...(explained ? [textLine(explained, { size: 12, colour: colours.faint })] : []),
    ...(description && warningOf(description) ? [textLine(`! ${warningOf(description)}`, { size: 12, weight: 600, colour: colours.ink })] : []),
    ...(description ? [textLine(sampleOf(catalogs.shown.record.descriptions, catalogs.shown.record.corpus), { size: 12, colour: colours.faint })] : []),
  ];
}

const section = (said, colours) => [gap(14), textLine(said, { size: 13, weight: 600, colour: colours.ink }, 22)];

function measureParts(names, at, colours) {
  const { columns, record, heads } = catalogs.shown;
  const faint = { colour: colours.faint };
  return [
    ...section(`Measures among all ${heads.length} heads`, colours),
    columnsLine([[0, "left", "measure", faint], [460, "right", "value", faint], [540, "right", record.even || "uniform", faint], [WIDE, "right", "rank", faint]]),
    ...names.map((name) => {
      const column = columns.get(name);
      const [low, high] = [column.lows?.[at], column.highs?.[at]];
      const even = column.uniforms?.[at];
      return columnsLine([
        [0, "left", fitted(column.title, 11, 280), { colour: colours.ink }],
        [460, "right", `${shortNumber(column.values[at])}${spanSaid(low, high)}`, { colour: colours.ink, weight: 600 }],
        [540, "right", evenNumber(even), faint],
        [WIDE, "right", String(column.rank(at)), faint],
      ]);
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
        [500, "right", `${shortNumber(row.lift ?? NaN)}\u00d7${spanSaid(row.low ?? NaN, row.high ?? NaN)}`, { colour: colours.ink, weight: 600 }],
        [WIDE, "right", String(row.n_texts), faint],
      ]),
    ),
  ]);
}

function nearParts(near, colours) {
  if (!near.length) return [];
  const { heads } = catalogs.shown;
  const said = near.map(([at, distance]) => {
    const mark = markOf(heads[at]);
    return `${heads[at].name}${mark ? ` (${mark.label})` : ""} ${shortNumber(distance)}`;
  });
  return [...section("Heads like it, and how far they are", colours), ...wrapped(said.join(" \u00b7 "), 11, WIDE).map((line) => textLine(line, { size: 11, colour: colours.ink }))];
}

/**
 * The figure of a card.
 *
 * @param shown {head, measures: names of those that are shown, tables: [title, rows] of each, near, drawProfile(pen, width, height) | null}
 */
export function figureOfCard({ head, measures, tables, near, drawProfile, colours }) {
  const profile = drawProfile
    ? [...section("How far it looks: share of attention by offset (bars), uniform attention (line)", colours), { height: 200, draw: (pen, y) => pen.moved(0, y, () => drawProfile(pen, WIDE, 200)) }]
    : [];
  const parts = [...titleParts(head, colours), ...profile, ...measureParts(measures, head.at, colours), ...tableParts(tables, colours), ...nearParts(near, colours)];
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
