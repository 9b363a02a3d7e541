// Events × posts: what each event, each group of them and the user change in each post's score.

import { byId, h } from "./dom.js";
import { signed, taken } from "./names.js";

/** Draw the map of one side, or hide it. @param {App} app */
export function drawHeat(app) {
  const side = app.state.side;
  const explained = app.explained[side];
  const posts = explained && app.shown(side).filter(({ own }) => explained.of.has(own));
  byId("map").hidden = app.state.open === null || !posts?.length;
  if (byId("map").hidden || !explained || !posts) return;
  const { names } = app;
  const change = (/** @type {Shown} */ post) => explained.of.get(post.own).change;
  const events = explained.places.map((place, at) => ({
    title: `${place + 1} · ${names.post(explained.history[place])}`,
    about: taken(explained.history[place].actions),
    values: posts.map((post) => change(post).events.score[at]),
    more: { "data-event": place },
  })).reverse();
  const wholes = explained.groups.map(({ name, changes }) => ({
    title: name, about: "left out at once", values: posts.map(({ own }) => changes.get(own) ?? 0), more: { class: "group" },
  }));
  const one = (/** @type {string} */ name, /** @type {string} */ title) =>
    ({ title, about: "", values: posts.map((post) => change(post)[name].score), more: { class: "group" } });
  const rest = [one("user", "the user"), one("everything", "all at once"), one("not_covered", "not covered")];
  const largest = Math.max(...events.flatMap(({ values }) => values.map(Math.abs)), 1e-9);
  const heads = posts.map((post) => h("th", { scope: "col", "data-post": post.post_id }, `${post.place} ${names.post(post)}`));
  const table = h(
    "table",
    { class: "heat" },
    h("thead", {}, h("tr", {}, h("td"), heads)),
    h("tbody", {}, [...events, ...wholes, ...rest].map((row) => drawRow(row, posts, largest))),
  );
  byId("heat").replaceChildren(table);
  byId("heat-note").textContent =
    `Each cell is the score of the post above with this event, minus its score without it. Blue raised it, red lowered it; the darkest is ${largest.toFixed(3)}. ` +
    "Newest event first; the numbers are those of the history.";
}

/** @param {{title: string, about: string, values: number[], more: Record<string, any>}} row @param {Shown[]} posts @param {number} largest */
function drawRow({ title, about, values, more }, posts, largest) {
  const cell = (/** @type {number} */ value, /** @type {number} */ at) =>
    h("td", { class: value < 0 ? "minus" : "plus", "data-post": posts[at].post_id, vars: { "--share": Math.min(1, Math.abs(value) / largest) } }, signed(value));
  return h("tr", more, h("th", { scope: "row" }, title, about && h("span", { class: "soft" }, ` ${about}`)), values.map(cell));
}
