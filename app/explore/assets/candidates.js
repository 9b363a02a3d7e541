// The posts of the request: whose, how old, in which order. No score may depend on the order, and the page shows that none does.

import { byId, button, h, rebuild } from "./dom.js";
import { short } from "./names.js";
import { withKeys } from "./state.js";
import { authorChoice } from "./timeline.js";

const MOST = 40; // rows; more are edited as JSON
let dragged = -1;

export function drawCandidates(/** @type {App} */ app) {
  const { request, state } = app;
  const posts = byId("posts");
  posts.hidden = state.source !== "rank";
  if (posts.hidden) return;
  byId("posts-title").textContent = `The posts to rank (${request.candidates.length})`;
  const scores = new Map(app.posts().map((post) => [post.key, post.score]));
  const before = new Map([...(app.before[state.side]?.values() ?? [])].map((post) => [post.key, post.score]));
  const rows = withKeys(request.candidates.slice(0, MOST)).map((post, place) => drawPost(app, post, place, scores.get(post.key), before.get(post.key)));
  rebuild(byId("candidates"), rows);
  const add = () => app.addCandidate();
  rebuild(byId("candidates-more"), [
    request.candidates.length > MOST && h("p", { class: "soft" }, `${request.candidates.length - MOST} more: edit them as JSON, by “Request…”.`),
    button("add post", "Add a post", add),
  ]);
}

/** @param {App} app @param {Post & {key: string}} post @param {number} place @param {number | undefined} score @param {number | undefined} was */
function drawPost(app, post, place, score, was) {
  const { request, names } = app;
  const who = names.post(post);
  const key = `post ${post.key}`;
  const edit = (/** @type {string} */ label, /** @type {(post: Post) => void} */ change) =>
    app.change(key, label, (/** @type {Side} */ changed) => change(changed.candidates[place]));
  const hours = request.impression_ts && post.created_at ? Math.round((request.impression_ts - post.created_at) / 3600) : "";
  const older = (/** @type {any} */ { target }) =>
    edit(`Changed the age of ${who}'s post`, (each) => {
      each.created_at = target.value === "" ? 0 : Math.max(1, (request.impression_ts ?? 0) - 3600 * Number(target.value));
    });
  const move = (/** @type {number} */ to) => app.moveCandidate(place, to);
  const same = was === undefined || score === undefined ? "" : was === score ? "same bits as before" : "changed";
  return h(
    "li",
    {
      draggable: "true", "data-post": post.post_id,
      ondragstart: (/** @type {any} */ event) => ((dragged = place), event.dataTransfer.setData("text/plain", post.post_id)),
      ondragover: (/** @type {any} */ event) => event.preventDefault(),
      ondrop: (/** @type {any} */ event) => (event.preventDefault(), dragged >= 0 && app.moveCandidate(dragged, place)),
    },
    h("span", { class: "grip soft", "aria-hidden": "true", title: "drag it" }, "⠿"),
    authorChoice(app, `${key} author`, `Author of post ${short(post.post_id)}`, post.author_id, (id) =>
      edit(`Gave ${who}'s post another author`, (each) => (each.author_id = id))),
    h("label", { class: "soft" }, h("input", { type: "number", value: hours, disabled: !request.impression_ts, "data-key": `${key} age`, "aria-label": `Hours since the post of ${who}`, onchange: older }), " h old"),
    names.coded(post) && h("span", { class: "soft number" }, names.coded(post)),
    button(`${key} up`, "↑", () => move(place - 1), { class: "quiet", "aria-label": `Move the post of ${who} up`, disabled: place === 0 }),
    button(`${key} down`, "↓", () => move(place + 1), { class: "quiet", "aria-label": `Move the post of ${who} down`, disabled: place === request.candidates.length - 1 }),
    button(`${key} remove`, "×", () => app.removeCandidate(place), { class: "quiet", "aria-label": `Remove the post of ${who}`, disabled: request.candidates.length < 2 }),
    h("code", { class: "number soft" }, score === undefined ? "" : String(score), same && h("span", { class: same === "changed" ? "against" : "up" }, ` ${same}`)),
  );
}
