// Numbers about heads, and descriptions of heads, in words.
import { countText } from "./data.js";

const EVEN = 0.1; // nats from uniform below which a head spreads evenly
const LITTLE = 0.3; // explained share below which a head is mostly undescribed
const HARDLY = 0.02; // share of attention below which a part of a description is not mentioned

/** A share in percent. */
export function percent(share) {
  return Number.isFinite(share) ? `${(100 * share).toFixed(0)}%` : "\u2013";
}

function sizeText(size) {
  if (size >= 99.95) return size.toFixed(0);
  if (size >= 9.995) return size.toFixed(1);
  if (size >= 0.0995 || size === 0) return size.toFixed(2);
  return size >= 0.00095 ? String(Number(size.toPrecision(2))) : size.toExponential(0);
}

/** A number with three digits or so. */
export function shortNumber(value) {
  if (!Number.isFinite(value)) return "\u2013";
  const text = sizeText(Math.abs(value));
  return (value < 0 && /[1-9]/.test(text) ? "\u2212" : "") + text;
}

/** The interval of a number, in brackets; empty where it is not known. */
export function intervalText(low, high, write = shortNumber) {
  return Number.isFinite(low) && Number.isFinite(high) ? ` [${write(low)}, ${write(high)}]` : "";
}

/** A value under uniform attention; what is left of 0 by rounding is 0. */
export function evenNumber(value) {
  return Number.isFinite(value) ? shortNumber(Math.abs(value) < 1e-6 ? 0 : value) : "";
}

/** Whether a head attends to what a term names less than uniform attention would. */
const avoids = ({ weight, share, even }) => weight < 0 && !((share ?? NaN) >= (even ?? NaN));

function wordsOfTerm(term, parts) {
  const [share, even] = [term.share ?? NaN, term.even ?? NaN];
  const isMore = term.weight >= 0;
  const isMixed = isMore ? share < even : share >= even; // the other terms say more, or less, than there is
  const note = isMixed ? [`${isMore ? "more" : "less"}, given the other terms`] : [];
  const more = parts.map(({ weight, words }) => `${weight >= 0 ? "more" : "less"} ${words}`);
  const shares = [percent(share) + (term.share_of ? ` ${term.share_of}` : ""), `uniform ${percent(even)}`, ...note];
  const facts = Number.isFinite(share) ? [...shares, ...more] : more;
  const name = avoids(term) ? `not ${term.words}` : term.words;
  return facts.length ? `${name} (${facts.join("; ")})` : name;
}

function listTerms(terms) {
  const whole = new Set(terms.filter((term) => !term.part_of).map((term) => term.feature));
  const partsOf = ({ feature }) => terms.filter((part) => part.part_of === feature);
  return terms.filter((term) => !whole.has(term.part_of)).map((term) => wordsOfTerm(term, partsOf(term))).join(", ");
}

/** The words of terms, or that they say little, or nothing. */
function wordsOfTerms(terms, explained, words = listTerms(terms)) {
  return terms.length ? words + (explained >= LITTLE ? "" : "; mostly undescribed") : "undescribed";
}

/** What a head attends to when it attends; empty = it only rests. */
function attendsTo({ terms, share, nats, explained, summary = "", pairs = [] }) {
  if (share < HARDLY) return "";
  if (nats < EVEN) return "all other tokens evenly";
  const words = wordsOfTerms(terms, explained, summary || undefined);
  const such = pairs.map(({ query, key }) => `${query} → ${key}`).join(", ");
  return such && terms.length && !summary ? `${words}, such as ${such}` : words;
}

/** How much a head rests, and on what; empty = hardly. */
function restsOn({ terms, active }) {
  if (active.share > 1 - HARDLY) return "";
  const on = terms.filter((term) => term.share >= HARDLY && !term.part_of && !avoids(term)).sort((a, b) => b.share - a.share);
  const names = on.slice(0, 2).map((term) => term.words);
  return `rests ${percent(1 - active.share)}${names.length ? ` on ${names.join(" and ")}` : ""}`;
}

/** The terms that a description sums up, with their shares; empty = its words list them. */
export function detailsOf({ terms, active }) {
  if (!active?.summary) return "";
  return `terms: ${listTerms(active.terms)}${terms.length ? `; rests: ${listTerms(terms)}` : ""}`;
}

/** A description in words, as records have it. */
export function wordsOfDescription({ terms, nats, explained, active }) {
  if (nats < EVEN) return "spreads evenly";
  if (!active) return wordsOfTerms(terms, explained);
  return [attendsTo(active), restsOn({ terms, active })].filter(Boolean).join("; ");
}

/** What a description predicts, in words: of the attention off the sinks, where a record tells them apart. */
export function predictedOf(description) {
  const { explained, low, high, nats } = description.active?.share >= HARDLY ? description.active : description;
  if (description.nats < EVEN || nats < EVEN) return `${shortNumber(nats)} nats from uniform`;
  const sure = intervalText(low, high, percent) || " (these texts cannot tell)";
  return `predicts ${percent(explained)}${sure} of what sets it apart from uniform attention (${shortNumber(nats)} nats)`;
}

/** What the other half of the texts has in place of the first term outside sinks; empty = the same. */
export function warningOf({ other_half: other }) {
  return other ? `other half of the texts: ${other}` : "";
}

/** From how many texts and queries heads are described. */
export function sampleOf({ n_texts, n_queries, n_scored }, corpus) {
  const [texts, queries, fitted, scored] = [n_texts, n_queries, n_texts - n_scored, n_scored].map(countText);
  const all = corpus?.n_texts > n_texts ? ` of ${countText(corpus.n_texts)}` : "";
  return `described from ${texts}${all} texts (${queries} queries): fitted on ${fitted}, scored on ${scored} others`;
}

/** A description in fewer words: what it attends to, or the terms with their shares. */
export function briefOf(description) {
  const { active } = description;
  if (description.nats < EVEN) return "spreads evenly";
  if (active?.summary && active.share >= HARDLY) return attendsTo(active);
  const { terms, nats, explained } = active?.share >= HARDLY ? active : description;
  if (nats < EVEN) return "all other tokens evenly";
  const whole = terms.filter((term) => !term.part_of || !terms.some(({ feature }) => feature === term.part_of));
  const words = whole.map((term) => {
    // The share of what a head avoids is that of the keys themselves: beside "not" it would be read the wrong way round.
    if (avoids(term)) return `not ${term.words}`;
    return Number.isFinite(term.share) ? `${term.words} ${percent(term.share)}` : term.words;
  });
  return wordsOfTerms(whole, explained, words.join(", "));
}
