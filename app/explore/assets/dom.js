// Elements without markup: no text of a reply can become HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "line", "path", "circle", "text", "title"]);
const ANIMATED = 16; // rows: those below are out of sight

/** An element. `on…` are listeners, true and false an attribute without a value, `vars` custom properties of its style.
 * @param {string} tag @param {Record<string, any>} attributes @param {...any} children @returns {any} */
export function h(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, set] of Object.entries(value)) element.style.setProperty(key, set);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

/** @param {string} key @param {string} text @param {(event: any) => any} press @param {Record<string, any>} more */
export const button = (key, text, press, more = {}) =>
  h("button", { type: "button", "data-key": key, onclick: press, ...more }, text);

/** A checkbox with its text. @param {string} id @param {string} text @param {boolean} on @param {(on: boolean) => any} set */
export const check = (id, text, on, set) => {
  const box = { type: "checkbox", id, "data-key": id, checked: on };
  return h("label", { class: "check" }, h("input", { ...box, onchange: (/** @type {any} */ e) => set(e.target.checked) }), text);
};

/** Radio buttons in a row. @param {string} name @param {[string, string][]} options @param {string} chosen @param {(value: string) => any} choose */
export function choice(name, options, chosen, choose) {
  const key = name.toLowerCase();
  const one = (/** @type {string} */ value) => ({
    type: "radio",
    name: key,
    value,
    "data-key": `${key} ${value}`,
    checked: value === chosen,
    onchange: () => choose(value),
  });
  return h(
    "fieldset",
    { class: "choice" },
    h("legend", { class: "unseen" }, name),
    options.map(([value, text]) => h("label", {}, h("input", one(value)), h("span", {}, text))),
  );
}

/** Build an element's children anew; what has the focus keeps it, by its `data-key`, or its successor in `order` does.
 * @param {HTMLElement} element @param {any[]} children */
export function rebuild(element, children) {
  const active = /** @type {HTMLElement} */ (document.activeElement);
  const key = element.contains(active) ? active.dataset.key : undefined;
  const place = key === undefined ? -1 : keyed(element).findIndex((each) => each.dataset.key === key);
  element.replaceChildren(...children.flat().filter(Boolean));
  if (key === undefined) return;
  const now = keyed(element);
  (now.find((each) => each.dataset.key === key) ?? now[Math.min(place, now.length - 1)])?.focus();
}

/** @param {HTMLElement} element @returns {HTMLElement[]} */
const keyed = (element) => [...element.querySelectorAll("[data-key]")].map((each) => /** @type {HTMLElement} */ (each));

/** @param {string} id @returns {any} */ export const byId = (id) => document.getElementById(id);

/** Move what `change` has moved: from where it was to where it is. @param {() => Element[]} elements @param {() => void} change */
export function animated(elements, change) {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const before = new Map(still ? [] : elements().slice(0, 2 * ANIMATED).map((each) => [each, each.getBoundingClientRect()]));
  change();
  if (still) return;
  for (const each of elements().slice(0, ANIMATED)) {
    const now = each.getBoundingClientRect();
    const was = before.get(each);
    if (!was) each.animate({ opacity: [0, 1] }, { duration: 240 });
    else if (was.top !== now.top || was.left !== now.left) {
      const from = `translate(${was.left - now.left}px, ${was.top - now.top}px)`;
      each.animate({ transform: [from, "none"] }, { duration: 320, easing: "cubic-bezier(.2,.7,.2,1)" });
    }
  }
}

/** What belongs to one event or one post lights up together, wherever the pointer or the focus is. */
export function linkHighlights() {
  const light = (/** @type {any} */ { target }) => {
    for (const each of document.querySelectorAll(".lit")) each.classList.remove("lit");
    for (const name of ["event", "post"]) {
      const found = target.closest?.(`[data-${name}]`)?.getAttribute(`data-${name}`);
      if (!found) continue;
      for (const each of document.querySelectorAll(`[data-${name}="${CSS.escape(found)}"]`)) each.classList.add("lit");
    }
  };
  for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, light);
}
