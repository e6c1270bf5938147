// Grid: all layers and heads at once.
import { digits, manifest, nameOf, rolesOf, smallMatrix } from "./data.js";
import { el, faint, fill, readout, select, sheetOf, toolbar } from "./dom.js";
import { HeadGrid, largestOf, paintThumb, roleChip, showRoles, topOf } from "./heads.js";
import { Legend, drawScale, endOf } from "./heat.js";
import { widthOf } from "./pen.js";
import { addressOf, mapOf, state, update } from "./state.js";

const SIZES = [0, 24, 40, 64, 96, 132, 200];

/** How wide a cell is: as asked for, else so that all columns have room, and all rows if that leaves cells to see. */
function sizeOf(columns, rows, width, height) {
  if (state.size) return state.size;
  const gap = width < 500 ? 2 : 6;
  // The letters of roles stand below their maps.
  const below = gap === 6 && manifest.roles ? 15 : gap;
  const [across, down] = [Math.floor(width / columns) - gap, Math.floor((height + gap - below) / rows) - below];
  return Math.max(18, Math.min(132, across, Math.max(44, down)));
}

function ordered() {
  const { kind, heads, focus } = mapOf();
  if (state.sort === "layer") return heads;
  const places = heads.map((_, index) => index);
  if (state.sort === "focus") places.sort((a, b) => focus[b] - focus[a]);
  else {
    const names = Object.keys(manifest.roles?.marks || {});
    const key = (index) => {
      const [first] = rolesOf(kind, heads[index].join("."));
      return first ? [names.indexOf(first.name), -first.value] : [names.length, 0];
    };
    places.sort((a, b) => key(a)[0] - key(b)[0] || key(a)[1] - key(b)[1] || a - b);
  }
  return places.map((index) => heads[index]);
}

/** How heads stand: in rows, one a layer, else in lines of twelve; the number of columns. */
function shapeOf(order) {
  const byLayer = state.sort === "layer";
  const heads = [...new Set(order.map(([, head]) => head))].sort((a, b) => a - b);
  const layers = [...new Set(order.map(([layer]) => layer))];
  return { byLayer, heads, layers, columns: byLayer ? heads.length : 12 };
}

/** What stands at the upper end of the scale of all heads. */
function scaleEnd(high) {
  return state.scale === "head" ? "each head's largest" : endOf(high);
}

function hasRole(spec, role) {
  return rolesOf(mapOf().kind, spec).some(({ name }) => name === role);
}

export class GridView {
  constructor(app) {
    this.app = app;
    const on = { open: (spec) => update({ v: "matrix", h: spec, z: "" }), hover: (spec) => this.tell(spec) };
    this.heads = new HeadGrid("Heads", on, { large: true });
    const sorts = [["layer", "layer"], ["focus", "sharpness"], ...(manifest.roles ? [["role", "role"]] : [])];
    this.sort = select("Order by", sorts, (value) => update({ sort: value }));
    this.size = select("Cells", [], (value) => update({ size: Number(value) }));
    this.legend = new Legend();
    this.roles = el("div", { class: "roles", role: "group", "aria-label": "Show one role" });
    this.read = readout();
    this.host = el("div", { class: "gridhost" }, this.heads.root);
    const bar = toolbar(this.read, el("span", { class: "fields" }, this.sort, this.size));
    this.root = el("div", { class: "view grid" }, bar, this.legend.root, this.roles, this.host);
    new ResizeObserver(() => this.root.isConnected && this.show()).observe(this.host);
  }

  show() {
    const order = ordered();
    const { byLayer, layers, columns } = shapeOf(order);
    const rows = byLayer ? layers.length : 1;
    const room = this.host.clientWidth - (byLayer ? 34 : 4);
    if (room < 50) return;
    const size = sizeOf(columns, rows, room, innerHeight - this.host.offsetTop - 60);
    const dimmed = new Set(order.map((pair) => pair.join(".")).filter((spec) => state.role && !hasRole(spec, state.role)));
    this.heads.show(order, byLayer, size, state.h, this.app.palette, dimmed);
    this.sort.show(state.sort);
    this.size.offer(this.sizes());
    this.size.show(state.size);
    this.showRoles(mapOf());
    this.tell(null);
    return this.showScale();
  }

  /** The sizes to choose from; one that only an address asks for is among them. */
  sizes() {
    const offered = SIZES.includes(state.size) ? SIZES : [...SIZES, state.size].sort((a, b) => a - b);
    return offered.map((size) => [size, size ? `${size} px` : "to fit"]);
  }

  async showScale() {
    const table = this.app.palette.sequential;
    const { t, m, hide, words, scale } = state;
    const high = scale === "figure" ? await largestOf(t, m, hide, words) : 1;
    if (scale === state.scale) this.legend.show({ low: 0, high, table }, scaleEnd(high));
  }

  focus() {
    this.heads.focus(state.h);
  }

  name() {
    return "grid";
  }

  showRoles({ kind, heads }) {
    const roles = heads.map((pair) => rolesOf(kind, pair.join(".")).map(({ name }) => name));
    showRoles(this.roles, roles, state.role, (role) => update({ role: state.role === role ? "" : role }));
  }

  tell(spec) {
    const map = mapOf();
    if (!spec) {
      const n = map.heads.length;
      const size = `${map.queries.labels.length - (map.before || 0)} × ${(map.keys || map.queries).labels.length} tokens`;
      const hint = faint(`${size} · rows are queries, columns keys · choose a head to open it`);
      return fill(this.read, el("b", {}, `${n} ${n === 1 ? "head" : "heads"}`), hint);
    }
    const at = map.heads.findIndex((pair) => pair.join(".") === spec);
    const roles = rolesOf(map.kind, spec).map((role) => roleChip(role, ` ${digits(role.value).slice(0, -2)}`));
    const focus = faint(`largest weight of a query, on average ${digits(map.focus[at]).slice(0, -1)}`);
    return fill(this.read, el("b", {}, nameOf(spec)), focus, roles);
  }

  async figure() {
    const order = ordered();
    const { byLayer, heads, layers, columns } = shapeOf(order);
    const [size, gap, left, top] = [96, 6, byLayer ? 34 : 4, byLayer ? 22 : 4];
    const line = byLayer ? size + gap : size + gap + 16;
    const rows = byLayer ? layers.length : Math.ceil(order.length / columns);
    const colours = this.app.palette;
    const pictures = [];
    for (const pair of order) {
      const shown = await smallMatrix(state.t, state.m, pair.join("."), state.hide, state.words);
      const picture = sheetOf(1, 1);
      paintThumb(picture, shown, size, { low: 0, high: await topOf(shown), table: colours.sequential });
      pictures.push(picture);
    }
    const small = (size, align) => ({ size, align, colour: colours.faint });
    const markOf = ({ name }) => manifest.roles.marks[name];
    const rolesAt = (pair) => rolesOf(mapOf().kind, pair.join("."));
    const draw = (pen) => {
      if (byLayer) {
        heads.forEach((head, at) => pen.text(`H${head}`, left + at * (size + gap) + size / 2, 11, small(11, "center")));
        layers.forEach((layer, at) => pen.text(`L${layer}`, left - 8, top + at * line + size / 2, small(11, "right")));
      }
      order.forEach((pair, number) => {
        const [column, row] = byLayer
          ? [heads.indexOf(pair[1]), layers.indexOf(pair[0])]
          : [number % columns, Math.floor(number / columns)];
        const [x, y] = [left + column * (size + gap), top + row * line];
        const picture = pictures[number];
        pen.image(picture, 0, 0, picture.width, picture.height, x, y, size, size);
        const [role] = rolesAt(pair);
        pen.frame(x - 0.5, y - 0.5, size + 1, size + 1, role ? markOf(role).color : colours.rule, role ? 2 : 1);
        if (!byLayer) pen.text(nameOf(pair.join(".")), x + size / 2, y + size + 9, small(10, "center"));
      });
    };
    const present = new Set(order.flatMap((pair) => rolesAt(pair).map(markOf)));
    const marks = Object.values(manifest.roles?.marks || {}).filter((mark) => present.has(mark));
    const wide = left + columns * (size + gap);
    const low = top + rows * line + 14;
    const legend = (pen) => {
      let [x, y] = [left, low];
      for (const mark of marks) {
        const needs = 30 + widthOf(mark.label, 12);
        if (x + needs > wide && x > left) [x, y] = [left, y + 20];
        pen.rect(x, y - 5, 10, 10, mark.color);
        pen.text(mark.label, x + 15, y, { size: 12, colour: colours.ink });
        x += needs;
      }
      return y + 12;
    };
    const nothing = { rect() {}, text() {} };
    const below = marks.length ? legend(nothing) + 4 : low - 6;
    const high = state.scale === "figure" ? await largestOf(state.t, state.m, state.hide, state.words) : 1;
    const scale = { low: 0, high, table: colours.sequential, colours };
    return {
      width: wide,
      height: below + 26,
      draw: (pen) => {
        draw(pen);
        legend(pen);
        drawScale(pen, scale, left, below, 180, ["0", scaleEnd(high)]);
      },
    };
  }

  async rows() {
    const { kind, heads, focus } = mapOf();
    const lines = ordered().map((pair) => {
      const spec = pair.join(".");
      const roles = rolesOf(kind, spec).map((role) => role.name).join("+");
      return [kind, ...pair, focus[heads.indexOf(pair)], roles, addressOf({ ...state, v: "matrix", h: spec })];
    });
    return [["kind", "layer", "head", "mean_largest_weight", "roles", "address"], ...lines];
  }
}
