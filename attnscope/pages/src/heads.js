// All heads as thumbnails: a large grid, or a small one beside a view.
import { breathe, isWhole, packedMap, manifest, matrix, nameOf, rolesOf, smallMatrix } from "./data.js";
import { button, dotOf, el, fill } from "./dom.js";
import { paintPooled } from "./heat.js";
import { mapOf, state } from "./state.js";

const largest = { name: "", value: null };

/** The largest weight of any head of a map; where keys are named, of these alone. */
export function largestOf(text, map, hide, words, keys = null) {
  const name = [text, map, hide, words, !!keys].join();
  if (largest.name !== name) Object.assign(largest, { name, value: findLargest(text, map, hide, words, keys) });
  return largest.value;
}

async function findLargest(text, map, hide, words, keys) {
  const { heads, largest: ofHeads } = packedMap(text, map);
  if (ofHeads && !keys && isWhole(text, map, hide, words)) return Math.max(...ofHeads) || 1;
  let most = 0;
  for (const pair of heads) {
    const shown = await matrix(text, map, pair.join("."), hide, words);
    most = Math.max(most, keys ? largestOn(keys, shown) : shown.largest);
    await breathe();
  }
  return most || 1;
}

function largestOn(keys, { rows, columns, values }) {
  let most = 0;
  for (const at of keys.map((key) => columns.place[key]).filter((place) => place >= 0))
    for (let row = 0; row < rows.length; row++) most = Math.max(most, values[row * columns.length + at]);
  return most;
}

export async function topOf(shown) {
  if (state.scale === "fixed") return 1;
  if (state.scale === "head") return shown.largest || 1;
  return largestOf(state.t, state.m, state.hide, state.words);
}

/** What a view shows, and what its darkest colour means; null = it has been asked to show something else since. */
export async function loadMap(view) {
  const call = (view.lastCall = {});
  const shown = await matrix(state.t, state.m, state.h, state.hide, state.words);
  const high = await topOf(shown);
  return view.lastCall === call ? { shown, high } : null;
}

/** Thumbnails of heads; one is chosen, and arrow keys go from one to the next. */
export class HeadGrid {
  /** @param on {open(spec, event), hover(spec) | hover(null)} */
  constructor(label, on, { large }) {
    this.on = on;
    this.large = large;
    this.root = el("div", { class: large ? "heads large" : "heads small", role: "listbox", "aria-label": label });
    this.cells = new Map();
    this.queue = [];
    this.seen = new IntersectionObserver(
      (entries) => {
        for (const entry of entries) {
          const cell = this.cells.get(entry.target.dataset.spec);
          if (!cell) continue;
          cell.visible = entry.isIntersecting;
          if (cell.visible) this.want(cell);
        }
      },
      { rootMargin: "100px" },
    );
    const specAt = ({ target }) => target.closest("button[data-spec]")?.dataset.spec || null;
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.addEventListener("click", (event) => specAt(event) && on.open(specAt(event), event));
    this.root.addEventListener("pointerover", (event) => on.hover?.(specAt(event)));
    this.root.addEventListener("pointerleave", () => on.hover?.(null));
    this.root.addEventListener("focusin", (event) => on.hover?.(specAt(event)));
  }

  /** Shows heads, [layer, head] in their order, in rows by layer or one after the other; `size` in pixels. */
  show(order, byLayer, size, chosen, palette, dimmed = new Set(), chosenToo = []) {
    const name = [state.t, state.m, byLayer, size, order.join(";")].join("|");
    if (name !== this.name) this.build(order, byLayer, size, name);
    const look = [palette.scheme, state.scale, state.hide, state.words].join();
    const { several } = palette;
    for (const [spec, cell] of this.cells) {
      const [isChosen, isAlso] = [spec === chosen, chosenToo.includes(spec)];
      const { classList, style } = cell.button;
      cell.button.setAttribute("aria-selected", isChosen || isAlso);
      cell.button.tabIndex = isChosen ? 0 : -1;
      classList.toggle("chosen", isChosen);
      classList.toggle("also", isAlso);
      if (isAlso) style.setProperty("--several", several[chosenToo.indexOf(spec) % several.length]);
      classList.toggle("dim", dimmed.has(spec));
      if (cell.look !== look) {
        cell.look = look;
        cell.done = false;
        if (cell.visible) this.want(cell);
      }
    }
    if (!this.cells.has(chosen) && order.length) this.cells.get(order[0].join(".")).button.tabIndex = 0;
    this.palette = palette;
  }

  build(order, byLayer, size, name) {
    this.name = name;
    this.order = order.map((pair) => pair.join("."));
    this.byLayer = byLayer;
    this.seen.disconnect();
    this.cells.clear();
    this.queue.length = 0;
    const layers = [...new Set(order.map(([layer]) => layer))];
    const heads = [...new Set(order.map(([, head]) => head))].sort((a, b) => a - b);
    this.root.style.gridTemplateColumns = byLayer ? `auto repeat(${heads.length}, ${size}px)` : `repeat(auto-fill, ${size}px)`;
    const label = (kind, text) => el("span", { class: kind, "aria-hidden": "true" }, text);
    const children = byLayer ? [el("span", {})] : this.order.map((spec) => this.cell(spec, size, true));
    if (byLayer) {
      const [H, L] = this.large ? ["H", "L"] : ["", ""];
      for (const head of heads) children.push(label("column", this.large || head % 2 === 0 ? `${H}${head}` : ""));
      for (const layer of layers) {
        children.push(label("row", `${L}${layer}`));
        for (const spec of heads.map((head) => `${layer}.${head}`))
          children.push(this.order.includes(spec) ? this.cell(spec, size) : el("span", {}));
      }
    }
    this.root.classList.toggle("flowing", !byLayer);
    fill(this.root, children);
    for (const { button } of this.cells.values()) this.seen.observe(button);
  }

  cell(spec, size, captioned = false) {
    const roles = rolesOf(mapOf().kind, spec);
    const marks = manifest.roles?.marks || {};
    const [first] = roles;
    const mark = first && marks[first.name];
    const names = roles.map((role) => marks[role.name].label + (role.tentative ? " (tentative)" : "")).join(", ");
    const label = `layer ${spec.replace(".", ", head ")}${names ? `: ${names}` : ""}`;
    const hidden = (kind, text) => el("span", { class: kind, "aria-hidden": "true" }, text);
    const picture = el("canvas", { "aria-hidden": "true" });
    const badge = mark && this.large ? hidden("badge", first.tentative ? mark.glyph.toLowerCase() : mark.glyph) : null;
    const caption = captioned ? hidden("caption", nameOf(spec)) : null;
    const facts = { role: "option", "data-spec": spec, "aria-label": label, title: this.large ? null : nameOf(spec) };
    const whole = button([picture, badge, caption], undefined, facts);
    if (mark) {
      whole.style.setProperty("--role", mark.color);
      whole.classList.add("roled");
    }
    whole.style.width = picture.style.width = picture.style.height = `${size}px`;
    this.cells.set(spec, { spec, button: whole, picture, size, visible: false, done: false });
    return whole;
  }

  want(cell) {
    if (cell.done || this.queue.includes(cell)) return;
    this.queue.push(cell);
    if (!this.working) this.work();
  }

  async work() {
    this.working = true;
    while (this.queue.length) {
      const cell = this.queue.shift();
      if (!cell.visible || this.cells.get(cell.spec) !== cell || !this.root.isConnected) continue;
      const { t, m, hide, words } = state;
      const look = cell.look;
      try {
        const shown = await smallMatrix(t, m, cell.spec, hide, words);
        const high = await topOf(shown);
        if (cell.look === look && this.cells.get(cell.spec) === cell) {
          cell.done = true;
          paintThumb(cell.picture, shown, cell.size, { low: 0, high, table: this.palette.sequential });
        }
      } catch {
        cell.done = true; // text or map has changed meanwhile
      }
      await breathe();
    }
    this.working = false;
    this.root.dataset.painted = String([...this.cells.values()].filter((cell) => cell.done).length);
  }

  focus(spec) {
    (this.cells.get(spec) || this.cells.get(this.order?.[0]))?.button.focus();
  }

  key(event) {
    const at = this.order.indexOf(document.activeElement?.dataset?.spec);
    if (at < 0) return;
    const beside = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.order.length - 1 };
    const to = { ...beside, ArrowDown: this.below(at, 1), ArrowUp: this.below(at, -1) };
    if (!(event.key in to)) return;
    event.preventDefault();
    this.cells.get(this.order[to[event.key]])?.button.focus();
  }

  /** The number of the head that stands a step below one, or above it. */
  below(at, step) {
    if (!this.byLayer) {
      const width = this.root.firstElementChild.offsetWidth + 4;
      return at + step * Math.max(1, Math.round(this.root.clientWidth / width));
    }
    const [layer, head] = this.order[at].split(".").map(Number);
    const isThere = (spec) => Math.sign(spec.split(".")[0] - layer) === step && Number(spec.split(".")[1]) === head;
    return step > 0 ? this.order.findIndex(isThere) : this.order.findLastIndex(isThere);
  }
}

/** A role with its dot, its value where one is told, and unless `short` whether it is tentative. */
export function roleChip(role, value = "", short = false) {
  const { color, label, what } = manifest.roles.marks[role.name];
  return el("span", { class: "role", title: what }, dotOf(color), `${label}${value}${role.tentative && !short ? " (tentative)" : ""}`);
}

/** Fills `host` with chips of the roles that heads have: how many have each; one that has the focus keeps it. */
export function showRoles(host, roles, chosen, choose) {
  const none = { color: "var(--faint)", label: "unclassified", what: "heads without a role" };
  const counts = new Map();
  for (const name of roles.flat()) counts.set(name, (counts.get(name) || 0) + 1);
  const focused = document.activeElement?.dataset?.role;
  const chips = Object.entries({ ...manifest.roles?.marks, unclassified: none }).map(([name, { color, label, what }]) => {
    if (!counts.has(name)) return null;
    const facts = { class: "chip", "aria-pressed": String(chosen === name), title: what, "data-role": name };
    return button([dotOf(color), label, el("small", {}, String(counts.get(name)))], () => choose(name), facts);
  });
  fill(host, chips);
  if (focused) host.querySelector(`[data-role="${CSS.escape(focused)}"]`)?.focus();
}

export function paintThumb(picture, shown, size, look) {
  const room = Math.round(size * (devicePixelRatio || 1));
  const factor = Math.max(1, Math.max(shown.rows.length, shown.columns.length) / room);
  const { rows, columns } = shown;
  picture.width = Math.ceil(columns.length / factor - 1e-9);
  picture.height = Math.ceil(rows.length / factor - 1e-9);
  paintPooled(picture, shown, look, factor);
}
