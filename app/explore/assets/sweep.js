// Ranks against one weight: a score is linear in it, so each swap of two posts has one exact place.

import { byId, button, h } from "./dom.js";
import { many, number, words } from "./names.js";

const MOST = 24; // posts
const [WIDE, ROW, LEFT, RIGHT, FOOT] = [640, 22, 22, 150, 34];

/** The ranks of posts for a weight between `from` and `to`: where neighbours swap, and the order in each stretch.
 * @param {{score: number, share: number}[]} posts @param {number} weight @param {number} from @param {number} to */
function swaps(posts, weight, from, to) {
  const at = (/** @type {typeof posts[0]} */ post, /** @type {number} */ x) => post.score + post.share * (x - weight);
  const crossings = new Set();
  posts.forEach((one, place) => {
    for (const other of posts.slice(place + 1)) {
      const x = weight + (other.score - one.score) / (one.share - other.share);
      if (x > from && x < to) crossings.add(x);
    }
  });
  const edges = [from, ...[...crossings].sort((a, b) => a - b), to];
  const stretches = edges.slice(1).map((end, step) => {
    const middle = (edges[step] + end) / 2;
    const order = posts.map((post, place) => ({ place, score: at(post, middle) })).sort((a, b) => b.score - a.score || a.place - b.place);
    return { from: edges[step], to: end, ranks: order.reduce((ranks, { place }, rank) => ((ranks[place] = rank), ranks), /** @type {number[]} */ ([])) };
  });
  return { stretches, marks: edges.slice(1, -1) };
}

/** Draw the sweep that is open, or hide it. @param {App} app */
export function drawSweep(app) {
  const name = app.sweep;
  const reply = app.replies[app.state.side];
  const column = reply?.actions.indexOf(name) ?? -1;
  byId("sweep").hidden = column < 0;
  if (column < 0) return;
  const shown = app.shown(app.state.side).slice(0, MOST);
  const weight = reply.weights[name] ?? 0;
  const far = Math.max(5, 2 * Math.abs(weight));
  const { stretches, marks } = swaps(shown.map(({ score, probabilities }) => ({ score, share: probabilities[column] })), weight, -far, far);
  const x = (/** @type {number} */ value) => LEFT + ((value + far) / (2 * far)) * (WIDE - LEFT - RIGHT);
  const y = (/** @type {number} */ rank) => 12 + rank * ROW;
  const high = y(shown.length - 1) + FOOT;
  const lines = shown.map((post, place) => {
    const path = stretches.map(({ from, to, ranks }, step) => `${step ? "L" : "M"}${x(from)} ${y(ranks[place])}L${x(to)} ${y(ranks[place])}`).join("");
    return h("path", { d: path, "data-post": post.post_id }, h("title", {}, app.names.post(post)));
  });
  const last = stretches[stretches.length - 1].ranks;
  const labels = shown.map((post, place) => h("text", { x: WIDE - RIGHT + 6, y: y(last[place]) + 4, "data-post": post.post_id }, app.names.post(post)));
  const ranks = shown.map((_, rank) => h("text", { x: 4, y: y(rank) + 4, class: "tick" }, String(rank + 1)));
  const dots = marks.map((mark) => h("line", { class: "mark", x1: x(mark), x2: x(mark), y1: high - FOOT + 10, y2: high - FOOT + 18 }));
  const ticks = [-far, 0, far].map((value) => h("text", { x: x(value), y: high - 2, class: "tick middle" }, number(value, 1)));
  const now = h("line", { class: "net", x1: x(weight), x2: x(weight), y1: 0, y2: high - FOOT + 18 });
  const said = `Rank against the weight of ${words(name)}, from ${number(-far, 1)} to ${number(far, 1)}: ${many(marks.length, "swap")}`;
  byId("sweep").replaceChildren(
    h("div", { class: "bar" }, h("h2", {}, said), button("sweep-close", "Close", () => app.openSweep(""), { class: "quiet" })),
    h("svg", { viewBox: `0 0 ${WIDE} ${high}`, role: "img", "aria-label": said }, lines, labels, ranks, dots, ticks, now),
    h("p", { class: "soft" }, `Rank from top to bottom, the weight from left to right; the dark line is the weight now, ${number(weight)}, and short lines are swaps. Computed here: a score is the sum of weight × probability.${nearest(marks, weight)}`),
  );
}

function nearest(/** @type {number[]} */ marks, /** @type {number} */ weight) {
  const best = [...marks].sort((a, b) => Math.abs(a - weight) - Math.abs(b - weight))[0];
  return best === undefined ? " Nothing swaps in this range." : ` The nearest swap is at ${number(best, 3)}.`;
}
