// Building the page. Everything a model or a user wrote goes through text nodes: nothing is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. attributes: by name; "on..." are listeners, "style" an object, and null leaves one out. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** As `h`, for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

// Controls, escapes of terminals, marks that turn the direction of text, and characters without width. The two joiners
// are left alone between letters and emoji, which need them.
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\u{e0001}|[\u{e0020}-\u{e007f}]|(?<![^\u0000-\u02ff])[\u200c\u200d]|[\u200c\u200d](?![^\u0000-\u02ff])/gu;
const NAMES = {
  0x1b: "ESC",
  0x00: "NUL",
  0x07: "BEL",
  0x08: "BS",
  0x0d: "CR",
  0x7f: "DEL",
  0x200b: "ZWSP",
  0x200d: "ZWJ",
  0x200c: "ZWNJ",
  0xfeff: "BOM",
};

/** Nodes of a text in which what cannot be seen is made visible, so that a text neither hides nor reorders anything. */
export function visible(text) {
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(UNSEEN)) {
    if (found.index > from) nodes.push(text.slice(from, found.index));
    const code = found[0].codePointAt(0);
    nodes.push(h("span", { class: "unseen", title: `U+${hex(code)}` }, NAMES[code] ?? `U+${hex(code)}`));
    from = found.index + found[0].length;
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

/** The same as plain text, for a title. */
export const visibleText = (text) => visible(text).map((node) => node.textContent ?? node).join("");

const hex = (code) => code.toString(16).toUpperCase().padStart(4, "0");

/** A number for reading: as short as four digits allow. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e5) return String(value);
  if (size >= 1e9) return `${trim((value / 1e9).toPrecision(3))}G`;
  if (size >= 1e6) return `${trim((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${trim((value / 1e3).toPrecision(3))}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return trim(value.toPrecision(size >= 100 ? 4 : 3));
}

const trim = (text) => (text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text);

/** Seconds as a person says them. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${trim(value.toPrecision(3))} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 120) return `${minutes} min ${Math.round(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const many = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;

const tip = document.getElementById("tip");

/** Show lines beside a point of the window; without lines, nothing. */
export function showTip(x, y, ...lines) {
  tip.hidden = lines.length === 0;
  tip.replaceChildren(...lines.map((line) => h("div", {}, line)));
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
}

/** Call `draw(width)` now and whenever the element's width changes, for as long as it is on the page. */
export function onWidth(element, draw) {
  let before = 0;
  new ResizeObserver(() => {
    const width = element.clientWidth;
    if (width && width !== before) draw((before = width));
  }).observe(element);
}
