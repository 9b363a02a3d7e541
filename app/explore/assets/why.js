// Why a post stands where it stands: the terms of its score, which are exact, and what /explain says.

import { h } from "./dom.js";
import { number, percent, words } from "./names.js";

const SHOWN = 7;
const NOTE =
  "Each change is the score with this one thing less the score without it; “all at once” leaves out user and history, and “not covered” is what the others lack to it. Attention is where the model looked, not what moved the score.";

/** The panels below a row. */
export function why(post, view) {
  const { explained } = view;
  if (explained?.post !== post.post_id) return [terms(post, view)];
  if (explained.message) return [terms(post, view), h("p", { class: "soft" }, `No explanation: ${explained.message}`)];
  return [terms(post, view), reasons(explained, view), h("p", { class: "soft" }, NOTE)];
}

/** Each probability times its weight. */
function terms(post, { actions, weights }) {
  const all = actions
    .map((name, place) => ({ name, share: post.probabilities[place], weight: weights[name] ?? 0 }))
    .map((term) => ({ ...term, value: term.share * term.weight }))
    .sort(bySize);
  const rest = all.slice(SHOWN),
    largest = Math.abs(all[0]?.value) || 1;
  return h(
    "table",
    { class: "terms" },
    h("caption", {}, "The score: each probability times its weight"),
    h(
      "tbody",
      {},
      all
        .slice(0, SHOWN)
        .map(({ name, share, weight, value }) =>
          line(words(name), [percent(share), `× ${number(weight, 1)}`], value, largest),
        ),
      rest.length > 0 && line(`${rest.length} others`, ["", ""], sum(rest), largest, "soft"),
    ),
    h(
      "tfoot",
      {},
      line("score", ["", ""], post.score, 0),
      Object.entries(post.continuous ?? {}).map(([name, value]) =>
        h(
          "tr",
          { class: "soft" },
          h("th", { scope: "row" }, words(name)),
          h("td"),
          h("td"),
          h("td", {}, number(value, 1)),
          h("td"),
        ),
      ),
    ),
  );
}

/** What each event and the user change, beside how much attention they get. */
function reasons({ history, reply }, { names }) {
  const { change, attention } = reply.candidates[0];
  const looked = (rows) => mean(rows.map(mean));
  const events = reply.events.place
    .map((place, at) => ({
      name: names.author(history[place].author_id),
      about: (Array.isArray(history[place].actions) ? history[place].actions : Object.keys(history[place].actions))
        .map(words)
        .join(", "),
      value: change.events.score[at],
      share: mean(attention.events.map((layer) => layer[at])),
    }))
    .sort(bySize);
  const rest = events.slice(SHOWN),
    user = change.user.score;
  const largest = Math.max(Math.abs(events[0]?.value ?? 0), Math.abs(user), Math.abs(change.not_covered.score)) || 1;
  return h(
    "table",
    { class: "reasons" },
    h("caption", {}, "What moved the score, and what the model looked at"),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        ["", "", "attention", "change", ""].map((text) => (text ? h("th", { scope: "col" }, text) : h("td"))),
      ),
    ),
    h(
      "tbody",
      {},
      line("the user", ["", percent(looked(attention.user))], user, largest),
      events
        .slice(0, SHOWN)
        .map(({ name, about, value, share }) =>
          line(name, [h("span", { class: "soft about" }, about), percent(share)], value, largest),
        ),
      rest.length > 0 &&
        line(
          `${rest.length} more events`,
          ["", percent(rest.reduce((total, { share }) => total + share, 0))],
          sum(rest),
          largest,
          "soft",
        ),
      h(
        "tr",
        { class: "soft" },
        h("th", { scope: "row" }, "the post itself"),
        h("td"),
        h("td", {}, percent(looked(attention.itself))),
        h("td"),
        h("td"),
      ),
      line("not covered", ["", ""], change.not_covered.score, largest, "soft"),
    ),
    h("tfoot", {}, line("all at once", ["", ""], change.everything.score, 0)),
  );
}

function line(name, cells, value, largest, kind = "") {
  const bar = h("span", {
    class: value < 0 ? "against" : "for",
    vars: { "--share": Math.min(1, Math.abs(value) / largest) },
  });
  return h(
    "tr",
    { class: kind },
    h("th", { scope: "row" }, name),
    cells.map((cell) => h("td", {}, cell)),
    h("td", {}, number(value, 3)),
    h("td", { class: "bar" }, largest > 0 && bar),
  );
}

const bySize = (a, b) => Math.abs(b.value) - Math.abs(a.value);
const sum = (all) => all.reduce((total, { value }) => total + value, 0);
const mean = (values) => values.reduce((total, value) => total + value, 0) / values.length;
