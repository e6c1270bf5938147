// Small things of the document. Text goes in as text nodes, never as markup.

/** An element with attributes, listeners (on...) and children; strings become text nodes. */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...withoutNulls(children));
  return element;
}

const withoutNulls = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined);

/** Puts children in place of what is there; the same ones stay where they are, and keep the focus. */
export function fill(parent, ...children) {
  const next = withoutNulls(children);
  const { childNodes } = parent;
  if (next.length === childNodes.length && next.every((child, at) => child === childNodes[at])) return;
  parent.replaceChildren(...next);
}

export const button = (text, onclick, attributes = {}) => el("button", { type: "button", ...attributes, onclick }, text);

/** Words beside what matters. */
export const faint = (...children) => el("span", { class: "faint" }, children);

/** A token, set apart from the words around it. */
export const tokenOf = (label, attributes = {}) => el("q", { class: "token", ...attributes }, label);

/** "A attends to B", of two tokens. */
export const pairOf = (query, key) => el("span", { class: "pair" }, query, " attends to ", key);

export const readout = (name = "div") => el(name, { class: "read", id: "readout" });

export const toolbar = (...children) => el("div", { class: "toolbar" }, children);

/** A row of a table: its name, and its cells; a cell that is not an element is put into one. */
export function rowOf(name, cells, attributes = {}) {
  const elements = cells.map((cell) => (cell instanceof Element ? cell : el("td", {}, cell)));
  return el("tr", attributes, el("th", { scope: "row" }, name), elements);
}

export function dotOf(colour) {
  const dot = el("i", { class: "dot" });
  dot.style.background = colour;
  return dot;
}

export function showGradient(bar, colours) {
  bar.style.background = `linear-gradient(to right, ${colours.join(", ")})`;
}

/** A row of buttons of which one is chosen. */
export function segmented(label, choices, choose) {
  const buttons = choices.map(([value, text, title]) =>
    button(text, () => choose(value), { role: "radio", title, "data-value": value }),
  );
  const group = el("div", { class: "segmented", role: "radiogroup", "aria-label": label }, buttons);
  const keys = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  onSteps(group, keys, (step) => {
    const next = neighbour(buttons, document.activeElement, step);
    next.focus();
    next.click();
  });
  group.show = (value) => {
    for (const choice of buttons) {
      const isChosen = choice.dataset.value === String(value);
      choice.setAttribute("aria-checked", isChosen);
      choice.tabIndex = isChosen ? 0 : -1;
    }
  };
  return group;
}

export function select(label, choices, choose, visible = label) {
  const list = el("select", { "aria-label": label, onchange: () => choose(list.value) });
  const field = el("label", { class: "field" }, visible ? el("span", {}, visible) : null, list);
  field.show = (value) => (list.value = String(value));
  field.offer = (offered) => fill(list, offered.map(([value, text]) => el("option", { value }, text)));
  field.offer(choices);
  return field;
}

export function tick(label, change) {
  const box = el("input", { type: "checkbox", onchange: () => change(box.checked) });
  const name = el("span", {}, label);
  const field = el("label", { class: "tick" }, box, name);
  field.show = (isOn, isAble = true, text = label) => {
    fill(name, text);
    box.checked = !!isOn;
    box.disabled = !isAble;
    field.classList.toggle("off", !isAble);
  };
  return field;
}

/** A canvas that keeps its resolution; calls back when its size changes. */
export function canvas(attributes, resized) {
  const element = el("canvas", attributes);
  /** Gives it a size, and its context with nothing on it. */
  element.fit = (width, height) => {
    const ratio = devicePixelRatio || 1;
    const [w, h] = [width, height].map((side) => Math.max(1, Math.round(side * ratio)));
    if (element.width !== w || element.height !== h) {
      Object.assign(element, { width: w, height: h });
      Object.assign(element.style, { width: `${width}px`, height: `${height}px` });
    }
    const context = element.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return context;
  };
  if (resized) {
    const observer = new ResizeObserver(() => resized());
    queueMicrotask(() => element.parentElement && observer.observe(element.parentElement));
  }
  return element;
}

/** A canvas that is pointed at and worked by keys: what it is, and how, for those who listen. */
export function keyedCanvas(kind, label, resized, attributes = {}) {
  const what = { tabindex: "0", role: "application", "aria-roledescription": kind, "aria-label": label };
  return canvas({ ...what, ...attributes }, resized);
}

/** A canvas of so many pixels, to be drawn into another. */
export const sheetOf = (width, height) => Object.assign(document.createElement("canvas"), { width, height });

/** A value within 0 and the most, or two ends. */
export const clamp = (value, most, least = 0) => Math.max(least, Math.min(most, value));

export const SIDEWAYS = { ArrowRight: 1, ArrowLeft: -1 };

/** Calls back as one of the keys is pressed, with the step that it goes. */
export function onSteps(element, keys, act) {
  element.addEventListener("keydown", (event) => {
    if (!keys[event.key]) return;
    takeEvent(event);
    act(keys[event.key]);
  });
}

/** What stands so many steps after an entry of a list, round about. */
export const neighbour = (list, entry, step) => list[(list.indexOf(entry) + step + list.length) % list.length];

/** Whether a key is meant for the browser or the system. */
export const isShortcut = (event) => event.altKey || event.ctrlKey || event.metaKey;

export const isChoice = ({ key }) => key === "Enter" || key === " ";

/** The rows and columns that an arrow key goes, ten with Shift; undefined = it is no arrow key. */
export function arrowOf({ key, shiftKey }) {
  const far = shiftKey ? 10 : 1;
  return { ArrowUp: [-far, 0], ArrowDown: [far, 0], ArrowLeft: [0, -far], ArrowRight: [0, far] }[key];
}

/** Keeps an event from the browser and from all around. */
export function takeEvent(event) {
  event.preventDefault();
  event.stopPropagation();
}

const voice = el("div", { class: "unseen", role: "status", "aria-live": "polite" });

/** Says something to those who listen rather than look. */
export function say(text) {
  if (!voice.isConnected) document.body.append(voice);
  clearTimeout(say.later);
  say.later = setTimeout(() => (voice.textContent = text), 60);
}
