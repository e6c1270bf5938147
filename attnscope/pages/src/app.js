// The page: what stands around the views, and which one is seen.
import { palette, schemeOf } from "./colour.js";
import { CompareView } from "./compare.js";
import { breathe, canHide, canMerge, hasSpecial, manifest, nameOf } from "./data.js";
import { SIDEWAYS, button, clamp, el, fill, isShortcut, neighbour, onSteps, say, segmented, select, tick } from "./dom.js";
import { GridView } from "./grid.js";
import { HeadGrid } from "./heads.js";
import { LinksView } from "./links.js";
import { MatrixView } from "./matrix.js";
import { save, shortHash } from "./save.js";
import {
  atlasHooks, begin, registered, followAddress, hasText, mapOf, ofAtlas, ofExample, onChange, register, state, update, viewsOf,
} from "./state.js";
import { TextView } from "./text.js";

register("grid", "Grid", GridView);
register("matrix", "Matrix", MatrixView);
register("links", "Links", LinksView);
register("text", "Text", TextView);
register("compare", "Compare", CompareView);

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
  constructor() {
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
    const numbers = [...manifest.texts.keys()].filter((number) => manifest.texts[number].example === undefined);
    const titleOf = (number) => `${numbers.length > 1 ? `${number + 1}. ` : ""}${manifest.texts[number].title}`;
    const texts = numbers.map((number) => [number, titleOf(number)]);
    this.texts = select("Text", texts, (t) => update({ t: Number(t), ex: -1, q: -1, k: -1, z: "", y: 0 }), "");
    this.texts.classList.add("texts");
    this.about = el("p", { class: "texts about" });
    this.kinds = el("div", { class: "kinds" });
    this.hide = tick("hide special", (isOn) => update({ hide: isOn ? 1 : 0 }));
    this.words = tick("whole words", (isOn) => update({ words: isOn ? 1 : 0 }));
    const scales = [["fixed", "0 to 1"], ["head", "each head"], ["figure", "all heads"]];
    this.scale = select("Scale", scales, (scale) => update({ scale }));
    this.scale.title = "what the darkest colour means";
    this.buildHelp();
    this.buildTabs();
    this.buildRail();
    this.stage = el("div", { id: "stage", role: "tabpanel" });
    this.foot = el("footer");
    this.controls = el("div", { class: "controls" }, this.kinds, this.hide, this.words, this.scale);
    const title = el("div", { class: "line" }, el("h1", {}, "attnscope"), this.texts, this.about, this.tools());
    document.body.append(
      el("header", {}, title, el("div", { class: "line second" }, this.tabs, this.controls)),
      el("div", { class: "body" }, this.aside, el("main", {}, this.stage)),
      this.foot,
      this.help,
    );
    this.kindNames = null;
  }

  /** What can be done with all that is seen: save it, turn it dark, ask for help. */
  tools() {
    const savers = ["PNG", "SVG", "CSV"].map((name) => {
      const kind = name.toLowerCase();
      const saveView = () => save(this.view, kind, this.palette).then(() => say(`${name} saved`));
      return button(name, saveView, { "data-save": kind, title: `save what is seen as ${name}` });
    });
    const icon = (sign, label, title, onclick) => button(sign, onclick, { class: "icon", title, "aria-label": label });
    return el(
      "div",
      { class: "tools" },
      el("span", { class: "buttons", role: "group", "aria-label": "Save" }, savers),
      icon("◐", "Dark or light", "dark or light (d)", () => this.turn()),
      icon("?", "Keyboard shortcuts", "keyboard shortcuts (?)", () => this.help.showModal()),
    );
  }

  buildHelp() {
    this.help = el(
      "dialog",
      { class: "help", "aria-label": "Keyboard shortcuts" },
      el("h2", {}, "Keyboard shortcuts"),
      el("dl", {}, KEYS.map(([key, what]) => [el("dt", {}, key), el("dd", {}, what)])),
      el("p", { class: "faint" }, "The address of this page holds what is shown: a link shows it again."),
      el("form", { method: "dialog" }, el("button", {}, "Close")),
    );
  }

  buildTabs() {
    const tabs = viewsOf().map((name) => {
      const facts = { role: "tab", id: `tab-${name}`, "aria-controls": "stage", "data-view": name };
      return button(registered[name].title, () => this.go(name), facts);
    });
    this.tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "Views" }, tabs);
    onSteps(this.tabs, SIDEWAYS, (step) => {
      this.go(neighbour(viewsOf(), state.v, step)).then(() => this.tabs.querySelector(`[data-view=${state.v}]`).focus());
    });
  }

  buildRail() {
    this.railName = el("span", { class: "faint", "aria-hidden": "true" });
    const on = {
      open: (spec, event) => this.open(spec, event),
      hover: (spec) => (this.railName.textContent = spec ? nameOf(spec) : ""),
    };
    this.rail = new HeadGrid("Heads", on, { large: false });
    this.railMore = el("div", { class: "more" });
    this.stepName = select("Head", [], (value) => this.open(value), "");
    const step = (sign, by, label, title) => button(sign, () => this.step(by), { "aria-label": label, title });
    this.aside = el(
      "aside",
      { "aria-label": "Heads" },
      el(
        "div",
        { class: "steps" },
        step("‹", -1, "Previous head", "previous head ([)"),
        this.stepName,
        step("›", 1, "Next head", "next head (])"),
      ),
      el("div", { class: "railhead" }, el("span", {}, "Heads"), this.railName),
      this.rail.root,
      this.railMore,
    );
  }

  get view() {
    return this.viewOf(state.v);
  }

  viewOf(name) {
    return (this.views[name] ||= new registered[name].View(this));
  }

  /** Goes to a view; one of maps shows an example of the head where the page has no text, or one was chosen. */
  async go(name) {
    if (WITH_HEADS.includes(name) && manifest.heads && (!hasText() || state.ex >= 0)) update(await atlasHooks.example(name));
    else update({ v: name, ...(ofExample() && !ofAtlas({ v: name }) && { ex: -1, q: -1, k: -1 }) });
  }

  show() {
    const scheme = schemeOf(state.d);
    if (this.palette?.scheme !== scheme) this.palette = palette(scheme);
    const subject = ofAtlas() ? atlasHooks.about() : manifest.texts[state.t];
    const { text, title } = subject;
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
      const [isHidable, isMergeable] = [canHide(state.t, state.m), canMerge(state.t, state.m)];
      const hideText = isHidable && !hasSpecial(state.t, state.m) ? "hide first token" : "hide special";
      this.hide.show(state.hide && isHidable, isHidable, hideText);
      this.words.show(state.words && isMergeable, isMergeable);
      this.scale.show(state.scale);
    }
    for (const tab of this.tabs.children) {
      const isSelected = tab.dataset.view === state.v;
      tab.setAttribute("aria-selected", isSelected);
      tab.tabIndex = isSelected ? 0 : -1;
    }
    this.stage.setAttribute("aria-labelledby", `tab-${state.v}`);
    const view = this.view;
    const turned = view.root.parentElement !== this.stage;
    if (turned) {
      delete view.root.dataset.shown; // it says so itself when it stands
      fill(this.stage, view.root);
    }
    const hasRail = WITH_HEADS.includes(state.v);
    this.aside.classList.toggle("single", ofExample());
    this.aside.hidden = !hasRail;
    const ready = Promise.resolve(view.show());
    if (turned && this.byKeys) {
      this.focus(view);
      ready.then(() => this.focus(view));
    }
    if (hasRail) breathe().then(() => view === this.view && this.showRail(view));
    this.showFoot(subject);
  }

  /** Which model gave the numbers, how, and how exact they are. */
  showFoot({ run, changes }) {
    const changed = { hide_special: "special tokens were hidden", words: "word pieces were merged" };
    const facts = [run.model, run.architecture, run.dtype, shortHash(run), changes.map((change) => changed[change] || change).join(", ")];
    const listOf = (value) => (Array.isArray(value) ? value : []);
    const failures = listOf(run.failures).map(({ step, error }) => el("strong", { class: "failed" }, `${step} failed: ${error}`));
    const within = manifest.texts[state.t]?.within ?? manifest.step / 2 + 0.00005;
    const some = ofExample() ? ", of each row those kept alone" : "";
    const exact = ofAtlas() ? "" : ` · weights within ${within.toFixed(4)}${some}`;
    fill(
      this.foot,
      el("span", {}, facts.filter(Boolean).join(" · ")),
      listOf(run.notes).map((note) => el("span", {}, note)),
      failures,
      el("span", { class: "right" }, `attnscope ${manifest.version}`, exact),
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
      const choices = maps.map(({ kind }, number) => [String(number), kind]);
      const choose = (value) => update({ m: Number(value), q: -1, k: -1, z: "", y: 0 });
      this.kindChoice = maps.length > 1 ? segmented("Attention", choices, choose) : null;
      fill(this.kinds, this.kindChoice);
    }
    this.kindChoice?.show(state.m);
  }

  showRail(view) {
    const { heads } = mapOf();
    const columns = new Set(heads.map(([, head]) => head)).size;
    const size = clamp(Math.floor(206 / columns) - 2, 22, 10);
    this.rail.show(heads, true, size, state.h, this.palette, new Set(), view.chosen?.() || []);
    this.stepName.offer(this.choices(view).map((spec) => [spec, nameOf(spec)]));
    this.stepName.show(state.h);
    fill(this.railMore, view.beside?.() || null);
  }

  choices(view) {
    const { heads, full } = mapOf();
    const single = heads.map((pair) => pair.join("."));
    if (view === this.views.links) return single;
    const layers = [...new Set(heads.map(([layer]) => layer))];
    const means = single.length > 1 ? ["mean", ...layers.map((layer) => `mean${layer}`)] : [];
    return [...single, ...means, ...full.map((layer) => `full${layer}`)];
  }

  open(spec, event) {
    if (!this.view.open?.(spec, event)) update({ h: spec });
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
    update({ v: state.v === "atlas" ? state.v : "head", head, ex: -1, q: -1 });
    say(head);
  }

  layer(by) {
    if (ofAtlas()) return;
    const [layer, head] = state.h.split(".").map(Number);
    const away = (pair) => [Math.abs(pair[0] - layer), Math.abs(pair[1] - head)];
    const [next] = mapOf()
      .heads.filter(([other]) => Math.sign(other - layer) === by)
      .sort((a, b) => away(a)[0] - away(b)[0] || away(a)[1] - away(b)[1]);
    if (next) update({ h: next.join(".") });
    say(nameOf(state.h));
  }

  turn() {
    update({ d: schemeOf(state.d) === "dark" ? "light" : "dark" });
  }

  key(event) {
    if (isShortcut(event) || document.querySelector("dialog[open]")) return;
    if (event.target.closest?.("input:not([type=checkbox]):not([type=range]), select, textarea")) return;
    const action = {
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
    if (action) action();
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
  begin().then(() => new App());
} else complain("This page needs a browser of 2023 or later: one that has DecompressionStream.");
