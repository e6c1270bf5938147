// The viewer: a page without data, that shows the record which is dropped on it or chosen. Nothing leaves the machine.
import { Unreadable } from "./archive.js";
import { Catalog, catalogs } from "./catalog.js";
import { schemeOf } from "./colour.js";
import { forget, manifest, unpackBlock } from "./data.js";
import { el, fill } from "./dom.js";
import { readRecord } from "./reading.js";
import { begin, registered, state } from "./state.js";

const SHOWN = "heatmap, pooled, heads, atlas, compare, relations, ablate";
const bytesOfFile = async (file) => new Uint8Array(await file.arrayBuffer());

class Viewer {
  /** @param start makes the app, or makes it anew, once there is something to show */
  constructor(start) {
    this.start = start;
    this.wrong = el("p", { class: "wrong", role: "alert" });
    const openFile = (file) => file && this.open(file.name, bytesOfFile(file));
    const facts = { type: "file", accept: ".npz,.json", class: "unseen", id: "file", tabindex: "-1", "aria-label": "A saved record" };
    this.input = el("input", { ...facts, onchange: () => openFile(this.input.files[0]) });
    const choose = el("button", { type: "button", class: "choose", onclick: () => this.input.click() }, "choose a file");
    this.welcome = el(
      "main",
      { class: "welcome" },
      el("h1", {}, "attnscope viewer"),
      el("p", {}, "Drop a saved record here, or ", choose, "."),
      el("p", { class: "faint" }, `What attnscope saved as .npz or .json (${SHOWN}), and any .npz with weights (layer, head, query, key) and tokens. It is read in this page, and goes nowhere.`),
      this.wrong,
    );
    document.documentElement.dataset.scheme = schemeOf(state.d);
    document.body.append(this.welcome, this.input);
    addEventListener("dragover", (event) => {
      event.preventDefault();
      document.body.classList.add("dropping");
    });
    addEventListener("dragleave", (event) => !event.relatedTarget && document.body.classList.remove("dropping"));
    addEventListener("drop", (event) => {
      event.preventDefault();
      document.body.classList.remove("dropping");
      openFile(event.dataTransfer.files[0]);
    });
    const { record } = manifest.viewer;
    if (record) {
      this.welcome.hidden = true;
      this.open(record.name, unpackBlock(record.block)).then(() => (this.welcome.hidden = false));
    }
  }

  button() {
    return el("button", { type: "button", class: "open", title: "open another record", onclick: () => this.input.click() }, "Open");
  }

  /** Shows a record, of which `bytes` is a promise. */
  async open(name, bytes) {
    try {
      const { texts, roles, record, detail } = await readRecord(name, await bytes);
      forget();
      const first = !manifest.opened;
      const atlas = record && { heads: detail && [], grid: record.grid };
      Object.assign(manifest, { texts, roles, start: texts[0]?.photos ? { scale: "head" } : {}, atlas, opened: (manifest.opened || 0) + 1 });
      catalogs.current = record && new Catalog(record, detail);
      await begin(first);
      this.welcome.remove();
      this.tell("");
      this.start(this);
    } catch (error) {
      // What is wrong with the file is said; an error of this page itself is one, too.
      const reason = error instanceof Unreadable ? error.message : `its parts do not fit each other (${error.message})`;
      this.tell(`${name} cannot be shown: ${reason}.`);
    } finally {
      this.input.value = "";
    }
  }

  tell(what) {
    fill(this.wrong, what);
    document.querySelector(".alert")?.remove();
    if (what && !this.welcome.isConnected) document.body.prepend(el("p", { class: "alert", role: "alert" }, what));
  }
}

registered.viewer = { View: Viewer };
