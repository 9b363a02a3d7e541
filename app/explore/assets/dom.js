// Elements without markup: no text of a reply can become HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "rect", "line", "title"]);

/** An element. `on…` are listeners, true and false an attribute without a value, `vars` custom properties of its style. */
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

/** Build an element's children anew; what has the focus keeps it, by its `data-key`, or its successor in `order` does. */
export function rebuild(element, children) {
  const key = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const place = key === undefined ? -1 : keyed(element).findIndex((each) => each.dataset.key === key);
  element.replaceChildren(...children.flat().filter(Boolean));
  if (key === undefined) return;
  const now = keyed(element);
  (now.find((each) => each.dataset.key === key) ?? now[Math.min(place, now.length - 1)])?.focus();
}

const keyed = (element) => [...element.querySelectorAll("[data-key]")];

export const byId = (id) => document.getElementById(id);

/** Move what `change` has moved: from where it was to where it is. */
export function animated(elements, change) {
  const before = new Map(elements().map((each) => [each, each.getBoundingClientRect()]));
  change();
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  for (const each of elements()) {
    const now = each.getBoundingClientRect(),
      was = before.get(each);
    if (!was) each.animate({ opacity: [0, 1] }, { duration: 240 });
    else if (was.top !== now.top || was.left !== now.left) {
      const from = `translate(${was.left - now.left}px, ${was.top - now.top}px)`;
      each.animate({ transform: [from, "none"] }, { duration: 320, easing: "cubic-bezier(.2,.7,.2,1)" });
    }
  }
}
