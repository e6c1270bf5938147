// A scatter of heads on a canvas: two layers, so that a brush or a pointer redraws little.
import { canvas, clamp, el, isShortcut, keyedCanvas, takeEvent } from "./dom.js";
import { CanvasPen, fitted } from "./pen.js";

const PAD = { left: 64, top: 12, bottom: 40 };
const HELP = "Heads. Arrow keys go to the next head, Enter opens it, Shift and arrow keys mark an area, Escape clears it.";
const NEAR = 14; // pixels from a dot within which it is meant

/** Round numbers between two ends, about so many. */
function ticksOf([low, high], about, least = 0) {
  const span = high - low || 1;
  const rough = span / Math.max(1, about);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(least, [1, 2, 5, 10].map((part) => part * power).find((part) => part >= rough * 0.999));
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) ticks.push(at * step);
  const places = clamp(-Math.floor(Math.log10(step) + 1e-9), 6);
  return ticks.map((value) => [value, (value < 0 ? "\u2212" : "") + Math.abs(value).toFixed(places)]);
}

/** Whether a column counts: there is nothing between its numbers. */
function isCount({ name }) {
  return name === "layer" || name === "head";
}

function endsOf({ values, range, name }) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.04;
  const whole = isCount({ name }) ? 0.5 : room;
  const [least, most] = range || [];
  const floor = Number.isFinite(least) && least !== null && low - room < least ? least - room : low - whole;
  return [floor, Number.isFinite(most) && most !== null && high + room > most ? most + room : high + whole];
}

function drawScatter(pen, { x, y, baseline, colours, colourOf, shown, height, at, radius, dot }) {
  const [left, top, right, low] = [PAD.left, PAD.top, at.right, height - PAD.bottom];
  pen.line(left, low + 0.5, right, low + 0.5, colours.rule);
  pen.line(left - 0.5, top, left - 0.5, low, colours.rule);
  for (const [value, label] of ticksOf(at.ends[0], Math.max(4, (right - left) / 90), isCount(x) ? 1 : 0)) {
    const place = at.x(value);
    pen.line(place, low, place, low + 4, colours.rule);
    pen.text(label, place, low + 13, { size: 11, align: "center", colour: colours.faint });
  }
  for (const [value, label] of ticksOf(at.ends[1], Math.max(3, (low - top) / 60), isCount(y) ? 1 : 0)) {
    const place = at.y(value);
    pen.line(left, place, right, place, colours.rule, 1, 0.55);
    pen.text(label, left - 7, place, { size: 11, align: "right", colour: colours.faint });
  }
  pen.text(fitted(x.title, 12, right - left), (left + right) / 2, height - 9, { size: 12, align: "center", colour: colours.ink });
  pen.text(fitted(y.title, 12, low - top), 11, (top + low) / 2, { size: 12, align: "center", colour: colours.ink, turn: -Math.PI / 2 });
  const note = { size: 10, colour: colours.faint };
  const acrossAt = Number.isFinite(x.usual) ? at.x(x.usual) : NaN;
  if (acrossAt >= left && acrossAt <= right) {
    for (let from = top; from < low; from += 7) pen.line(acrossAt, from, acrossAt, Math.min(low, from + 3), colours.faint);
    pen.text(baseline, acrossAt + 4, top - 5, note);
  }
  const upAt = Number.isFinite(y.usual) ? at.y(y.usual) : NaN;
  if (upAt >= top && upAt <= low) {
    for (let from = left; from < right; from += 7) pen.line(from, upAt, Math.min(right, from + 3), upAt, colours.faint);
    pen.text(baseline, right + 4, upAt, note);
  }
  for (const pass of [false, true])
    for (let head = 0; head < x.values.length; head++) {
      if (!!shown[head] !== pass) continue;
      const [px, py] = [at.x(x.values[head]), at.y(y.values[head])];
      if (px === px && py === py) dot(px, py, radius, colourOf(head), pass ? 0.88 : 0.13);
    }
}

export class Scatter {
  /** @param on {hover(head | -1), open(head), brush([x0, x1, y0, y1] | null)} */
  constructor(on) {
    this.on = on;
    this.base = canvas({ "aria-hidden": "true" }, () => this.draw());
    this.over = keyedCanvas("scatter plot of heads", HELP);
    this.tip = el("div", { class: "tip", "aria-hidden": "true", hidden: true });
    this.root = el("div", { class: "scatter" }, this.base, this.over, this.tip);
    this.head = -1;
    this.area = null;
    this.over.addEventListener("pointerdown", (event) => this.press(event));
    this.over.addEventListener("pointermove", (event) => this.move(event));
    this.over.addEventListener("pointerup", (event) => this.lift(event));
    this.over.addEventListener("pointercancel", () => (this.pressed = null));
    this.over.addEventListener("pointerleave", () => !this.pressed && this.point(-1));
    this.over.addEventListener("keydown", (event) => this.key(event));
  }

  /**
   * Shows heads by two columns `x` and `y`; `shown` says which pass the filter, `area` what is brushed, `baseline` what
   * baselines are called.
   */
  set(seen) {
    Object.assign(this, seen);
    this.draw();
  }

  measure() {
    const [width, height] = [this.root.clientWidth, this.root.clientHeight];
    const ends = [endsOf(this.x), endsOf(this.y)];
    const right = width - (Number.isFinite(this.y.usual) ? 52 : 16); // room for what the line says
    const [left, top, low] = [PAD.left, PAD.top, height - PAD.bottom];
    const along = ([from, to], first, last) => ({
      to: (value) => first + ((value - from) / (to - from)) * (last - first),
      back: (place) => from + ((place - first) / (last - first)) * (to - from),
    });
    const [across, up] = [along(ends[0], left, right), along(ends[1], low, top)];
    const n = this.x.values.length;
    this.at = { ends, x: across.to, y: up.to, fromX: across.back, fromY: up.back, right, width, height };
    this.radius = Math.max(3, Math.min(6, 4 + (200 - n) / 120));
    const pixelOf = (number) => (number % 2 ? this.at.y(this.y.values[number >> 1]) : this.at.x(this.x.values[number >> 1]));
    this.points = Float32Array.from({ length: 2 * n }, (_, number) => pixelOf(number));
  }

  draw() {
    if (!this.x || !this.root.clientWidth) return;
    this.measure();
    const { width, height } = this.at;
    const context = this.base.fit(width, height);
    const dot = (x, y, radius, colour, alpha) => {
      context.globalAlpha = alpha;
      context.fillStyle = colour;
      context.beginPath();
      context.arc(x, y, radius, 0, 7);
      context.fill();
      if (alpha > 0.5) {
        context.globalAlpha = 0.5;
        context.strokeStyle = this.colours.ground;
        context.stroke();
      }
      context.globalAlpha = 1;
    };
    drawScatter(new CanvasPen(context), { ...this, height, dot });
    this.mark();
  }

  /** The brush and the head that is pointed at. */
  mark() {
    if (!this.at) return;
    const { width, height } = this.at;
    const context = this.over.fit(width, height);
    if (this.area) {
      const [x0, x1, y0, y1] = this.area;
      const [left, top] = [this.at.x(x0), this.at.y(y1)];
      const [wide, high] = [this.at.x(x1) - left, this.at.y(y0) - top];
      const pen = new CanvasPen(context);
      pen.rect(left, top, wide, high, this.colours.accent, 0.1);
      pen.frame(left, top, wide, high, this.colours.accent, 2);
    }
    if (this.head >= 0) {
      const [x, y] = this.points.subarray(2 * this.head, 2 * this.head + 2);
      context.strokeStyle = this.colours.ink;
      context.lineWidth = 2;
      context.beginPath();
      context.arc(x, y, this.radius + 3, 0, 7);
      context.stroke();
    }
  }

  /** Points at a head, with its name beside where the pointer did it. */
  point(head, withTip = false) {
    if (head === this.head && !withTip) return;
    this.head = head;
    this.mark();
    this.tip.hidden = head < 0 || !withTip;
    if (!this.tip.hidden) {
      this.tip.replaceChildren(...this.tell(head));
      const [x, y] = this.points.subarray(2 * head, 2 * head + 2);
      const { offsetWidth, offsetHeight } = this.tip;
      this.tip.style.left = `${clamp(x + 12, this.at.width - offsetWidth)}px`;
      this.tip.style.top = `${y + 12 + offsetHeight > this.at.height ? y - offsetHeight - 12 : y + 12}px`;
    }
    this.on.hover(head);
  }

  /** The head at a place; -1 = none is near. */
  near(x, y) {
    let [best, least] = [-1, NEAR * NEAR];
    for (let head = 0; head < this.x.values.length; head++) {
      if (!this.shown[head]) continue;
      const away = (this.points[2 * head] - x) ** 2 + (this.points[2 * head + 1] - y) ** 2;
      if (away < least) [best, least] = [head, away];
    }
    return best;
  }

  press(event) {
    if (event.button) return;
    this.over.setPointerCapture(event.pointerId);
    this.pressed = [event.offsetX, event.offsetY];
    this.isBrushing = false;
  }

  move(event) {
    const [x, y] = [event.offsetX, event.offsetY];
    if (!this.pressed) return this.point(this.near(x, y), true);
    const [fromX, fromY] = this.pressed;
    if (!this.isBrushing && Math.hypot(x - fromX, y - fromY) < 5) return;
    this.isBrushing = true;
    this.tip.hidden = true;
    this.brush([fromX, x].sort((a, b) => a - b), [fromY, y].sort((a, b) => b - a));
  }

  lift(event) {
    if (!this.pressed) return;
    this.pressed = null;
    if (this.isBrushing) return;
    const head = this.near(event.offsetX, event.offsetY);
    if (head >= 0) this.on.open(head);
    else if (this.area) this.on.brush(null);
  }

  /** Marks an area, in pixels: from left to right, from low to high. */
  brush([left, right], [low, high]) {
    const { fromX, fromY } = this.at;
    this.on.brush([fromX(left), fromX(right), fromY(low), fromY(high)]);
  }

  key(event) {
    if (isShortcut(event)) return;
    const way = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (way && event.shiftKey) this.widen(way);
    else if (way) this.step(way);
    else if (event.key === "Enter" && this.head >= 0) this.on.open(this.head);
    else if (event.key === "Escape" && this.area) this.on.brush(null);
    else return;
    takeEvent(event);
  }

  /** Goes to the nearest head that way. */
  step([dx, dy]) {
    const from = this.head >= 0 ? this.points.subarray(2 * this.head, 2 * this.head + 2) : [this.at.width / 2, this.at.height / 2];
    let [best, least] = [-1, Infinity];
    for (let head = 0; head < this.x.values.length; head++) {
      if (head === this.head || !this.shown[head]) continue;
      const [x, y] = [this.points[2 * head] - from[0], this.points[2 * head + 1] - from[1]];
      const along = x * dx + y * dy;
      const cost = along + 2.5 * Math.abs(x * dy + y * dx);
      if ((this.head < 0 || along > 0.5) && cost < least) [best, least] = [head, cost];
    }
    if (best >= 0) this.point(best, true);
  }

  /** Makes the marked area larger that way; the first time around the head that is pointed at. */
  widen([dx, dy]) {
    const { x, y, width, height } = this.at;
    const around = this.head >= 0 ? this.points.subarray(2 * this.head, 2 * this.head + 2) : [width / 2, height / 2];
    const [x0, x1, y0, y1] = this.area || [];
    let [left, right, low, high] = this.area ? [x(x0), x(x1), y(y0), y(y1)] : [around[0] - 10, around[0] + 10, around[1] + 10, around[1] - 10];
    const step = 24;
    if (dx > 0) right += step;
    if (dx < 0) left -= step;
    if (dy > 0) low += step;
    if (dy < 0) high -= step;
    this.brush([left, right], [low, high]);
  }

  figure() {
    const { width, height } = this.at;
    const draw = (pen) => {
      const dot = (x, y, radius, colour, alpha) => pen.dot(x, y, radius, colour, alpha);
      drawScatter(pen, { ...this, height, dot });
    };
    return { width, height, draw };
  }
}
