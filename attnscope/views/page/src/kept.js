// What an example of the atlas holds of a row: its largest weights alone. The views of maps say so, and what is missing.
import { manifest } from "./data.js";
import { el } from "./dom.js";
import { state } from "./state.js";

/** Of each query the share of its row that is missing, and its least weight that was kept; null = nothing is missing. */
export function keptOf() {
  return manifest.texts[state.t]?.kept || null;
}

/** What is missing of a query's row, else of rows on average, in a line; null where nothing is. */
export function tellKept(query = -1) {
  const kept = keptOf();
  if (!kept) return null;
  const some = (share) => (share < 0.005 ? "hardly any" : `${(100 * share).toFixed(0)}%`);
  const mean = kept.missing.reduce((sum, one) => sum + one, 0) / (kept.missing.length || 1);
  return el(
    "p",
    { class: "faint kept" },
    "An atlas keeps the largest weights of a row, up to 95% or 16 keys; a stroke: not kept. Not kept, or on tokens that are left out: ",
    el("b", {}, query < 0 ? some(mean) : some(kept.missing[query])),
    query < 0 ? " of a row, on average" : ` of the row of \u201c${manifest.texts[state.t].maps[0].queries.labels[query]}\u201d`,
  );
}
