// All heads as thumbnails: a large grid, or a small one beside a view.
import { breathe, heldOf, manifest, matrix, nameOf, rolesOf } from "./data.js";
import { dotOf, el, fill } from "./dom.js";
import { paintPooled } from "./heat.js";
import { mapOf, state } from "./state.js";

/** The largest weight of any head of the map that is shown. */
export async function largestOf(text, map, hide, words) {
  const name = [manifest.opened, text, map, hide, words].join();
  if (largestOf.name_ !== name) {
    largestOf.name_ = name;
    largestOf.value = (async () => {
      let most = 0;
      for (const [layer, head] of heldOf(text, map).heads) {
        most = Math.max(most, (await matrix(text, map, `${layer}.${head}`, hide, words)).largest);
        await breathe();
      }
      return most || 1;
    })();
  }
  return largestOf.value;
}

/** The value that the darkest colour means. */
export async function topOf(shown, s = state) {
  if (s.scale === "fixed") return 1;
  if (s.scale === "head") return shown.largest || 1;
  return largestOf(s.t, s.m, s.hide, s.words);
}

/** Thumbnails of heads; one is chosen, and arrow keys go from one to the next. */
export class HeadGrid {
  /**
   * @param label what it is, for those who listen
   * @param on {open(spec, event), hover(spec) | hover(null)}
   */
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
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-spec]");
      if (button) on.open(button.dataset.spec, event);
    });
    this.root.addEventListener("pointerover", (event) =>
      on.hover?.(event.target.closest("button[data-spec]")?.dataset.spec || null),
    );
    this.root.addEventListener("pointerleave", () => on.hover?.(null));
    this.root.addEventListener("focusin", (event) => on.hover?.(event.target.dataset.spec || null));
  }

  /**
   * Shows heads.
   *
   * @param order [layer, head] in the order in which they stand
   * @param byLayer whether they stand in rows, one a layer
   * @param size how wide a cell is, in pixels
   */
  show(order, byLayer, size, chosen, palette, dimmed = new Set(), chosenToo = new Set()) {
    const name = [state.t, state.m, byLayer, size, order.join(";")].join("|");
    if (name !== this.name) this.build(order, byLayer, size, name);
    const look = [palette.scheme, state.scale, state.hide, state.words].join();
    for (const [spec, cell] of this.cells) {
      const on = spec === chosen;
      cell.button.setAttribute("aria-selected", on || chosenToo.has(spec));
      cell.button.tabIndex = on ? 0 : -1;
      cell.button.classList.toggle("chosen", on);
      cell.button.classList.toggle("also", chosenToo.has(spec));
      if (chosenToo.has(spec))
        cell.button.style.setProperty(
          "--several",
          palette.several[[...chosenToo].indexOf(spec) % palette.several.length],
        );
      cell.button.classList.toggle("dim", dimmed.has(spec));
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
    this.columns = byLayer ? heads.length : 0;
    const children = [];
    if (byLayer) {
      this.root.style.gridTemplateColumns = `auto repeat(${heads.length}, ${size}px)`;
      children.push(
        el("span", {}),
        ...heads.map((head) =>
          el(
            "span",
            { class: "column", "aria-hidden": "true" },
            this.large || head % 2 === 0 ? `${this.large ? "H" : ""}${head}` : "",
          ),
        ),
      );
      const place = new Map(order.map((pair) => [pair.join("."), pair]));
      for (const layer of layers) {
        children.push(el("span", { class: "row", "aria-hidden": "true" }, `${this.large ? "L" : ""}${layer}`));
        for (const head of heads)
          children.push(place.has(`${layer}.${head}`) ? this.cell(`${layer}.${head}`, size) : el("span", {}));
      }
    } else {
      this.root.style.gridTemplateColumns = `repeat(auto-fill, ${size}px)`;
      for (const pair of order) children.push(this.cell(pair.join("."), size, true));
    }
    this.root.classList.toggle("flowing", !byLayer);
    fill(this.root, children);
    for (const { button } of this.cells.values()) this.seen.observe(button);
  }

  cell(spec, size, captioned = false) {
    const kind = mapOf().kind;
    const roles = rolesOf(kind, spec);
    const marks = manifest.roles?.marks || {};
    const said = roles.map((role) => marks[role.name].label + (role.tentative ? " (tentative)" : "")).join(", ");
    const picture = el("canvas", { "aria-hidden": "true" });
    const badge =
      roles.length && this.large
        ? el(
            "span",
            { class: "badge", "aria-hidden": "true" },
            roles[0].tentative ? marks[roles[0].name].glyph.toLowerCase() : marks[roles[0].name].glyph,
          )
        : null;
    const button = el(
      "button",
      {
        type: "button",
        role: "option",
        "data-spec": spec,
        "aria-label": `layer ${spec.replace(".", ", head ")}${said ? `: ${said}` : ""}`,
        title: this.large ? null : nameOf(spec),
      },
      picture,
      badge,
      captioned ? el("span", { class: "caption", "aria-hidden": "true" }, nameOf(spec)) : null,
    );
    if (roles.length) {
      button.style.setProperty("--role", marks[roles[0].name].color);
      button.classList.add("roled");
    }
    button.style.width = picture.style.width = picture.style.height = `${size}px`;
    this.cells.set(spec, { spec, button, picture, size, visible: false, done: false });
    return button;
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
        const shown = await matrix(t, m, cell.spec, hide, words);
        const high = await topOf(shown);
        await breathe();
        if (cell.look === look && this.cells.get(cell.spec) === cell) {
          cell.done = true;
          paintThumb(cell.picture, shown, cell.size, { low: 0, high, table: this.palette.one });
        }
      } catch {
        cell.done = true; // text or map has changed meanwhile
      }
      await breathe();
    }
    this.working = false;
    this.root.dataset.painted = String([...this.cells.values()].filter((cell) => cell.done).length);
  }

  /** Gives the focus to a head, else to the first. */
  focus(spec) {
    (this.cells.get(spec) || this.cells.get(this.order?.[0]))?.button.focus();
  }

  key(event) {
    const at = this.order.indexOf(document.activeElement?.dataset?.spec);
    if (at < 0) return;
    const [layer, head] = this.order[at].split(".").map(Number);
    let next = null;
    const across = this.byLayer
      ? 0
      : Math.max(1, Math.round(this.root.clientWidth / (this.root.firstElementChild.offsetWidth + 4)));
    const near = (step) =>
      this.byLayer
        ? this.order
            .filter((spec) => Math.sign(spec.split(".")[0] - layer) === step && Number(spec.split(".")[1]) === head)
            .at(step > 0 ? 0 : -1)
        : this.order[at + step * across];
    if (event.key === "ArrowRight") next = this.order[at + 1];
    else if (event.key === "ArrowLeft") next = this.order[at - 1];
    else if (event.key === "ArrowDown") next = near(1);
    else if (event.key === "ArrowUp") next = near(-1);
    else if (event.key === "Home") next = this.order[0];
    else if (event.key === "End") next = this.order.at(-1);
    else return;
    event.preventDefault();
    if (next) this.cells.get(next).button.focus();
  }
}

/** A role with its dot, its value where one is told, and unless `short` whether it is tentative. */
export function roleChip(role, value = "", short = false) {
  const { color, label, what } = manifest.roles.marks[role.name];
  return el("span", { class: "role", title: what }, dotOf(color), `${label}${value}${role.tentative && !short ? " (tentative)" : ""}`);
}

/**
 * Chips of roles that filter heads, each with its mark, its name and how many heads have it.
 *
 * @param host what they stand in; the one that has the focus there keeps it
 * @param roles the names of each head's roles; `unclassified` stands for none
 * @param chosen the name of the role that is filtered by
 * @param choose is told the name of a chip that is pressed
 */
export function showRoles(host, roles, chosen, choose) {
  const none = { color: "var(--faint)", label: "unclassified", what: "heads without a role" };
  const counts = new Map();
  for (const name of roles.flat()) counts.set(name, (counts.get(name) || 0) + 1);
  const focused = document.activeElement?.dataset?.role;
  const chips = Object.entries({ ...manifest.roles?.marks, unclassified: none }).map(([name, { color, label, what }]) => {
    if (!counts.has(name)) return null;
    const pressed = String(chosen === name);
    return el(
      "button",
      { type: "button", class: "chip", "aria-pressed": pressed, title: what, "data-role": name, onclick: () => choose(name) },
      dotOf(color),
      label,
      el("small", {}, String(counts.get(name))),
    );
  });
  fill(host, chips);
  if (focused) host.querySelector(`[data-role="${CSS.escape(focused)}"]`)?.focus();
}

/** Paints a map onto a small canvas. */
export function paintThumb(picture, shown, size, look) {
  const room = Math.round(size * (devicePixelRatio || 1));
  const factor = Math.max(1, Math.max(shown.rows.length, shown.columns.length) / room);
  const [width, height] = [
    Math.ceil(shown.columns.length / factor - 1e-9),
    Math.ceil(shown.rows.length / factor - 1e-9),
  ];
  picture.width = width;
  picture.height = height;
  const pixels = new ImageData(width, height);
  paintPooled(shown, look, factor, new Uint32Array(pixels.data.buffer), width, height);
  picture.getContext("2d").putImageData(pixels, 0, 0);
}
