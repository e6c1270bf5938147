// Small things of the document. Text goes in as text nodes, never as markup.

/** An element with attributes, listeners (on...) and children; strings become text nodes. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

/** Puts children in place of what is there; the same ones stay where they are, and keep the focus. */
export function fill(parent, ...children) {
  const next = children.flat(Infinity).filter((child) => child !== null && child !== undefined);
  const held = parent.childNodes;
  if (next.length === held.length && next.every((child, at) => child === held[at])) return;
  parent.replaceChildren(...next);
}

/** A dot of a colour. */
export function dotOf(colour) {
  const made = el("i", { class: "dot" });
  made.style.background = colour;
  return made;
}

/** A row of buttons of which one is chosen. */
export function segmented(label, choices, choose) {
  const buttons = choices.map(([value, shown, title]) =>
    el("button", { type: "button", role: "radio", title, "data-value": value, onclick: () => choose(value) }, shown),
  );
  const whole = el("div", { class: "segmented", role: "radiogroup", "aria-label": label }, buttons);
  whole.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const open = buttons.filter((button) => !button.disabled);
    const next = open[(open.indexOf(document.activeElement) + step + open.length) % open.length];
    next.focus();
    next.click();
  });
  whole.show = (value) => {
    for (const button of buttons) {
      const chosen = button.dataset.value === String(value);
      button.setAttribute("aria-checked", chosen);
      button.tabIndex = chosen ? 0 : -1;
    }
  };
  return whole;
}

/** A labelled list to choose from. */
export function select(label, choices, choose, visible = label) {
  const list = el("select", { "aria-label": label, onchange: () => choose(list.value) }, options(choices));
  const whole = el("label", { class: "field" }, visible ? el("span", {}, visible) : null, list);
  whole.show = (value) => (list.value = String(value));
  whole.offer = (offered) => fill(list, options(offered));
  whole.list = list;
  return whole;
}

function options(choices) {
  return choices.map(([value, shown]) => el("option", { value }, shown));
}

/** A box to tick. */
export function tick(label, change) {
  const box = el("input", { type: "checkbox", onchange: () => change(box.checked) });
  const name = el("span", {}, label);
  const whole = el("label", { class: "tick" }, box, name);
  whole.show = (on, able = true, named = label) => {
    fill(name, named);
    box.checked = !!on;
    box.disabled = !able;
    whole.classList.toggle("off", !able);
  };
  return whole;
}

/** A canvas that keeps its resolution; calls back when its size changes. */
export function canvas(attributes, resized) {
  const made = el("canvas", attributes);
  made.fit = (width, height) => {
    const ratio = devicePixelRatio || 1;
    const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
    if (made.width !== w || made.height !== h) {
      made.width = w;
      made.height = h;
      made.style.width = `${width}px`;
      made.style.height = `${height}px`;
    }
    const context = made.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return context;
  };
  if (resized) {
    const observer = new ResizeObserver(() => resized());
    queueMicrotask(() => made.parentElement && observer.observe(made.parentElement));
  }
  return made;
}

const voice = el("div", { class: "unseen", role: "status", "aria-live": "polite" });

/** Says something to those who listen rather than look. */
export function say(text) {
  if (!voice.isConnected) document.body.append(voice);
  clearTimeout(say.later);
  say.later = setTimeout(() => (voice.textContent = text), 60);
}
