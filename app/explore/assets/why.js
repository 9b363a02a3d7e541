// Why a post stands where it stands: the terms of its score, what sets it apart from the next one, and what /explain says.

import { drawAttention } from "./attention.js";
import { h } from "./dom.js";
import { meaning, number, ordinal, percent, signed, taken, words } from "./names.js";

const SHOWN = 7;
const MUCH = 0.3; // of all at once that is not covered, from which on it is said
const NOTE =
  "Each change is the score with this one thing minus the score without it. “All at once” leaves out user and history; “not covered” is the part of it that the other changes do not account for. Attention is where the model looked, not what moved the score.";

/** The panels below a row. @param {Shown} post @param {View} view @returns {any[]} */
export function details(post, view) {
  const { explained } = view;
  const score = [terms(post, view), next(post, view)].filter(Boolean);
  if (explained?.message && !explained.of.size) return [...score, h("p", { class: "soft" }, `No explanation: ${explained.message}`)];
  const found = explained?.of.get(post.own);
  if (!explained || !found) return [...score, h("p", { class: "soft" }, "Asking why…")];
  const rest = [reasons(found, explained, view), groups(post, explained), explained.refused && h("p", { class: "soft" }, explained.refused), drawAttention(post, explained, view)];
  return [warning(found), ...score, ...rest, h("p", { class: "soft" }, NOTE)].filter(Boolean);
}

/** @param {any} found */ function warning({ change }) {
  const share = Math.abs(change.not_covered.score) / (Math.abs(change.everything.score) || 1);
  if (share <= MUCH) return null;
  return h(
    "p",
    { class: "warning", role: "note" },
    `${Math.round(100 * share)} % of what user and history do together is not covered by leaving out one thing at a time, because events carry the same information. `,
    "Do not read the rows as parts of a whole; the groups below leave out several at once.",
  );
}

/** Each probability times its weight. @param {Shown} post @param {View} view */
const contributions = (post, { actions, weights }) =>
  actions.map((name, place) => {
    const [share, weight] = [post.probabilities[place], weights[name] ?? 0];
    return { name, share, weight, value: share * weight };
  });

function terms(/** @type {Shown} */ post, /** @type {View} */ view) {
  const all = contributions(post, view).sort(bySize);
  const rest = all.slice(SHOWN);
  const largest = Math.abs(all[0]?.value) || 1;
  const one = (/** @type {(typeof all)[0]} */ { name, share, weight, value }) =>
    line(h("span", { title: meaning(name) }, words(name)), [percent(share), `× ${number(weight, 1)}`], value, largest);
  const more = Object.entries(post.continuous ?? {}).map(([name, value]) =>
    h("tr", { class: "soft" }, h("th", { scope: "row" }, words(name)), h("td"), h("td"), h("td", {}, number(value, 1)), h("td")),
  );
  return table("terms", "The score: each probability times its weight", null, [
    ...all.slice(0, SHOWN).map(one),
    rest.length > 0 && line(`${rest.length} others`, ["", ""], sum(rest), largest, "soft"),
  ], [line("score", ["", ""], post.score, 0), ...more]);
}

/** Why above the next one: the same terms of both, subtracted. @param {Shown} post @param {View} view */
function next(post, view) {
  const below = view.next;
  if (!below) return null;
  const theirs = contributions(below, view);
  const all = contributions(post, view).map((term, at) => ({ name: term.name, value: term.value - theirs[at].value })).sort(bySize);
  const rest = all.slice(SHOWN - 2);
  const largest = Math.abs(all[0]?.value) || 1;
  const who = view.names.post(below);
  return table("next", `Why above ${who}, the ${ordinal(below.place)}: terms of this score less those of the next`, null, [
    ...all.slice(0, SHOWN - 2).map(({ name, value }) => line(words(name), [], value, largest)),
    rest.length > 0 && line(`${rest.length} others`, [], sum(rest), largest, "soft"),
  ], [line("ahead by", [], post.score - below.score, 0), ...aheadBy(post, below, view)]);
}

/** The events and the user that set two posts apart most. @param {Shown} post @param {Shown} below @param {View} view */
function aheadBy(post, below, { explained, names }) {
  const [mine, theirs] = [post, below].map(({ own }) => explained?.of.get(own)?.change);
  if (!mine || !theirs || !explained) return [];
  const all = explained.places.map((place, at) => ({
    name: `${place + 1} · ${names.post(explained.history[place])}`,
    place,
    value: mine.events.score[at] - theirs.events.score[at],
  }));
  const user = { name: "the user", place: -1, value: mine.user.score - theirs.user.score };
  return [user, ...all].sort(bySize).slice(0, 2).map(({ name, place, value }) =>
    h("tr", { class: "soft", "data-event": place < 0 ? null : place }, h("th", { scope: "row" }, `largest difference: ${name}`), h("td", {}, signed(value, 3)), h("td")),
  );
}

/** What each event and the user change, beside how much attention they get. @param {any} found @param {Explained} explained @param {View} view */
function reasons({ change, attention }, { history, places }, { names }) {
  const looked = (/** @type {number[][]} */ rows) => mean(rows.map(mean));
  const events = places.map((place, at) => ({
    place,
    name: `${place + 1} · ${names.post(history[place])}`,
    about: taken(history[place].actions),
    value: change.events.score[at],
    share: mean(attention.events.map((/** @type {number[]} */ layer) => layer[at])),
  })).sort(bySize);
  const rest = events.slice(SHOWN);
  const user = change.user.score;
  const largest = Math.max(Math.abs(events[0]?.value ?? 0), Math.abs(user), Math.abs(change.not_covered.score)) || 1;
  const others = rest.reduce((total, { share }) => total + share, 0);
  return table("reasons", "What moved the score, and what the model looked at", ["", "", "attention", "change", ""], [
    line("the user", ["", percent(looked(attention.user))], user, largest),
    ...events.slice(0, SHOWN).map(({ name, about, value, share, place }) =>
      line(name, [h("span", { class: "soft" }, about), percent(share)], value, largest, "", { "data-event": place })),
    rest.length > 0 && line(`${rest.length} more events`, ["", percent(others)], sum(rest), largest, "soft"),
    h("tr", { class: "soft" }, h("th", { scope: "row" }, "the post itself"), h("td"), h("td", {}, percent(looked(attention.itself))), h("td"), h("td")),
    line("not covered", ["", ""], change.not_covered.score, largest, "soft"),
  ], [line("all at once", ["", ""], change.everything.score, 0)]);
}

/** Several events left out at once, each by a request of its own. @param {Shown} post @param {Explained} explained */
function groups(post, { groups: all }) {
  if (!all.length) return null;
  const rows = all.map(({ name, changes, places }) => ({ name, places, value: changes.get(post.own) ?? 0 }));
  const largest = Math.max(...rows.map(({ value }) => Math.abs(value))) || 1;
  const shown = rows.map(({ name, places, value }) => line(name, [`${places.length} events`], value, largest));
  return table("groups", "Several events left out at once", null, shown, []);
}

function table(/** @type {string} */ kind, /** @type {string} */ title, /** @type {string[] | null} */ heads, /** @type {any[]} */ rows, /** @type {any[]} */ foot) {
  const head = heads && h("thead", {}, h("tr", {}, heads.map((text) => (text ? h("th", { scope: "col" }, text) : h("td")))));
  return h("table", { class: kind }, h("caption", {}, title), head, h("tbody", {}, rows), h("tfoot", {}, foot));
}

/** @param {any} name @param {any[]} cells @param {number} value @param {number} largest @param {Record<string, any>} more */
function line(name, cells, value, largest, kind = "", more = {}) {
  const share = Math.min(1, Math.abs(value) / largest);
  const bar = h("span", { class: value < 0 ? "against" : "for", vars: { "--share": share } });
  const texts = cells.map((cell) => h("td", {}, cell));
  return h("tr", { class: kind, ...more }, h("th", { scope: "row" }, name), texts, h("td", {}, number(value, 3)), h("td", { class: "bar" }, largest > 0 && bar));
}

const bySize = (/** @type {{value: number}} */ a, /** @type {{value: number}} */ b) => Math.abs(b.value) - Math.abs(a.value);
const sum = (/** @type {{value: number}[]} */ all) => all.reduce((total, { value }) => total + value, 0);
const mean = (/** @type {number[]} */ values) => values.reduce((total, value) => total + value, 0) / values.length;
