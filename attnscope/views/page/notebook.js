// A record in a notebook: the page in a frame of its own, so that styles, ids and scripts of several, and of the
// notebook, stay apart; and a channel to it, so that what is chosen there is known in Python, and the other way round.

const SYNCED = ["view", "text", "kind", "head", "query", "key"];

/** "light" or "dark": what the notebook around an element is. */
function schemeAround(element) {
  for (let at = element; at; at = at.parentElement || at.getRootNode().host) {
    const [r, g, b, alpha = 1] = (getComputedStyle(at).backgroundColor.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
    if (alpha > 0.5) return 0.299 * r + 0.587 * g + 0.114 * b < 110 ? "dark" : "light";
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function render({ model, el }) {
  const frame = document.createElement("iframe");
  frame.title = "attnscope";
  frame.setAttribute("sandbox", "allow-scripts allow-downloads");
  Object.assign(frame.style, { display: "block", width: "100%", border: "1px solid #8886", borderRadius: "4px", boxSizing: "border-box" });
  const fit = () => (frame.style.height = `${model.get("height")}px`);
  fit();
  let port = null;
  let scheme = "";
  let asked = {};
  let telling = false; // what the page says is not to be said to it again

  frame.addEventListener("load", () => {
    const channel = new MessageChannel();
    port = channel.port1;
    port.onmessage = ({ data }) => {
      telling = true;
      for (const name of SYNCED) if (model.get(name) !== data[name]) model.set(name, data[name]);
      telling = false;
      model.save_changes();
    };
    scheme = schemeAround(el);
    const first = Object.fromEntries(SYNCED.map((name) => [name, model.get(name)]).filter(([, value]) => value !== null && value !== ""));
    frame.contentWindow.postMessage({ attnscope: { ...first, scheme } }, "*", [channel.port2]);
  });

  const ask = (what) => {
    if (!Object.keys(asked).length) queueMicrotask(() => {
      port?.postMessage(asked);
      asked = {};
    });
    Object.assign(asked, what);
  };
  const handlers = SYNCED.map((name) => [`change:${name}`, () => telling || ask({ [name]: model.get(name) })]);
  handlers.push(["change:height", fit]);
  for (const [event, handler] of handlers) model.on(event, handler);

  // Notebooks turn dark and light by attributes of the document's root or body.
  const watch = new MutationObserver(() => {
    const now = schemeAround(el);
    if (now !== scheme) ask({ scheme: (scheme = now) });
  });
  for (const at of [document.documentElement, document.body]) watch.observe(at, { attributes: true });

  frame.srcdoc = model.get("_page");
  el.append(frame);
  return () => {
    watch.disconnect();
    for (const [event, handler] of handlers) model.off(event, handler);
  };
}

export default { render };
