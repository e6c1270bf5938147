// A map as a heatmap with its tokens: zoomed, panned, pointed at; on the screen and in files.
import { inkOn, stepOf } from "./colour.js";
import { digits } from "./data.js";
import { arrowOf, button, canvas, clamp, el, faint, fill, isShortcut, keyedCanvas, sheetOf, showGradient } from "./dom.js";
import { CanvasPen, fitted, widthOf } from "./pen.js";
import { state, update } from "./state.js";

const MOST_CELL = 120;
const LABEL_PX = 12;
const LEAST_MARKED = 5; // cells of so many pixels are marked where their number is not known
const NUMBERS_FROM = 34; // cells of so many pixels have their numbers written into them

/** A picture of one pixel a cell; of several cells a pixel (the largest of them) where there is no room for all. */
function imageOf(shown, look, factor) {
  const name = [look.low, look.high, look.table.css[255], factor].join();
  if (shown.image?.name === name) return shown.image.picture;
  const picture = sheetOf(Math.ceil(shown.columns.length / factor), Math.ceil(shown.rows.length / factor));
  paintPooled(picture, shown, look, factor);
  shown.image = { name, picture };
  return picture;
}

/** Paints the colours of a map; each pixel has the cell of largest size that falls on it. */
export function paintPooled(picture, shown, look, factor) {
  const { values } = shown;
  const { width, height } = picture;
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const [n_rows, n_columns] = [shown.rows.length, shown.columns.length];
  const colours = look.table.packed;
  const scale = 256 / (look.high - look.low);
  for (let y = 0; y < height; y++) {
    const top = Math.floor(y * factor);
    const bottom = Math.min(n_rows, Math.max(top + 1, Math.floor((y + 1) * factor)));
    for (let x = 0; x < width; x++) {
      const left = Math.floor(x * factor);
      const right = Math.min(n_columns, Math.max(left + 1, Math.floor((x + 1) * factor)));
      let value = values[top * n_columns + left];
      if (bottom - top > 1 || right - left > 1) {
        for (let row = top; row < bottom; row++) {
          for (let at = row * n_columns + left; at < row * n_columns + right; at++)
            if (Math.abs(values[at]) > Math.abs(value)) value = values[at];
        }
      }
      const step = (value - look.low) * scale;
      pixels[y * width + x] = colours[step >= 255 ? 255 : step > 0 ? step | 0 : 0];
    }
  }
  picture.getContext("2d").putImageData(image, 0, 0);
}

/** How much room labels need beside a map and above it: those that two texts do not share up to two fifths of it. */
export function guttersOf(shown, width, height) {
  const longest = (labels, weight) =>
    labels.reduce((most, label) => Math.max(most, label.length < 40 ? widthOf(label, LABEL_PX, weight) : 200), 0);
  const room = (axis, length, most) => {
    axis.longest ??= longest(axis.labels.slice(0, 600), 400);
    axis.longestPair ??= longest(axis.labels.filter((_, at) => axis.halves?.[at]).slice(0, 600), 600);
    const usual = Math.min(axis.longest, axis.whole ? length * 0.45 : Math.max(44, length * 0.18), axis.whole ? Infinity : most);
    return Math.ceil(Math.max(usual, Math.min(axis.longestPair, length * 0.4)));
  };
  return { left: room(shown.rows, width, 130) + 12, top: room(shown.columns, height, 110) + 10 };
}

/** The numbers of the labels that are written where one in `apart` has room; those that two texts do not share first. */
function labelled(axis, first, last, apart) {
  const numbers = [];
  let taken = -Infinity;
  for (let at = first; at < last; at++)
    if (axis.halves?.[at] && at - taken >= apart) numbers.push((taken = at));
  const free = (at) => numbers.every((other) => Math.abs(other - at) >= apart);
  const usual = [];
  for (let at = Math.ceil(first / apart) * apart; at < last; at += apart) if (free(at)) usual.push(at);
  return [...numbers, ...usual];
}

/** A label cut to a width; of a pair of tokens each half alike. */
function labelOf(axis, at, size, width, weight) {
  const halves = axis.halves?.[at];
  if (!halves || widthOf(axis.labels[at], size, weight) <= width) return fitted(axis.labels[at], size, width, weight);
  const each = (width - widthOf(" / ", size, weight)) / 2;
  return halves.map((half) => fitted(half, size, each, weight)).join(" / ");
}

export function labelColour(axis, number, colours) {
  return axis.special[number] ? colours.special : axis.written[number] ? colours.written : colours.ink;
}

/** Where the cells in sight end, to the right and below. */
function endsOfCells({ rows, columns }, { left, top, width, height, cell, x, y }) {
  return [Math.min(left + width, left + columns.length * cell - x), Math.min(top + height, top + rows.length * cell - y)];
}

/**
 * Draws a map and its labels.
 *
 * @param place {left, top, width, height} of the cells' window; {cell, x, y} what of the map stands in it
 * @param look {low, high, table, colours}
 */
export function drawHeat(pen, shown, place, look, ratio = 1) {
  const { rows, columns } = shown;
  const { left, top, width, height, cell, x, y } = place;
  const { colours } = look;
  const first = { row: Math.max(0, Math.floor(y / cell)), column: Math.max(0, Math.floor(x / cell)) };
  const last = {
    row: Math.min(rows.length, Math.ceil((y + height) / cell)),
    column: Math.min(columns.length, Math.ceil((x + width) / cell)),
  };
  const factor = Math.max(1, Math.ceil(1 / (cell * ratio) - 1e-6));
  const side = factor * cell;
  const picture = imageOf(shown, look, factor);
  pen.within(left, top, width, height, () => {
    const [sx, sy] = [Math.floor(first.column / factor), Math.floor(first.row / factor)];
    const [sw, sh] = [Math.ceil(last.column / factor) - sx, Math.ceil(last.row / factor) - sy];
    if (sw > 0 && sh > 0)
      pen.image(picture, sx, sy, sw, sh, left + sx * side - x, top + sy * side - y, sw * side, sh * side);
    if (look.missing && cell >= LEAST_MARKED) markMissing(pen, shown, place, look, first, last);
    if (cell >= NUMBERS_FROM) writeNumbers(pen, shown, place, look, first, last);
    for (let row = first.row; row < last.row; row++)
      if (rows.pale?.[row]) pen.rect(left - x, top + row * cell - y, columns.length * cell, cell, colours.rule, 0.88);
  });
  const [right, bottom] = endsOfCells(shown, place);
  pen.frame(left - 0.5, top - 0.5, right - left + 1, bottom - top + 1, colours.rule);
  const size = Math.max(8, Math.min(LABEL_PX, cell * 0.86));
  const apart = Math.max(1, Math.ceil((size + 1) / cell));
  const weightOf = (axis, number) => (axis.halves?.[number] ? 600 : 400);
  for (const row of labelled(rows, first.row, last.row, apart)) {
    const at = top + (row + 0.5) * cell - y;
    if (at < top || at > top + height) continue;
    const weight = weightOf(rows, row);
    const how = { size, weight, align: "right", colour: labelColour(rows, row, colours) };
    pen.text(labelOf(rows, row, size, left - 10, weight), left - 6, at, how);
  }
  for (const column of labelled(columns, first.column, last.column, apart)) {
    const at = left + (column + 0.5) * cell - x;
    if (at < left || at > left + width) continue;
    const weight = weightOf(columns, column);
    const how = { size, weight, turn: -Math.PI / 2, colour: labelColour(columns, column, colours) };
    pen.text(labelOf(columns, column, size, top - 9, weight), at, top - 6, how);
  }
}

/** A stroke through each cell whose number is not known. */
function markMissing(pen, shown, { left, top, cell, x, y }, look, first, last) {
  for (let row = first.row; row < last.row; row++)
    for (let column = first.column; column < last.column; column++) {
      if (!look.missing(shown.values[row * shown.columns.length + column])) continue;
      const [at, down] = [left + (column + 0.5) * cell - x, top + (row + 0.5) * cell - y];
      const reach = Math.min(3, cell * 0.22);
      pen.line(at - reach, down + reach, at + reach, down - reach, look.colours.rule, 1);
    }
}

function writeNumbers(pen, shown, { left, top, cell, x, y }, look, first, last) {
  const size = clamp(cell * 0.24, 16, 11);
  for (let row = first.row; row < last.row; row++)
    for (let column = first.column; column < last.column; column++) {
      const value = shown.values[row * shown.columns.length + column];
      const cut = digits(value).replace(/^(\u2212?)0(\.\d\d).*/, "$1$2").replace(/^1\.0.*/, "1");
      if (!/[1-9]/.test(cut)) continue;
      const text = Math.abs(value) >= 0.995 ? cut : (value < 0 ? "\u2212" : "") + Math.abs(value).toFixed(2).slice(1);
      const colour = inkOn(look.table.rgb[stepOf(value, look.low, look.high)]);
      const [px, py] = [left + (column + 0.5) * cell - x, top + (row + 0.5) * cell - y];
      pen.text(text, px, py, { size, align: "center", colour });
    }
}

/** A zoom as the address has it, and back. */
export function addressOfView(view) {
  return view ? [view.cell, view.x, view.y].map((part) => Math.round(part * 100) / 100).join() : "";
}

export function viewAt(text) {
  const [cell, x, y] = text.split(",").map(Number);
  return text ? { cell, x, y } : null;
}

/** The size of a map as a figure, and where its cells stand: what is zoomed to, else all of it. */
export function seenOf({ shown, view, at }, most = 900) {
  if (view && at) {
    const width = Math.min(at.width, shown.columns.length * at.cell);
    const height = Math.min(at.height, shown.rows.length * at.cell);
    return { place: { ...at, width, height }, width: at.left + width + 8, height: at.top + height + 8 };
  }
  const [n_rows, n_columns] = [shown.rows.length, shown.columns.length];
  const cell = clamp(most / Math.max(n_rows, n_columns), 24, 1);
  const place = { ...guttersOf(shown, most, most), width: cell * n_columns, height: cell * n_rows, cell, x: 0, y: 0 };
  return { place, width: place.left + place.width + 8, height: place.top + place.height + 8 };
}

export function figureOfHeat(heat, title, ends) {
  const { place, width, height } = seenOf(heat);
  const { look, shown } = heat;
  return {
    width: Math.max(width, 260),
    height: height + 62,
    draw: (pen) => {
      pen.text(title, place.left, 12, { size: 12, weight: 600, colour: look.colours.ink });
      drawHeat(pen, shown, { ...place, top: place.top + 22 }, look, 4);
      drawScale(pen, look, place.left, height + 28, Math.min(180, place.width), ends);
    },
  };
}

export function drawScale(pen, look, x, y, width, [low, high]) {
  for (let step = 0; step < 64; step++)
    pen.rect(x + (step * width) / 64, y, width / 64 + 0.6, 8, look.table.css[Math.round((step * 255) / 63)]);
  pen.frame(x - 0.5, y - 0.5, width + 1, 9, look.colours.rule);
  pen.text(low, x, y + 18, { size: 11, colour: look.colours.faint });
  pen.text(high, x + width, y + 18, { size: 11, align: "right", colour: look.colours.faint });
}

export function endOf(value) {
  return digits(value).replace(/\.?0+$/, "") || "0";
}

const BLANK = 0.2; // no cell reaches so much of the scale: the map looks all but empty

/** What colours mean, above what they colour; where hardly any is to be seen, it offers the head's own scale. */
export class Legend {
  constructor(unit = "weight") {
    this.unit = faint(unit);
    this.ends = [el("span", {}), el("span", {})];
    this.bar = el("i", { "aria-hidden": "true" });
    this.offer = el("span", { class: "offer" });
    this.root = el("span", { class: "scale" }, this.unit, this.ends[0], this.bar, this.ends[1], this.offer);
  }

  /**
   * @param look {low, high, table}
   * @param high what stands at its upper end, if that is not one number
   * @param largest the largest weight that is coloured by it; undefined = nothing is offered
   * @param own what the darkest colour means on the head's own scale
   */
  show({ low, high: most, table }, high = endOf(most), largest = most, own = largest) {
    fill(this.ends[0], endOf(low));
    fill(this.ends[1], low < 0 ? `+${high}` : high);
    showGradient(this.bar, Array.from({ length: 17 }, (_, at) => table.css[Math.round((at * 255) / 16)]));
    if (state.scale === "head" || !(largest < BLANK * most)) return fill(this.offer);
    const show = button(`show on its own scale, 0 to ${endOf(own)}`, () => update({ scale: "head" }));
    fill(this.offer, el("span", {}, `none is above ${digits(largest)}`), show);
  }
}

export class Heat {
  /** @param on {hover(cell) | hover(null), pick(row, column), step(rows, columns), zoom(view)} */
  constructor(label, on) {
    this.on = on;
    this.base = canvas({ "aria-hidden": "true" }, () => this.draw());
    this.over = keyedCanvas("attention map", label);
    this.root = el("div", { class: "heat" }, this.base, this.over);
    this.view = null; // null = all of it
    this.cursor = null;
    this.pointers = new Map();
    this.listen();
  }

  set(shown, look) {
    this.shown = shown;
    this.look = look;
    this.draw();
  }

  place() {
    const { width, height } = this.room;
    const gutters = this.gutters?.(width, height) || guttersOf(this.shown, width, height);
    const [w, h] = [Math.max(20, width - gutters.left - 2), Math.max(20, height - gutters.top - 2)];
    const [n_rows, n_columns] = [this.shown.rows.length, this.shown.columns.length];
    this.least = Math.min(MOST_CELL, w / n_columns, h / n_rows);
    const cell = this.view ? Math.min(MOST_CELL, Math.max(this.least, this.view.cell)) : this.least;
    const [x, y] = [clamp(this.view?.x || 0, n_columns * cell - w), clamp(this.view?.y || 0, n_rows * cell - h)];
    return { left: gutters.left, top: gutters.top, width: w, height: h, cell, x, y };
  }

  draw() {
    if (!this.shown || !this.root.isConnected) return;
    const { clientWidth: width, clientHeight: height } = this.root;
    if (!width || !height) return;
    this.room = { width, height };
    const context = this.base.fit(width, height);
    this.at = this.place();
    const { left, top, cell, x, y } = this.at;
    this.root.dataset.place = [left, top, cell, x, y].join();
    this.over.style.touchAction = this.at.cell > this.least * 1.01 ? "none" : "pan-y";
    drawHeat(new CanvasPen(context), this.shown, this.at, this.look, devicePixelRatio || 1);
    this.point(this.cursor);
  }

  /** Marks a row and a column; null = none. */
  point(cursor) {
    this.cursor = cursor;
    if (!this.at) return;
    const { width, height } = this.room;
    const context = this.over.fit(width, height);
    if (!cursor) return;
    const pen = new CanvasPen(context);
    const { left, top, cell, x, y } = this.at;
    const { colours } = this.look;
    const { rows, columns } = this.shown;
    const [right, bottom] = endsOfCells(this.shown, this.at);
    const [cx, cy] = [left + cursor.column * cell - x, top + cursor.row * cell - y];
    pen.within(left - 1, top - 1, right - left + 2, bottom - top + 2, () => {
      if (cursor.row >= 0) for (const at of [cy, cy + cell]) pen.line(left, at, right, at, colours.mark, 1, 0.75);
      if (cursor.column >= 0) for (const at of [cx, cx + cell]) pen.line(at, top, at, bottom, colours.mark, 1, 0.75);
    });
    const tag = (label, px, py, align, turn) => {
      const wide = widthOf(label, LABEL_PX, 600) + 6;
      if (turn) pen.rect(px - 8, py - wide + 3, 16, wide, colours.ground);
      else pen.rect(px - wide + 3, py - 8, wide, 16, colours.ground);
      pen.text(label, px, py, { size: LABEL_PX, weight: 600, align, turn, colour: colours.mark });
    };
    if (cursor.row >= 0 && cy + cell > top && cy < top + this.at.height)
      tag(labelOf(rows, cursor.row, LABEL_PX, left - 10, 600), left - 6, cy + cell / 2, "right", 0);
    if (cursor.column >= 0 && cx + cell > left && cx < left + this.at.width)
      tag(labelOf(columns, cursor.column, LABEL_PX, top - 9, 600), cx + cell / 2, top - 6, "left", -Math.PI / 2);
  }

  reveal(row, column) {
    if (!this.view || !this.at) return;
    const { cell, width, height } = this.at;
    let { x, y } = this.at;
    if (column >= 0) x = Math.min(Math.max(x, (column + 1) * cell - width), column * cell);
    if (row >= 0) y = Math.min(Math.max(y, (row + 1) * cell - height), row * cell);
    if (x !== this.at.x || y !== this.at.y) this.move({ cell, x, y });
  }

  focus() {
    this.over.focus({ preventScroll: true });
  }

  move(view) {
    this.view = view;
    this.draw();
    this.view = view && this.at.cell > this.least * 1.001 ? { cell: this.at.cell, x: this.at.x, y: this.at.y } : null;
    this.on.zoom?.(this.view);
  }

  /** Zooms by a factor about a point of the window; about its middle if none is given. */
  zoom(factor, px, py) {
    if (!this.at) return;
    const { left, top, width, height, cell, x, y } = this.at;
    const [fx, fy] = [(px ?? left + width / 2) - left, (py ?? top + height / 2) - top];
    const next = Math.min(MOST_CELL, Math.max(this.least, cell * factor));
    this.move({ cell: next, x: ((x + fx) / cell) * next - fx, y: ((y + fy) / cell) * next - fy });
  }

  cellAt(event) {
    const box = this.over.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    if (!this.at) return null;
    const { left, top, width, height, cell, x, y } = this.at;
    const column = px < left ? -1 : Math.floor((px - left + x) / cell);
    const row = py < top ? -1 : Math.floor((py - top + y) / cell);
    if (column >= this.shown.columns.length || row >= this.shown.rows.length || (row < 0 && column < 0)) return null;
    return px > left + width || py > top + height ? null : { row, column, px, py };
  }

  listen() {
    const { over } = this;
    over.addEventListener("pointermove", (event) => {
      const start = this.pointers.get(event.pointerId);
      if (start) this.drag(event, start);
      else this.on.hover?.(this.cellAt(event));
    });
    over.addEventListener("pointerleave", () => this.on.hover?.(null));
    over.addEventListener("pointerdown", (event) => {
      this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY, moved: 0 });
      if (this.at && this.at.cell > this.least * 1.01) over.setPointerCapture(event.pointerId);
    });
    const up = (event) => {
      const start = this.pointers.get(event.pointerId);
      this.pointers.delete(event.pointerId);
      if (event.type !== "pointerup" || !start || start.moved > 4) return;
      const cell = this.cellAt(event);
      if (cell) this.on.pick?.(cell.row, cell.column);
    };
    over.addEventListener("pointerup", up);
    over.addEventListener("pointercancel", up);
    const turnWheel = (event) => {
      event.preventDefault();
      const box = over.getBoundingClientRect();
      const factor = Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0022));
      this.zoom(factor, event.clientX - box.left, event.clientY - box.top);
    };
    over.addEventListener("wheel", turnWheel, { passive: false });
    over.addEventListener("dblclick", () => this.move(null));
    over.addEventListener("keydown", (event) => {
      if (isShortcut(event)) return;
      const step = arrowOf(event);
      if (step) this.on.step?.(...step);
      else if (event.key === "+" || event.key === "=") this.zoom(1.4);
      else if (event.key === "-") this.zoom(1 / 1.4);
      else if (event.key === "0") this.move(null);
      else return;
      event.preventDefault();
    });
  }

  drag(event, start) {
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId);
    const [dx, dy] = [event.clientX - start.x, event.clientY - start.y];
    start.moved += Math.abs(dx) + Math.abs(dy);
    const box = this.over.getBoundingClientRect();
    if (others.length) {
      const other = others[0][1];
      const far = (x, y) => Math.hypot(x - other.x, y - other.y) || 1;
      const factor = far(event.clientX, event.clientY) / far(start.x, start.y);
      start.moved += 5;
      this.zoom(factor, (event.clientX + other.x) / 2 - box.left, (event.clientY + other.y) / 2 - box.top);
    } else if (this.view && this.at) this.move({ cell: this.at.cell, x: this.at.x - dx, y: this.at.y - dy });
    Object.assign(start, { x: event.clientX, y: event.clientY });
  }
}
