// Why a post stands where it stands: the terms of its score, which are exact.

import { h } from "./dom.js";
import { number, percent, words } from "./names.js";

const SHOWN = 7;

/** The panel below a row. */
export function why(post, view, actions, weights) {
  const terms = actions
    .map((name, place) => ({ name, share: post.probabilities[place], weight: weights[name] ?? 0 }))
    .map((term) => ({ ...term, product: term.share * term.weight }))
    .sort((a, b) => Math.abs(b.product) - Math.abs(a.product));
  const rest = terms.slice(SHOWN);
  const largest = Math.abs(terms[0]?.product) || 1;
  const bar = (product) => h("td", { class: "bar" },
    h("span", { class: product < 0 ? "against" : "for", vars: { "--share": Math.abs(product) / largest } }));
  const line = ({ name, share, weight, product }) => h("tr", {}, h("th", { scope: "row" }, words(name)),
    h("td", {}, percent(share)), h("td", {}, `× ${number(weight, 1)}`), h("td", {}, number(product, 3)), bar(product));
  const remaining = rest.reduce((sum, term) => sum + term.product, 0);
  const dwell = Object.entries(post.continuous ?? {}).map(([name, value]) => `${words(name)} ${number(value, 1)}`).join(", ");
  return [
    h("table", {},
      h("caption", {}, "The score: each probability times its weight"),
      h("tbody", {}, terms.slice(0, SHOWN).map(line),
        rest.length > 0 && h("tr", { class: "soft" }, h("th", { scope: "row" }, `${rest.length} others`), h("td"), h("td"), h("td", {}, number(remaining, 3)), bar(remaining))),
      h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "score"), h("td"), h("td"), h("td", {}, number(post.score, 3)), h("td", { class: "soft" }, dwell)))),
  ];
}
