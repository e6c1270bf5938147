// Head: the card of one head, and the texts that show what it does.
import { AtlasView } from "./atlas.js";
import { Card } from "./card.js";
import { catalogs, headOf } from "./catalog.js";
import { el, fill, select } from "./dom.js";
import { Examples } from "./examples.js";
import { register, update } from "./state.js";

export class HeadView {
  constructor(app) {
    this.app = app;
    this.names = select("Head", [], (value) => update({ head: value, ex: -1, q: -1 }), "");
    const step = (by, said, shown, key) =>
      el("button", { type: "button", "aria-label": said, title: `${said.toLowerCase()} (${key})`, onclick: () => app.step(by) }, shown);
    this.title = el("div", { class: "headtitle" });
    this.card = new Card(app);
    this.examples = new Examples(app);
    this.root = el(
      "div",
      { class: "view head" },
      el("div", { class: "toolbar" }, el("div", { class: "steps" }, step(-1, "Previous head", "\u2039", "["), this.names, step(1, "Next head", "\u203a", "]")), this.title),
      (this.body = el("div", { class: "headbody" }, this.card.root, this.examples.root)),
    );
  }

  focus() {
    (this.examples.list.querySelector('[data-token][tabindex="0"]') || this.card.root).focus({ preventScroll: true });
  }

  name() {
    return `head ${headOf().name}`;
  }

  async show() {
    const asked = (this.asked = {});
    const head = headOf();
    const { heads, detail } = catalogs.shown;
    if (!this.offered) this.names.offer(heads.map(({ name }) => [name, name]));
    this.offered = true;
    this.names.show(head.name);
    this.card.showTitle(this.title);
    const card = detail ? await catalogs.shown.card(head.at) : null;
    if (this.asked !== asked) return;
    this.examples.root.hidden = !card;
    this.body.classList.toggle("alone", !card);
    this.card.show(card);
    if (card) this.examples.show(card);
    this.root.dataset.shown = head.name;
  }

  async figure() {
    return this.card.figure();
  }

  async rows() {
    return this.card.rows();
  }
}

register("atlas", "All heads", AtlasView);
register("head", "Head", HeadView);
