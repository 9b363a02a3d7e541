// Where the model looked for one post: a small picture for each head of each layer, and the mask, who may see whom.

import { h } from "./dom.js";

const WIDE = 148;
const HIGH = 30;
const MASK = 132;

/** Closed until it is opened, since it is another question. @param {Shown} post @param {Explained} explained @param {View} view */
export function drawAttention(post, explained, view) {
  const looked = explained.looked?.post === post.own ? explained.looked : null;
  const asked = (/** @type {any} */ { target }) => target.open !== !!view.attention && view.askAttention(target.open);
  return h(
    "details",
    { class: "attention", open: !!view.attention, ontoggle: asked },
    h("summary", {}, "Where the model looked: each head of each layer, and the mask"),
    view.attention && (looked ? pictures(looked, explained, view) : h("p", { class: "soft" }, looked === null && explained.message ? explained.message : "Asking…")),
  );
}

/** @param {{heads: number[][][], user: number[][], itself: number[][]}} looked @param {Explained} explained @param {View} view */
function pictures({ heads, user, itself }, { places, history }, view) {
  const most = Math.max(...heads.flat(2), ...user.flat(), ...itself.flat(), 1e-9);
  const name = (/** @type {number} */ at) => (at < 0 ? "the user" : at < places.length ? `event ${places[at] + 1}, ${view.names.post(history[places[at]])}` : "the post itself");
  const one = (/** @type {number} */ layer, /** @type {number} */ head) => {
    const shares = [user[layer][head], ...heads[layer][head], itself[layer][head]];
    const width = WIDE / shares.length;
    const top = shares.indexOf(Math.max(...shares));
    const bars = shares.map((share, at) =>
      h("rect", {
        x: at * width, width: Math.max(1, width - 1), y: HIGH - (HIGH * share) / most, height: (HIGH * share) / most,
        class: at === 0 ? "user" : at === shares.length - 1 ? "itself" : "for", "data-event": places[at - 1],
      }, h("title", {}, `${name(at - 1)}: ${(100 * share).toFixed(1)} %`)),
    );
    const label = `Layer ${layer}, head ${head}: most on ${name(top - 1)}, ${(100 * shares[top]).toFixed(0)} %`;
    const lines = [1, shares.length - 1].map((at) => h("line", { x1: at * width - 0.5, x2: at * width - 0.5, y1: 0, y2: HIGH }));
    return h("figure", {}, h("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": label }, bars, lines), h("figcaption", { class: "soft" }, `layer ${layer}, head ${head}`));
  };
  const grid = heads.map((layer, at) => layer.map((_, head) => one(at, head))).flat();
  return h(
    "div",
    {},
    h("p", { class: "soft" }, `From left to right: the user, the events between the lines (oldest first), and the post itself. All have the same scale; the highest is ${(100 * most).toFixed(0)} %.`),
    h("div", { class: "heads-grid", vars: { "--heads": heads[0].length } }, grid),
    mask(1 + places.length, view.count, view.slot),
  );
}

/** Who may see whom: the context its past, a post the whole context and itself, never another post.
 * @param {number} context @param {number} posts @param {number} chosen */
function mask(context, posts, chosen) {
  const drawn = Math.min(posts, 24);
  const size = MASK / (context + drawn);
  const box = (/** @type {number} */ x, /** @type {number} */ y, /** @type {number} */ w, /** @type {number} */ t, kind = "sees") =>
    h("rect", { x: x * size, y: y * size, width: w * size, height: t * size, class: kind });
  const past = Array.from({ length: context }, (_, at) => box(0, at, at + 1, 1));
  const itself = Array.from({ length: drawn }, (_, at) => box(context + at, context + at, 1, 1));
  const row = chosen < drawn ? [box(0, context + chosen, context, 1, "chosen"), box(context + chosen, context + chosen, 1, 1, "chosen")] : [];
  const label = `The mask: ${context} tokens of user and history see their past; each of ${posts} posts sees all of these and itself, no other post`;
  const edge = context * size;
  const lines = [h("line", { x1: edge, x2: edge, y1: 0, y2: MASK }), h("line", { x1: 0, x2: MASK, y1: edge, y2: edge })];
  return h(
    "figure",
    { class: "mask" },
    h("svg", { viewBox: `0 0 ${MASK} ${MASK}`, role: "img", "aria-label": label }, past, box(0, context, context, drawn), itself, row, lines),
    h("figcaption", { class: "soft" }, `${label}. Each row looks at the marked columns; the dark row is this post. Move a post in “The posts to rank”: no other score changes a bit.`),
  );
}
