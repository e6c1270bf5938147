// Where a notebook holds the page in a frame: what is chosen here is told to it, and what it asks for is shown.
import { around } from "./colour.js";
import { manifest, nameOf } from "./data.js";
import { atlasHooks, mapOf, ofAtlas, ofExample, onChange, state, update, viewsOf } from "./state.js";

const placeOrNull = (place) => (place < 0 ? null : place);

export class Host {
  constructor() {
    this.wishes = {}; // until there is something to show
    if (parent === self) return;
    addEventListener("message", ({ source, data, ports }) => {
      if (source !== parent || !data?.attnscope || !ports.length) return; // no other window is listened to
      [this.port, this.sent] = [ports[0], ""];
      this.port.onmessage = ({ data: wishes }) => this.ask(wishes);
      this.ask(data.attnscope);
    });
    onChange(() => this.tell());
  }

  /** The app stands: what was asked for until now is shown. */
  answer(app) {
    [this.app, this.sent] = [app, ""];
    if (this.port) this.ask({});
  }

  /** What is chosen, by the names that the notebook has for it. */
  chosen() {
    const ofHeads = ofAtlas() || ofExample();
    return {
      view: state.v,
      text: ofHeads ? 0 : state.t,
      kind: ofAtlas() ? "" : mapOf().kind,
      head: ofHeads ? atlasHooks.head() : state.h.includes(".") ? nameOf(state.h) : state.h,
      query: placeOrNull(state.q),
      key: placeOrNull(state.k),
    };
  }

  tell() {
    if (!this.port || !this.app) return;
    const now = this.chosen();
    const text = JSON.stringify(now);
    if (text === this.sent) return;
    this.sent = text;
    this.port.postMessage(now);
  }

  /** What is to be changed so that what was asked for is seen. */
  patch({ text, kind, head, query, key }) {
    const patch = {};
    if (head && (ofAtlas() || ofExample())) {
      const isOther = head !== atlasHooks.head() || state.v === "atlas";
      if (isOther) Object.assign(patch, { v: state.v === "numbers" ? state.v : "head", head, ex: -1, q: -1 });
    } else if (head) patch.h = head.replace(/^L(\d+)H(\d+)$/, "$1.$2");
    const isOtherText = Number.isInteger(text) && text !== state.t && !ofAtlas() && !ofExample();
    if (isOtherText) Object.assign(patch, { t: text, q: -1, k: -1, z: "", y: 0 });
    const at = manifest.texts[patch.t ?? state.t]?.maps.findIndex((map) => map.kind === kind) ?? -1;
    if (at >= 0 && at !== state.m) Object.assign(patch, { m: at, q: -1, k: -1, z: "", y: 0 });
    if (query !== undefined) patch.q = query ?? -1;
    if (key !== undefined) patch.k = key ?? -1;
    if (patch.q >= 0) patch.side = "q";
    return patch;
  }

  async ask(wishes) {
    Object.assign(this.wishes, wishes);
    if (!this.app) return;
    const { view, scheme, ...rest } = this.wishes;
    this.wishes = {};
    if (scheme) around.scheme = scheme;
    if (view !== state.v && viewsOf().includes(view)) await this.app.go(view);
    update(this.patch(rest));
    this.sent = ""; // what is not there is answered by what is
    this.tell();
  }
}
