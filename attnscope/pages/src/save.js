// What is seen, as files: PNG, SVG, CSV.
import { manifest } from "./data.js";
import { CanvasPen, SvgPen } from "./pen.js";
import { atlasHooks, ofAtlas, state } from "./state.js";

const MARGIN = 16;
const FOOT = 26;
const MOST_SIDE = 12000; // beyond it browsers refuse a canvas

function hand(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

/** The beginning of the hash of a model's weights; empty where there is none. */
export function shortHash({ sha256 }) {
  return sha256 ? `sha256 ${String(sha256).slice(0, 12)}` : "";
}

function provenance() {
  const { run, title } = ofAtlas() ? atlasHooks.about() : manifest.texts[state.t];
  const facts = [run.model, run.dtype, shortHash(run), `attnscope ${manifest.version}`, title];
  return facts.filter(Boolean).join(" · ");
}

function drawAll(pen, figure, colours, [width, height]) {
  pen.rect(0, 0, width, height, colours.ground);
  pen.moved(MARGIN, MARGIN, () => figure.draw(pen));
  pen.within(0, height - FOOT, width - MARGIN, FOOT, () =>
    pen.text(provenance(), MARGIN, height - FOOT / 2, { size: 10, colour: colours.faint }),
  );
}

function quoted(field) {
  const text = String(field);
  // A field that begins with one of these would be run by a spreadsheet; a number is no formula.
  const safe = /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** What a file is called: by its view and head, and where there are several by its text and kind of attention. */
function fileName(view, kind) {
  const { maps } = manifest.texts[state.t] || {};
  const ofText = !ofAtlas();
  const text = ofText && manifest.texts.length > 1 ? `of text ${state.t + 1}` : "";
  const map = ofText && maps.length > 1 ? maps[state.m].kind : "";
  return ["attnscope", view.name(), text, map].filter(Boolean).join(" ").replaceAll(" ", "-") + `.${kind}`;
}

export async function save(view, kind, colours) {
  if (kind === "csv") {
    const lines = (await view.rows()).map((row) => row.map(quoted).join(",")).join("\n");
    return hand(new Blob([lines, "\n"], { type: "text/csv;charset=utf-8" }), fileName(view, kind));
  }
  const figure = await view.figure();
  const size = [Math.ceil(figure.width + 2 * MARGIN), Math.ceil(figure.height + 2 * MARGIN + FOOT - 8)];
  const name = fileName(view, kind);
  if (kind === "svg") {
    const pen = new SvgPen(...size);
    drawAll(pen, figure, colours, size);
    return hand(new Blob([pen.document(view.name())], { type: "image/svg+xml" }), name);
  }
  const scale = Math.min(2, MOST_SIDE / Math.max(...size));
  // Not a canvas of the document, whose toBlob waits for an idle moment, up to seconds.
  const sheet = new OffscreenCanvas(Math.ceil(size[0] * scale), Math.ceil(size[1] * scale));
  const context = sheet.getContext("2d");
  context.scale(scale, scale);
  drawAll(new CanvasPen(context), figure, colours, size);
  return hand(await sheet.convertToBlob({ type: "image/png" }), name);
}
