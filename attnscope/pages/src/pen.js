// One way to draw, two places: a canvas, and SVG. What is saved is drawn by the same lines as what is seen.

const SANS =
  'Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif';

export class CanvasPen {
  constructor(context) {
    this.context = context;
  }

  rect(x, y, width, height, fill, alpha = 1) {
    this.context.globalAlpha = alpha;
    this.context.fillStyle = fill;
    this.context.fillRect(x, y, width, height);
    this.context.globalAlpha = 1;
  }

  dot(x, y, radius, fill, alpha = 1) {
    this.context.globalAlpha = alpha;
    this.context.fillStyle = fill;
    this.context.beginPath();
    this.context.arc(x, y, radius, 0, 7);
    this.context.fill();
    this.context.globalAlpha = 1;
  }

  frame(x, y, width, height, colour, thick = 1) {
    this.context.strokeStyle = colour;
    this.context.lineWidth = thick;
    this.context.strokeRect(x, y, width, height);
  }

  line(x1, y1, x2, y2, colour, thick = 1, alpha = 1) {
    this.curve(x1, y1, x1, y1, x2, y2, x2, y2, colour, thick, alpha);
  }

  curve(x1, y1, cx1, cy1, cx2, cy2, x2, y2, colour, thick = 1, alpha = 1) {
    const pen = this.context;
    pen.globalAlpha = alpha;
    pen.strokeStyle = colour;
    pen.lineWidth = thick;
    pen.beginPath();
    pen.moveTo(x1, y1);
    if (cx1 === x1 && cy1 === y1 && cx2 === x2 && cy2 === y2) pen.lineTo(x2, y2);
    else pen.bezierCurveTo(cx1, cy1, cx2, cy2, x2, y2);
    pen.stroke();
    pen.globalAlpha = 1;
  }

  text(label, x, y, { size = 12, colour = "#000", align = "left", weight = 400, turn = 0 } = {}) {
    const pen = this.context;
    pen.font = `${weight} ${size}px ${SANS}`;
    pen.fillStyle = colour;
    pen.textAlign = align;
    pen.textBaseline = "middle";
    if (!turn) return pen.fillText(label, x, y);
    pen.save();
    pen.translate(x, y);
    pen.rotate(turn);
    pen.fillText(label, 0, 0);
    pen.restore();
  }

  image(source, sx, sy, sw, sh, x, y, width, height) {
    this.context.imageSmoothingEnabled = false;
    this.context.drawImage(source, sx, sy, sw, sh, x, y, width, height);
  }

  within(x, y, width, height, draw) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this.context.clip();
    draw();
    this.context.restore();
  }

  /** Draws with the origin elsewhere. */
  moved(dx, dy, draw) {
    this.context.save();
    this.context.translate(dx, dy);
    draw();
    this.context.restore();
  }
}

const XML = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const xml = (text) =>
  String(text)
    .replace(/[&<>"]/g, (mark) => XML[mark])
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd");
const short = (number) => String(Math.round(number * 100) / 100);

export class SvgPen {
  constructor(width, height) {
    this.size = [width, height];
    this.parts = [];
    this.clips = 0;
  }

  /** Adds an element; attributes that are undefined are left out. */
  put(name, attributes, inside = null) {
    const pairs = Object.entries(attributes).filter(([, value]) => value !== undefined);
    const list = pairs.map(([key, value]) => ` ${key}="${typeof value === "number" ? short(value) : value}"`).join("");
    this.parts.push(inside === null ? `<${name}${list}/>` : `<${name}${list}>${inside}</${name}>`);
  }

  rect(x, y, width, height, fill, alpha = 1) {
    this.put("rect", { x, y, width, height, fill, opacity: alpha < 1 ? alpha : undefined });
  }

  dot(x, y, radius, fill, alpha = 1) {
    this.put("circle", { cx: x, cy: y, r: radius, fill, opacity: alpha < 1 ? alpha : undefined });
  }

  frame(x, y, width, height, colour, thick = 1) {
    this.put("rect", { x, y, width, height, fill: "none", stroke: colour, "stroke-width": thick });
  }

  path(d, colour, thick, alpha) {
    this.put("path", { d, fill: "none", stroke: colour, "stroke-width": thick, opacity: alpha < 1 ? alpha : undefined });
  }

  line(x1, y1, x2, y2, colour, thick = 1, alpha = 1) {
    this.path(`M${short(x1)} ${short(y1)}L${short(x2)} ${short(y2)}`, colour, thick, alpha);
  }

  curve(x1, y1, cx1, cy1, cx2, cy2, x2, y2, colour, thick = 1, alpha = 1) {
    const bend = [cx1, cy1, cx2, cy2, x2, y2].map(short).join(" ");
    this.path(`M${short(x1)} ${short(y1)}C${bend}`, colour, thick, alpha);
  }

  text(label, x, y, { size = 12, colour = "#000", align = "left", weight = 400, turn = 0 } = {}) {
    const look = { dy: "0.35em", "font-size": size, "font-weight": weight, fill: colour };
    const transform = turn ? `rotate(${short((turn * 180) / Math.PI)} ${short(x)} ${short(y)})` : undefined;
    const anchor = { left: "start", center: "middle", right: "end" }[align];
    this.put("text", { x, y, ...look, "text-anchor": anchor, "xml:space": "preserve", transform }, xml(label));
  }

  image(source, sx, sy, sw, sh, x, y, width, height) {
    const cut = document.createElement("canvas");
    cut.width = Math.max(1, Math.ceil(sw));
    cut.height = Math.max(1, Math.ceil(sh));
    cut.getContext("2d").drawImage(source, sx, sy, sw, sh, 0, 0, cut.width, cut.height);
    const how = { preserveAspectRatio: "none", style: "image-rendering:pixelated", href: cut.toDataURL("image/png") };
    this.put("image", { x, y, width, height, ...how });
  }

  within(x, y, width, height, draw) {
    const name = `c${this.clips++}`;
    this.parts.push(`<clipPath id="${name}">`);
    this.put("rect", { x, y, width, height });
    this.parts.push(`</clipPath><g clip-path="url(#${name})">`);
    draw();
    this.parts.push("</g>");
  }

  /** Draws with the origin elsewhere. */
  moved(dx, dy, draw) {
    this.parts.push(`<g transform="translate(${short(dx)} ${short(dy)})">`);
    draw();
    this.parts.push("</g>");
  }

  document(title) {
    const [width, height] = this.size.map(Math.ceil);
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="${xml(SANS)}"><title>${xml(title)}</title>${this.parts.join("")}</svg>\n`;
  }
}

const ruler = document.createElement("canvas").getContext("2d");

export function widthOf(label, size, weight = 400) {
  ruler.font = `${weight} ${size}px ${SANS}`;
  return ruler.measureText(label).width;
}

/** A text cut to a width, with an ellipsis. */
export function fitted(label, size, width, weight = 400) {
  if (widthOf(label, size, weight) <= width) return label;
  const letters = Array.from(label);
  let low = 0;
  let high = letters.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (widthOf(letters.slice(0, middle).join("") + "\u2026", size, weight) <= width) low = middle;
    else high = middle - 1;
  }
  return letters.slice(0, low).join("") + "\u2026";
}
