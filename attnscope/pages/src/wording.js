// Numbers about heads as people read them.

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

/** A baseline; what is left of 0 by rounding is 0. */
export function baselineNumber(value) {
  return Number.isFinite(value) ? shortNumber(Math.abs(value) < 1e-6 ? 0 : value) : "";
}
