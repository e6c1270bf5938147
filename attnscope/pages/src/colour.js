// Colours: those of the figures on light ground, their kin on dark ground.

// matplotlib's Blues and RdBu_r: ColorBrewer's colours, interpolated linearly to 256 steps.
const BLUES = "f7fbff deebf7 c6dbef 9ecae1 6baed6 4292c6 2171b5 08519c 08306b";
const RDBU_R = "053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f";
// On dark ground nothing is dark, too: the same blues and reds, in the order of their light.
const BLUES_DARK = "12161c 0b2a4e 08519c 2171b5 4292c6 6baed6 9ecae1 c6dbef f7fbff";
const RDBU_DARK = "d1e5f0 92c5de 4393c3 2166ac 0e3050 14181e 5a0f1f b2182b d6604d f4a582 fddbc7";

/** The 256 colours of a ramp, each as [r, g, b]. */
function ramp(anchors) {
  const stops = anchors.split(" ").map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return Array.from({ length: 256 }, (_, step) => {
    const place = (step / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((part, channel) => part + (stops[low + 1][channel] - part) * (place - low));
  });
}

function table(anchors) {
  const rgb = ramp(anchors).map((colour) => colour.map((part) => Math.round(part)));
  const packed = new Uint32Array(256);
  rgb.forEach(([r, g, b], step) => (packed[step] = ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0));
  return { rgb, packed, css: rgb.map(([r, g, b]) => `rgb(${r},${g},${b})`) };
}

/** Tables of colours by scheme: of numbers from 0, and of those that go both ways. */
export const SCALES = {
  light: { sequential: table(BLUES), diverging: table(RDBU_R) },
  dark: { sequential: table(BLUES_DARK), diverging: table(RDBU_DARK) },
};

const INKS = ["ground", "ink", "faint", "rule", "accent", "special", "written", "mark"]; // as style.css has them

/** Colours for several heads at once: Okabe and Ito's, as the figures give them to roles. */
const SEVERAL = {
  light: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#15197C", "#927EEC", "#5C0300", "#694C50"],
  dark: ["#56B4E9", "#FF8A3D", "#2CC79B", "#E29BC4", "#F0B93A", "#9AD4F5", "#8B90FF", "#B5A7F5", "#E06A66", "#B99A9F"],
};

/** "light" or "dark": what is chosen, else what the system asks for. */
export function schemeOf(chosen) {
  return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

export function palette(scheme) {
  document.documentElement.dataset.scheme = scheme;
  const style = getComputedStyle(document.documentElement);
  const inks = INKS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]);
  return { scheme, ...Object.fromEntries(inks), ...SCALES[scheme], several: SEVERAL[scheme] };
}

/** The step of a 256-colour table for a value between low and high, as matplotlib counts it. */
export function stepOf(value, low, high) {
  const share = (value - low) / (high - low);
  return share >= 1 ? 255 : share > 0 ? Math.floor(share * 256) : 0;
}

/** Black or white, whichever reads better on a colour [r, g, b] (contrast of WCAG 2). */
export function inkOn(rgb) {
  const [r, g, b] = rgb.map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05) ** 2 > 1.05 * 0.05 ? "#000000" : "#ffffff";
}

/** Colours an element by a step of a table of colours, its letters so that they can be read there. */
export function shadeBy(element, step, { css, rgb }) {
  element.style.backgroundColor = css[step];
  element.style.color = inkOn(rgb[step]);
  return element;
}
