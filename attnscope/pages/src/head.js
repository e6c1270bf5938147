// Head: the card of one head, and the texts that show what it does.
import { AtlasView } from "./atlas.js";
import { Card } from "./card.js";
import { atHead, catalogs, headOf } from "./catalog.js";
import { button, el, select, toolbar } from "./dom.js";
import { Examples } from "./examples.js";
import { register, update } from "./state.js";

class HeadView {
  constructor(app) {
    this.app = app;
    this.names = select("Head", [], (head) => update(atHead(head)), "");
    const step = (by, label, sign, key) =>
      button(sign, () => app.step(by), { "aria-label": label, title: `${label.toLowerCase()} (${key})` });
    const [back, on] = [step(-1, "Previous head", "\u2039", "["), step(1, "Next head", "\u203a", "]")];
    this.title = el("div", { class: "headtitle" });
    this.card = new Card(app);
    this.examples = new Examples(app);
    this.body = el("div", { class: "headbody" }, this.card.root, this.examples.root);
    const bar = toolbar(el("div", { class: "steps" }, back, this.names, on), this.title);
    this.root = el("div", { class: "view head" }, bar, this.body);
  }

  focus() {
    (this.examples.list.querySelector('[data-token][tabindex="0"]') || this.card.root).focus({ preventScroll: true });
  }

  name() {
    return `head ${headOf().name}`;
  }

  async show() {
    const call = (this.lastCall = {});
    const head = headOf();
    const { heads, detail } = catalogs.current;
    if (!this.offered) this.names.offer(heads.map(({ name }) => [name, name]));
    this.offered = true;
    this.names.show(head.name);
    this.card.showTitle(this.title);
    const card = detail ? await catalogs.current.card(head.at) : null;
    if (this.lastCall !== call) return;
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
