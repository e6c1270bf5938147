// Why: the command that says what the score of a cell is made of.
import { manifest } from "./data.js";
import { el } from "./dom.js";
import { mapOf, state } from "./state.js";

/** A text as a shell reads it back. */
export function inQuotes(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** The same of a word, in quotes only where it needs them. */
export function wordOf(text) {
  return /^[\w./][\w./-]*$/.test(text) ? text : inQuotes(text);
}

/** Where a model is loaded from: a folder or file by its path, any other by its name. */
export function modelOf({ model, source }) {
  const folder = /^(?:folder|file) (.+)$/s.exec(source || "");
  return folder ? folder[1] : String(model || "");
}

/** A button that copies a command; where it may not, it selects it. */
export function copyButton(command, code) {
  const select = () => getSelection().selectAllChildren(code);
  const copy = () => (navigator.clipboard ? navigator.clipboard.writeText(command).then(() => (button.textContent = "copied"), select) : select());
  const button = el("button", { type: "button", onclick: copy }, "copy");
  return button;
}

/** The command that takes the score of a cell apart; empty where it would not read this text, or not as here. */
function commandOf(q, k) {
  const { text, run, part, photos, maps } = manifest.texts[state.t];
  const { kind, queries } = mapOf();
  const isAlone = queries.pair === null && (queries.given < 0 || queries.given === queries.labels.length);
  if (part || photos || run.road !== "seam" || !isAlone || text.startsWith("-")) return "";
  const kinds = maps.length > 1 ? ` --kind ${kind}` : "";
  const head = state.h.replace(/^(\d+)\.(\d+)$/, "L$1H$2");
  return `attnscope why ${inQuotes(text)} -m ${wordOf(modelOf(run))} --pick ${head} --query @${q} --key @${k}${kinds}`;
}

/** Why a query attends to a key: the command that says it; null of several heads. */
export function whyOf(q, k) {
  if (q < 0 || k < 0 || !/^\d+\.\d+$/.test(state.h)) return null;
  const command = commandOf(q, k);
  if (!command) return null;
  const code = el("code", { tabindex: "0" }, command);
  return el(
    "section",
    { class: "why" },
    el("p", { class: "faint" }, "why this key?"),
    code,
    copyButton(command, code),
  );
}
