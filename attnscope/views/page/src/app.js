// The page: what stands around the views, and which one is seen.
import { palette, schemeOf } from "./colour.js";
import { CompareView } from "./compare.js";
import { breathe, canHide, canMerge, hasSpecial, manifest, nameOf } from "./data.js";
import { el, fill, say, segmented, select, tick } from "./dom.js";
import { GridView } from "./grid.js";
import { HeadCountView } from "./headcount.js";
import { HeadGrid } from "./heads.js";
import { Host } from "./host.js";
import { LinksView } from "./links.js";
import { MatrixView } from "./matrix.js";
import { save } from "./save.js";
import { atlasHooks, begin, brought, followAddress, mapOf, ofAtlas, ofExample, onChange, state, update, viewsOf } from "./state.js";
import { TextView } from "./text.js";

const NAMES = {
  grid: "Grid",
  matrix: "Matrix",
  links: "Links",
  text: "Text",
  compare: "Compare",
  headcount: "Head count",
};
const KINDS = { encoder: "encoder", decoder: "decoder", cross: "cross" };
const MAKERS = {
  grid: GridView,
  matrix: MatrixView,
  links: LinksView,
  text: TextView,
  compare: CompareView,
  headcount: HeadCountView,
};
const WITH_HEADS = ["photo", "matrix", "links", "text", "compare"];

const KEYS = [
  ["1 … 9", "the views, in the order of their tabs"],
  ["arrows", "the next head, cell or token; with Shift ten at once"],
  ["Enter, Space", "choose what is focused"],
  ["[  ]", "previous head, next head"],
  ["{  }", "the layer before, the layer after"],
  ["+  −  0", "zoom in, zoom out, all of it"],
  ["h", "hide special tokens; of a decoder the first token too"],
  ["w", "merge word pieces"],
  ["d", "dark or light"],
  ["Esc", "back to the first view"],
  ["?", "these keys"],
];

class App {
  /** @param viewer what opens other records in this page; null = it has its own */
  constructor(viewer = null) {
    this.viewer = viewer;
    this.build();
    onChange(() => this.show());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.show());
    addEventListener("keydown", (event) => this.key(event));
    addEventListener("keydown", () => (this.byKeys = true), true);
    addEventListener("pointerdown", () => (this.byKeys = false), true);
    breathe().then(() => this.show());
  }

  build() {
    this.views = {};
    const texts = manifest.texts.map(({ title }, number) => [number, title]).filter(([number]) => manifest.texts[number].example === undefined);
    this.texts = select(
      "Text",
      texts.map(([number, title]) => [number, `${texts.length > 1 ? `${number + 1}. ` : ""}${title}`]),
      (value) => update({ t: Number(value), ex: -1, q: -1, k: -1, z: "", y: 0 }),
      "",
    );
    this.texts.classList.add("texts");
    this.about = el("p", { class: "texts about" });
    this.kinds = el("div", { class: "kinds" });
    this.hide = tick("hide special", (on) => update({ hide: on ? 1 : 0 }));
    this.words = tick("whole words", (on) => update({ words: on ? 1 : 0 }));
    this.scale = select(
      "Scale",
      [
        ["fixed", "0 to 1"],
        ["head", "each head"],
        ["figure", "all heads"],
      ],
      (value) => update({ scale: value }),
    );
    this.scale.title = "what the darkest colour means";
    const savers = [
      ["png", "PNG"],
      ["svg", "SVG"],
      ["csv", "CSV"],
    ].map(([kind, shown]) =>
      el(
        "button",
        {
          type: "button",
          "data-save": kind,
          title: `save what is seen as ${shown}`,
          onclick: () => save(this.view, kind, this.palette).then(() => say(`${shown} saved`)),
        },
        shown,
      ),
    );
    this.scheme = el(
      "button",
      {
        type: "button",
        class: "icon",
        title: "dark or light (d)",
        "aria-label": "Dark or light",
        onclick: () => this.turn(),
      },
      "◐",
    );
    this.help = el(
      "dialog",
      { class: "help", "aria-label": "Keyboard shortcuts" },
      el("h2", {}, "Keyboard shortcuts"),
      el(
        "dl",
        {},
        KEYS.map(([key, what]) => [el("dt", {}, key), el("dd", {}, what)]),
      ),
      el("p", { class: "faint" }, "The address of this page holds what is shown: a link shows it again."),
      el("form", { method: "dialog" }, el("button", {}, "Close")),
    );
    const helper = el(
      "button",
      { type: "button", class: "icon", title: "keyboard shortcuts (?)", "aria-label": "Keyboard shortcuts", onclick: () => this.help.showModal() },
      "?",
    );
    this.tabs = el(
      "div",
      { class: "tabs", role: "tablist", "aria-label": "Views" },
      viewsOf().map((name) =>
        el(
          "button",
          {
            type: "button",
            role: "tab",
            id: `tab-${name}`,
            "aria-controls": "stage",
            "data-view": name,
            onclick: () => this.go(name),
          },
          brought[name]?.shown || NAMES[name],
        ),
      ),
    );
    this.tabs.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const views = viewsOf();
      this.go(views[(views.indexOf(state.v) + step + views.length) % views.length]).then(() =>
        this.tabs.querySelector(`[data-view=${state.v}]`).focus(),
      );
    });
    this.rail = new HeadGrid(
      "Heads",
      {
        open: (spec, event) => this.open(spec, event),
        hover: (spec) => (this.railName.textContent = spec ? nameOf(spec) : ""),
      },
      { large: false },
    );
    this.railName = el("span", { class: "faint", "aria-hidden": "true" });
    this.railMore = el("div", { class: "more" });
    this.steps = el(
      "div",
      { class: "steps" },
      el(
        "button",
        { type: "button", "aria-label": "Previous head", title: "previous head ([)", onclick: () => this.step(-1) },
        "‹",
      ),
      (this.stepName = select("Head", [], (value) => this.open(value), "")),
      el(
        "button",
        { type: "button", "aria-label": "Next head", title: "next head (])", onclick: () => this.step(1) },
        "›",
      ),
    );
    this.aside = el(
      "aside",
      { "aria-label": "Heads" },
      this.steps,
      el("div", { class: "railhead" }, el("span", {}, "Heads"), this.railName),
      this.rail.root,
      this.railMore,
    );
    this.stage = el("div", { id: "stage", role: "tabpanel" });
    this.foot = el("footer");
    this.controls = el("div", { class: "controls" }, this.kinds, this.hide, this.words, this.scale);
    for (const part of this.parts || []) part.remove();
    this.parts = [
      el(
        "header",
        {},
        el(
          "div",
          { class: "line" },
          el("h1", {}, "attnscope"),
          this.texts,
          this.about,
          el(
            "div",
            { class: "tools" },
            this.viewer?.button(),
            el("span", { class: "buttons", role: "group", "aria-label": "Save" }, savers),
            this.scheme,
            helper,
          ),
        ),
        el("div", { class: "line second" }, this.tabs, this.controls),
      ),
      el("div", { class: "body" }, this.aside, el("main", {}, this.stage)),
      this.foot,
      this.help,
    ];
    document.body.append(...this.parts);
    this.kindNames = null;
  }

  /** Shows what the page holds now in place of what it held. */
  restart() {
    this.build();
    this.show();
  }

  get view() {
    return this.viewOf(state.v);
  }

  viewOf(name) {
    return (this.views[name] ||= new (brought[name]?.made || MAKERS[name])(this));
  }

  /** Goes to a view; one of maps shows an example of the head where the page has no text, or one was chosen. */
  async go(name) {
    const known = manifest.texts.some((text) => text.example === undefined);
    if (WITH_HEADS.includes(name) && manifest.atlas && (!known || state.ex >= 0)) update(await atlasHooks.example(name));
    else update({ v: name, ...(ofExample() && !ofAtlas({ v: name }) && { ex: -1, q: -1, k: -1 }) });
  }

  show() {
    const scheme = schemeOf(state.d);
    document.documentElement.dataset.scheme = scheme;
    this.palette = palette(scheme);
    const { text, title, run, changes } = ofAtlas() ? atlasHooks.about() : manifest.texts[state.t];
    document.title = `attnscope: ${text.trim().slice(0, 60) || "a text"}`;
    this.texts.hidden = ofAtlas() || ofExample();
    this.about.hidden = !this.texts.hidden;
    this.controls.hidden = ofAtlas();
    if (this.texts.hidden) fill(this.about, title);
    else {
      this.texts.show(state.t);
      this.texts.title = text.slice(0, 2000);
    }
    if (!ofAtlas()) {
      this.showKinds();
      const able = canHide(state.t, state.m);
      this.hide.show(state.hide && able, able, able && !hasSpecial(state.t, state.m) ? "hide first token" : "hide special");
      this.words.show(state.words && canMerge(state.t, state.m), canMerge(state.t, state.m));
      this.scale.show(state.scale);
    }
    for (const tab of this.tabs.children) {
      tab.setAttribute("aria-selected", tab.dataset.view === state.v);
      tab.tabIndex = tab.dataset.view === state.v ? 0 : -1;
    }
    this.stage.setAttribute("aria-labelledby", `tab-${state.v}`);
    const view = this.view;
    const turned = view.root.parentElement !== this.stage;
    if (turned) {
      delete view.root.dataset.shown; // it says so itself when it stands
      fill(this.stage, view.root);
    }
    const railed = WITH_HEADS.includes(state.v);
    this.aside.classList.toggle("single", ofExample());
    this.aside.hidden = !railed;
    this.controls.classList.toggle("idle", state.v === "headcount");
    const shown = Promise.resolve(view.show());
    if (turned && this.byKeys) {
      this.focus(view);
      shown.then(() => this.focus(view));
    }
    if (railed) breathe().then(() => view === this.view && this.showRail(view));
    const told = [
      run.model,
      run.architecture,
      run.dtype,
      run.sha256 ? `sha256 ${String(run.sha256).slice(0, 12)}` : "",
      changes
        .map(
          (change) =>
            ({ hide_special: "special tokens were hidden", words: "word pieces were merged" })[change] || change,
        )
        .join(", "),
    ];
    const notes = Array.isArray(run.notes) ? run.notes : [];
    const failures = Array.isArray(run.failures) ? run.failures : [];
    fill(
      this.foot,
      el("span", {}, told.filter(Boolean).join(" · ")),
      notes.map((note) => el("span", {}, note)),
      failures.map(({ step, error }) => el("strong", { class: "failed" }, `${step} failed: ${error}`)),
      el(
        "span",
        { class: "right" },
        `attnscope ${manifest.version}`,
        ofAtlas() ? "" : ` · weights within ${(manifest.texts[state.t].within ?? manifest.step / 2 + 0.00005).toFixed(4)}${ofExample() ? ", of each row those kept alone" : ""}`,
      ),
    );
  }

  /** Who goes on by keys goes on in the view that came, where what had the focus went with the other one. */
  focus(view) {
    if (view === this.view && document.activeElement === document.body) view.focus();
  }

  showKinds() {
    const { maps } = manifest.texts[state.t];
    const name = maps.map(({ kind }) => kind).join();
    if (name !== this.kindNames) {
      this.kindNames = name;
      this.kindChoice =
        maps.length > 1
          ? segmented(
              "Attention",
              maps.map(({ kind }, number) => [String(number), KINDS[kind]]),
              (value) => update({ m: Number(value), q: -1, k: -1, z: "", y: 0 }),
            )
          : null;
      fill(this.kinds, this.kindChoice);
    }
    this.kindChoice?.show(state.m);
  }

  showRail(view) {
    const { heads } = mapOf();
    const columns = new Set(heads.map(([, head]) => head)).size;
    const size = Math.max(10, Math.min(22, Math.floor(206 / columns) - 2));
    const also = new Set(view.chosen?.() || []);
    this.rail.show(heads, true, size, state.h, this.palette, new Set(), also);
    this.stepName.offer(this.choices(view).map((spec) => [spec, nameOf(spec)]));
    this.stepName.show(state.h);
    fill(this.railMore, view.beside?.() || null);
  }

  /** What can be chosen as the head of a view. */
  choices(view) {
    const { heads, full } = mapOf();
    const single = heads.map((pair) => pair.join("."));
    if (view === this.views.links) return single;
    const layers = [...new Set(heads.map(([layer]) => layer))];
    return [
      ...single,
      ...(single.length > 1 ? ["mean", ...layers.map((layer) => `mean${layer}`)] : []),
      ...full.map((layer) => `full${layer}`),
    ];
  }

  open(spec, event) {
    if (this.view.open?.(spec, event)) return;
    update({ h: spec });
  }

  step(by) {
    if (ofAtlas() || ofExample()) return this.stepAtlas(by);
    const heads = mapOf().heads.map((pair) => pair.join("."));
    const at = heads.indexOf(state.h);
    update({ h: heads[(Math.max(at, 0) + by + heads.length) % heads.length] });
    say(nameOf(state.h));
  }

  stepAtlas(by) {
    const head = this.viewOf("atlas").step(by);
    update({ v: ["atlas", "numbers"].includes(state.v) ? state.v : "head", head, ex: -1, q: -1 });
    say(head);
  }

  layer(by) {
    if (ofAtlas()) return;
    const heads = mapOf().heads;
    const [layer, head] = state.h.split(".").map(Number);
    const next = heads
      .filter(([of]) => Math.sign(of - layer) === by)
      .sort(
        ([a, x], [b, y]) => Math.abs(a - layer) - Math.abs(b - layer) || Math.abs(x - head) - Math.abs(y - head),
      )[0];
    if (next) update({ h: next.join(".") });
    say(nameOf(state.h));
  }

  turn() {
    update({ d: schemeOf(state.d) === "dark" ? "light" : "dark" });
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest?.("input:not([type=checkbox]):not([type=range]), select, textarea")) return;
    const does = {
      "[": () => this.step(-1),
      "]": () => this.step(1),
      "{": () => this.layer(-1),
      "}": () => this.layer(1),
      h: () => update({ hide: state.hide ? 0 : 1 }),
      w: () => update({ words: state.words ? 0 : 1 }),
      d: () => this.turn(),
      "?": () => this.help.showModal(),
      Escape: () => this.go(ofExample() ? "head" : viewsOf()[0]),
    }[event.key];
    const number = Number(event.key);
    if (does) does();
    else if (number >= 1 && number <= viewsOf().length) this.go(viewsOf()[number - 1]);
    else return;
    event.preventDefault();
  }
}

/** Says in the page what went wrong, where nobody looks at a console. */
function complain(what) {
  document.querySelector(".alert")?.remove();
  document.body.prepend(el("p", { class: "alert", role: "alert" }, what));
}

if (globalThis.DecompressionStream) {
  addEventListener("unhandledrejection", ({ reason }) =>
    complain(`This page could not show its data: ${reason?.message || reason}. Is the file whole?`),
  );
  followAddress();
  const host = new Host();
  let app = null;
  const start = (viewer) => {
    if (app) app.restart();
    else app = new App(viewer);
    host.answer(app);
  };
  if (brought.viewer) new brought.viewer.made(start);
  else begin().then(() => start());
} else complain("This page needs a browser of 2023 or later: one that has DecompressionStream.");
