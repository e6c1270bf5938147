// Photo: where in a picture a word looks, and which words look at a patch; of vision models patch by patch.
import { SCALES, stepOf } from "./colour.js";
import { digits, has, packedMap, manifest, matrix, nameOf } from "./data.js";
import {
  arrowOf, canvas, clamp, el, faint, fill, isChoice, isShortcut, keyedCanvas, say, sheetOf, tick, tokenOf, toolbar,
} from "./dom.js";
import { Legend, drawScale, endOf } from "./heat.js";
import { largestOf } from "./heads.js";
import { strongest, titleOf } from "./matrix.js";
import { CanvasPen } from "./pen.js";
import { mapOf, register, state, update } from "./state.js";
import { WordsView, attends, pageOf, shadeToken } from "./words.js";

const DARKEST = 0.6; // how much of a colour is left where the photo is black, as in the figures
const MOST_HIGH = 0.62; // of the window: words stay in sight beside the photo
const MOST_HIGH_ABOVE = 0.34; // where the words stand below it
const SAVED = 640; // pixels a picture is wide in a saved figure

/** A photo's pixels: as they are, and as the grey that colours are multiplied with. */
async function imagesOf(photo) {
  const [width, height] = photo.size;
  const whole = sheetOf(width, height);
  const context = whole.getContext("2d", { willReadFrequently: true });
  const image = new Image();
  image.src = `data:image/jpeg;base64,${document.getElementById(`d${photo.block}`).textContent}`;
  await image.decode();
  context.drawImage(image, 0, 0);
  const shade = context.getImageData(0, 0, width, height);
  const { data } = shade;
  for (let at = 0; at < data.length; at += 4) {
    const grey = 0.2126 * data[at] + 0.7152 * data[at + 1] + 0.0722 * data[at + 2];
    data[at] = data[at + 1] = data[at + 2] = Math.round(255 * DARKEST + (1 - DARKEST) * grey);
  }
  const grey = sheetOf(width, height);
  grey.getContext("2d").putImageData(shade, 0, 0);
  return { whole, grey };
}

/** Draws a photo, with a colour a patch laid over it where there are weights. */
function paintOver(context, { whole, grey }, [rows, columns], weights, look, width, height) {
  context.imageSmoothingEnabled = true;
  context.imageSmoothingQuality = "high";
  context.globalCompositeOperation = "source-over";
  if (!weights) return context.drawImage(whole, 0, 0, width, height);
  const cells = sheetOf(columns, rows);
  const pixels = new ImageData(columns, rows);
  const colours = new Uint32Array(pixels.data.buffer);
  weights.forEach((weight, at) => (colours[at] = Number.isNaN(weight) ? 0xffffffff : look.table.packed[stepOf(weight, look.low, look.high)]));
  cells.getContext("2d").putImageData(pixels, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(cells, 0, 0, width, height);
  context.imageSmoothingEnabled = true;
  context.globalCompositeOperation = "multiply";
  context.drawImage(grey, 0, 0, width, height);
  context.globalCompositeOperation = "source-over";
}

const sumOf = (weights) => weights.reduce((sum, weight) => sum + (weight || 0), 0);
const largestOfAll = (weights) => weights.reduce((high, weight) => Math.max(high, weight || 0), 0);
const rowOfCell = ({ grid }, at) => Math.floor(at / grid[1]);
const columnOfCell = ({ grid }, at) => at % grid[1];
const inPercent = (share) => `${(100 * share).toFixed(1)}%`;

/** One picture on the screen: its canvas, and what goes to it. */
class Panel {
  constructor(view, photo, number) {
    Object.assign(this, { view, photo, number });
    this.base = canvas({ "aria-hidden": "true" }, () => this.draw());
    this.over = keyedCanvas("picture in patches", `${photo.source}. Arrow keys go from patch to patch, Enter keeps one.`);
    this.share = el("span", {});
    const facts = faint(photo.facts.replace(`${photo.source}, `, ""));
    this.root = el(
      "figure",
      { class: "photo" },
      el("div", { class: "frame" }, this.base, this.over),
      el("figcaption", {}, el("b", {}, photo.source), this.share, facts),
    );
    this.over.addEventListener("pointermove", (event) => view.point(this.patchAt(event)));
    this.over.addEventListener("pointerleave", () => view.point(null));
    this.over.addEventListener("click", (event) => view.pickPatch(this.patchAt(event)));
    this.over.addEventListener("focus", () => this.over.matches(":focus-visible") && view.point(this.start()));
    this.over.addEventListener("blur", () => view.point(null));
    this.over.addEventListener("keydown", (event) => this.key(event));
    imagesOf(photo).then((images) => {
      this.images = images;
      this.draw();
    });
  }

  /** The patch that keys begin at. */
  start() {
    const { patch } = this.view;
    if (patch?.picture === this.number) return patch;
    const [rows, columns] = this.photo.grid;
    return { picture: this.number, row: Math.floor(rows / 2), column: Math.floor(columns / 2) };
  }

  patchAt(event) {
    const box = this.over.getBoundingClientRect();
    const [rows, columns] = this.photo.grid;
    const within = (share, n) => clamp(Math.floor(share * n), n - 1);
    const row = within((event.clientY - box.top) / box.height, rows);
    return { picture: this.number, row, column: within((event.clientX - box.left) / box.width, columns) };
  }

  key(event) {
    if (isShortcut(event)) return;
    const at = this.start();
    const step = arrowOf(event);
    if (!step && !isChoice(event)) return;
    event.preventDefault();
    if (!step) return this.view.pickPatch(at);
    const [rows, columns] = this.photo.grid;
    const [row, column] = [clamp(at.row + step[0], rows - 1), clamp(at.column + step[1], columns - 1)];
    this.view.point({ picture: this.number, row, column });
    say(this.view.read.textContent);
  }

  show(weights, look) {
    Object.assign(this, { weights, look });
    this.draw();
  }

  draw() {
    const room = this.root.clientWidth;
    if (!room || !this.images) return;
    const [w, h] = this.photo.size;
    const width = Math.floor(Math.min(room, (innerHeight * (innerWidth > 900 ? MOST_HIGH : MOST_HIGH_ABOVE) * w) / h));
    const height = Math.round((width * h) / w);
    this.room = [width, height];
    paintOver(this.base.fit(width, height), this.images, this.photo.grid, this.weights, this.look, width, height);
    this.mark();
    this.root.dataset.painted = `${width},${height}`;
  }

  /** Frames the patch that is looked at. */
  mark() {
    if (!this.room) return;
    const [width, height] = this.room;
    const pen = new CanvasPen(this.over.fit(width, height));
    const [rows, columns] = this.photo.grid;
    const [dx, dy] = [width / columns, height / rows];
    for (const { picture, row, column } of this.view.marks())
      if (picture === this.number) {
        pen.frame(column * dx, row * dy, dx, dy, "#ffffff", 4);
        pen.frame(column * dx, row * dy, dx, dy, "#d55e00", 2);
      }
  }
}

class PhotoView extends WordsView {
  constructor(app) {
    super(app, "patch");
    this.bare = tick("photo alone", (on) => {
      this.isBare = on;
      this.shade();
    });
    this.photos = el("div", { class: "photos" });
    this.legends = [new Legend("weight on a patch"), new Legend("weight of a word on the patch")];
    const pictures = el("section", { "aria-label": "Pictures" }, this.legends[0].root, this.photos);
    const words = el("section", { "aria-label": "Words" }, this.legends[1].root, this.pages);
    const bar = toolbar(this.title, this.read, this.sides, this.bare);
    this.root = el("div", { class: "view photo" }, bar, el("div", { class: "looking" }, pictures, words));
    this.pages.addEventListener("focusout", () => this.hear(null));
  }

  turn(side) {
    update({ side });
  }

  focused(span) {
    if (this.app.byKeys) this.hear(span);
  }

  /** The number of the map that is shown: words over patches, else patches over patches. */
  get map() {
    return manifest.texts[state.t].looking ? "looking" : state.m;
  }

  /** What looks at pictures: a word, or a query that the model learned and that stands for no word. */
  get asker() {
    const { kind, queries } = packedMap(state.t, this.map);
    return this.map === "looking" && kind === "cross" && !queries.text ? "query" : "word";
  }

  /** The head that is shown; of one that has no map over the picture, the mean, which `excuse` says. */
  get spec() {
    return this.isOfMap && has(state.t, this.map, state.h) ? state.h : "mean";
  }

  /** Whether the heads to choose from are those that look at the picture. */
  get isOfMap() {
    return packedMap(state.t, this.map).kind === mapOf().kind;
  }

  /** Why it is not the chosen head that is shown; empty where it is. */
  get excuse() {
    const { kind } = packedMap(state.t, this.map);
    if (!this.isOfMap) return `the ${mapOf().kind} heads do not look at the picture: this is the mean of the ${kind} heads`;
    return this.spec === state.h ? "" : `${nameOf(state.h)} has no map over the picture: this is the mean of all heads`;
  }

  focus() {
    (this.pages.querySelector('[tabindex="0"]') || this.panels?.[0]?.over)?.focus({ preventScroll: true });
  }

  name() {
    return `photo ${nameOf(this.spec)}`;
  }

  async show() {
    const call = (this.lastCall = {});
    const { photos } = manifest.texts[state.t];
    if (photos) {
      const { map, spec } = this;
      const shown = await matrix(state.t, map, spec, state.hide, state.words);
      const high = state.scale === "figure" ? await this.largest() : 0;
      if (this.lastCall !== call) return;
      Object.assign(this, { shown, high, amongWords: map === "looking" });
      this.sides.show(state.side);
      this.build(photos);
      fill(this.title, this.isOfMap ? titleOf(spec) : el("b", {}, nameOf(spec)), this.excuse ? faint(this.excuse) : null);
      this.shade();
    } else {
      this.shown = null;
      this.built = "";
      for (const part of [this.title, this.photos, this.pages, this.list]) fill(part);
      for (const { root } of this.legends) root.hidden = true;
      fill(this.read, faint("this text has no picture"));
    }
    this.bare.hidden = !photos;
    this.sides.hidden = !photos || this.amongWords;
    this.root.dataset.shown = [state.t, state.m, state.h].join();
  }

  /** The largest weight of any head on a patch. */
  largest() {
    const cells = manifest.texts[state.t].photos.flatMap((photo) => photo.cells).filter((cell) => cell >= 0);
    return largestOf(state.t, this.map, state.hide, state.words, cells);
  }

  build(photos) {
    const { rows } = this.shown;
    const name = [state.t, state.m, state.hide, state.words].join();
    if (name === this.built) return;
    if (this.builtPhotos !== photos) {
      this.panels = photos.map((photo, number) => new Panel(this, photo, number));
      fill(this.photos, this.panels.map(({ root }) => root));
      this.builtPhotos = photos;
    }
    this.built = name;
    this.overWord = this.overPatch = null;
    // Of a vision model only what is no patch stands in a line: CLS, registers.
    const patches = new Set(photos.flatMap(({ cells }) => cells));
    const wanted = (at) => this.amongWords || !patches.has(rows.groups[at].first);
    const words = this.asker === "query" ? "The learned queries" : "The words after the picture";
    const page = pageOf(rows, "q", this.amongWords ? words : "Tokens that are no patch", { wanted, opening: false });
    this.spans = page.spans;
    fill(this.pages, page.spans.some(Boolean) ? page.root : null);
  }

  // What is looked at ---------------------------------------------------------------------------------------------

  /** The patch that is pointed at, else the one that is kept. */
  get patch() {
    return this.overPatch || this.keptPatch();
  }

  keptPatch() {
    const [picture, row, column] = state.p.split(",").map(Number);
    const [rows, columns] = manifest.texts[state.t].photos?.[picture]?.grid || [0, 0];
    return state.p && row < rows && column < columns ? { picture, row, column } : null;
  }

  /** Which of the cells of its picture a patch is. */
  numberOf({ picture, row, column }) {
    return row * manifest.texts[state.t].photos[picture].grid[1] + column;
  }

  /** The place of a patch among rows or columns; -1 = no token stands for it. */
  placeOf(patch, axis) {
    const cell = manifest.texts[state.t].photos[patch.picture].cells[this.numberOf(patch)];
    return cell < 0 ? -1 : axis.place[cell];
  }

  keptWord() {
    const { rows } = this.shown;
    const token = state.q - (manifest.texts[state.t].looking?.first || 0);
    const at = state.q >= 0 && token >= 0 && token < rows.place.length ? rows.place[token] : -1;
    return at >= 0 && this.spans[at] ? at : null;
  }

  /** What the colours over the picture are of: {side, at} with a name; `at` null = the mean over `rows`. */
  source() {
    const { rows, columns } = this.shown;
    const ordinary = rows.groups.flatMap((_, at) => (rows.special[at] ? [] : [at]));
    const word = this.overWord ?? this.keptWord();
    if (this.amongWords) {
      if (word !== null) return { side: "q", at: word, name: rows.labels[word] };
      const written = ordinary.filter((at) => rows.written[at]);
      if (written.length) return { side: "q", at: null, name: "mean over the words it wrote", rows: written };
      const askers = this.asker === "query" ? "learned queries" : "words";
      return { side: "q", at: null, name: `mean over the ${askers}`, rows: ordinary };
    }
    const kept = this.keptPatch();
    const patch = this.overWord !== null ? null : kept || (this.keptWord() === null ? this.overPatch : null);
    const { side } = state;
    const axis = side === "q" ? rows : columns;
    const patchAt = patch ? this.placeOf(patch, axis) : -1;
    if (patchAt >= 0) return { side, at: patchAt, name: `patch ${axis.labels[patchAt]}`, patch };
    const cls = axis.labels.indexOf("CLS");
    const at = word ?? (cls >= 0 ? cls : null);
    if (at !== null) return { side, at, name: axis.labels[at] };
    return { side: "q", at: null, name: "mean over patches", rows: ordinary };
  }

  /** The weights of the patches of a picture, row by row; NaN where no token stands for one. */
  over(photo, { side }, line) {
    const axis = this.axis(side === "q" ? "k" : "q");
    return photo.cells.map((cell) => (cell < 0 || axis.place[cell] < 0 ? NaN : line[axis.place[cell]]));
  }

  marks() {
    return [this.patch, this.keptPatch()].filter(Boolean);
  }

  // Showing it ----------------------------------------------------------------------------------------------------

  top(weights) {
    return { fixed: 1, figure: this.high }[state.scale] || largestOfAll(weights) || 1;
  }

  shade() {
    if (!this.shown) return;
    const { photos } = manifest.texts[state.t];
    const source = this.source();
    const line = Float32Array.from(this.weightsOf(source.side, source.at, source.rows));
    const all = photos.map((photo) => this.over(photo, source, line));
    const light = SCALES.light.sequential; // over a photo dark ground would hide the photo, not the small weights
    const largest = largestOfAll(all.flat());
    const look = { low: 0, high: this.top(all.flat()), table: light };
    this.now = { source, all, look };
    this.legends[0].root.hidden = this.isBare;
    this.legends[0].show(look, endOf(look.high), largest);
    this.panels.forEach((panel, number) => {
      const weights = all[number];
      const high = largestOfAll(weights);
      const at = weights.indexOf(high);
      const cell = `row ${rowOfCell(photos[number], at)}, column ${columnOfCell(photos[number], at)}`;
      const where = at < 0 ? "" : `, at most ${digits(high)}, to ${cell}`;
      const gives = `${inPercent(sumOf(weights))} of its attention goes here${where}`;
      const gets = `${digits(sumOf(weights) / (weights.length || 1))} on average comes from here`;
      fill(panel.share, source.side === "q" ? gives : gets);
      panel.show(this.isBare ? null : weights, look);
    });
    this.shadeWords(source, line);
    this.tell(source);
    const isOne = photos.length === 1;
    const nameOfCell = (number, at) => `${isOne ? "" : `${number}:`}${rowOfCell(photos[number], at)},${columnOfCell(photos[number], at)}`;
    const labels = all.flatMap((weights, number) => weights.map((_, at) => nameOfCell(number, at)));
    fill(
      this.list,
      strongest(`${source.name}: patches`, labels, all.flat(), { most: 10, least: 0.00005, high: look.high }),
      el("p", { class: "faint" }, `${isOne ? "" : "picture:"}row,column of a patch, each from 0`),
    );
  }

  /** What each word gives to the patch that is looked at; of vision models what tokens without a place give or get. */
  wordWeights(source, line) {
    if (!this.amongWords) return line;
    const column = this.patch ? this.placeOf(this.patch, this.shown.columns) : -1;
    return column < 0 ? null : this.weightsOf("k", column);
  }

  shadeWords(source, line) {
    const weights = this.wordWeights(source, line);
    const table = this.app.palette.sequential;
    const high = weights && this.top(this.amongWords ? weights : [this.now.look.high]);
    this.legends[1].root.hidden = !weights || !this.amongWords;
    fill(this.legends[1].unit, `weight of a ${this.asker} on the patch`);
    if (weights) this.legends[1].show({ low: 0, high, table }, endOf(high), largestOfAll(weights));
    const mine = this.amongWords || !source.patch ? source.at : null;
    const first = this.spans.findIndex(Boolean);
    this.spans.forEach((span, at) => {
      shadeToken(span, weights ? stepOf(weights[at], 0, high) : 0, table);
      span.classList.toggle("focus", at === mine);
      span.setAttribute("aria-pressed", at === this.keptWord());
      span.tabIndex = at === (this.keptWord() ?? first) ? 0 : -1;
    });
  }

  tell(source) {
    const { patch } = this;
    const token = tokenOf(source.name);
    const isOther = patch && !(source.patch && patch === source.patch);
    const weight = isOther ? this.now.all[patch.picture][this.numberOf(patch)] : NaN;
    const cell = patch && tokenOf(`row ${patch.row}, column ${patch.column}`);
    if (!Number.isNaN(weight)) return fill(this.read, attends(source.side, token, cell, weight));
    const hint = this.amongWords ? `point at a ${this.asker}, or at the picture` : "point at the picture";
    const verb = source.side === "q" ? "attends to" : "is attended by";
    fill(this.read, source.at === null ? faint(`${source.name} \u00b7 ${hint}`) : el("span", {}, token, ` ${verb} what is shaded`));
  }

  // Pointing and choosing -----------------------------------------------------------------------------------------

  /** Points at a patch; null = at none. */
  point(patch) {
    if (!this.shown || String(Object.values(patch || {})) === String(Object.values(this.overPatch || {}))) return;
    this.overPatch = patch;
    this.shade();
  }

  /** Points at a word; null = at none. */
  hear(span) {
    const at = span ? Number(span.dataset.at) : null;
    if (!this.shown || at === this.overWord) return;
    this.overWord = at;
    this.shade();
  }

  choose(span) {
    if (!span) return;
    const at = Number(span.dataset.at);
    const token = this.shown.rows.groups[at].first + (manifest.texts[state.t].looking?.first || 0);
    update({ q: this.keptWord() === at ? -1 : token, ...(this.amongWords ? {} : { p: "" }) });
  }

  pickPatch(patch) {
    const address = Object.values(patch).join();
    update({ p: state.p === address ? "" : address, ...(this.amongWords ? {} : { q: -1 }) });
  }

  walked() {
    return this.spans.filter(Boolean);
  }

  heard(span) {
    return `${span.textContent}: ${this.now.all.map((weights) => inPercent(sumOf(weights))).join(", ")} on the picture`;
  }

  // Files ---------------------------------------------------------------------------------------------------------

  async figure() {
    const { source, all, look } = this.now;
    const { photos } = manifest.texts[state.t];
    const heights = photos.map(({ size }) => Math.round((SAVED * size[1]) / size[0]));
    const tops = heights.map((_, at) => 46 + heights.slice(0, at).reduce((sum, height) => sum + height + 30, 0));
    const colours = this.app.palette;
    return {
      width: SAVED,
      height: tops.at(-1) + heights.at(-1) + 56,
      draw: (pen) => {
        const verb = source.at === null ? "" : source.side === "q" ? "attends to" : "is attended by";
        pen.text(`${nameOf(this.spec)} \u00b7 ${source.name} ${verb}`, 0, 12, { size: 13, weight: 600, colour: colours.ink });
        this.panels.forEach(({ images, photo }, number) => {
          const picture = sheetOf(2 * SAVED, 2 * heights[number]);
          paintOver(picture.getContext("2d"), images, photo.grid, this.isBare ? null : all[number], look, 2 * SAVED, 2 * heights[number]);
          const share = source.side === "q" ? `: ${inPercent(sumOf(all[number]))}` : "";
          pen.text(`${photo.source}${share}`, 0, tops[number] - 12, { size: 11, colour: colours.faint });
          pen.image(picture, 0, 0, 2 * SAVED, 2 * heights[number], 0, tops[number], SAVED, heights[number]);
        });
        drawScale(pen, { ...look, colours }, 0, tops.at(-1) + heights.at(-1) + 18, 160, ["0", endOf(look.high)]);
      },
    };
  }

  async rows() {
    const { source, all } = this.now;
    const { photos } = manifest.texts[state.t];
    const lines = photos.flatMap((photo, number) =>
      all[number].map((weight, at) => {
        const text = Number.isNaN(weight) ? "" : weight.toFixed(6);
        return [nameOf(this.spec), source.name, photo.source, rowOfCell(photo, at), columnOfCell(photo, at), text];
      }),
    );
    return [["head", source.side === "q" ? "query" : "key", "picture", "row", "column", "weight"], ...lines];
  }
}

register("photo", "Photo", PhotoView);
