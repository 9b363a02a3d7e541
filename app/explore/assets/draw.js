// Draws the state: the lists with what an edit did to them, and everything around them.

import { byId } from "./dom.js";
import { drawCandidates } from "./candidates.js";
import { agreement, caption, kept } from "./changes.js";
import { drawHeat } from "./heat.js";
import { drawLevers } from "./levers.js";
import { number, words } from "./names.js";
import { balance, RankedList } from "./ranking.js";
import { drawSweep } from "./sweep.js";
import { drawTimeline } from "./timeline.js";
import { drawSource, drawStory, drawTools } from "./tools.js";

/** @type {RankedList[]} */ const lists = []; // of A, and of B

/** All that is edited. @param {App} app */
export function draw(app) {
  for (const part of [drawTools, drawStory, drawSource, drawTimeline, drawCandidates, drawLevers]) part(app);
}

/** The lists, and what is seen in them. @param {App} app */
export function drawLists(app) {
  const { state, replies } = app;
  if (!replies.length) return;
  const hold = heldInSight(byId("sweep"));
  const views = replies.map((reply, side) => ({ reply, side, posts: app.shown(side) }));
  const two = views.length === 2;
  const sums = views.flatMap(({ posts, reply }) => posts.map((post) => balance(post, reply.actions, reply.weights)));
  const reach = { gain: Math.max(...sums.map(({ gain }) => gain), 1e-9), loss: Math.max(...sums.map(({ loss }) => loss), 1e-9) };
  while (lists.length < views.length) lists.push(new RankedList((what, post) => pressed(app, what, post)));
  byId("lists").className = two ? "two" : "";
  lists.forEach(({ element }, side) => (side < views.length ? element.isConnected || byId("lists").append(element) : element.remove()));
  for (const { reply, side, posts } of views) {
    const before = two && side ? kept(views[0].posts) : app.before[side];
    const place = posts.findIndex(({ key }) => key === state.open);
    lists[side].show(two ? title(app, side) : "", posts, {
      ...{ names: app.names, disliked: app.negative[0], actions: reply.actions, weights: reply.weights, reach, before },
      ...{ impression: reply.sent.impression_ts, open: state.open, explained: app.explained[side], next: posts[place + 1] },
      ...{ attention: app.attention, askAttention: (/** @type {boolean} */ on) => app.askAttention(on) },
      ...{ count: posts.length, slot: reply.sent.candidates ? (posts[place]?.slot ?? -1) : place },
    });
  }
  byId("skeleton")?.remove();
  say(app, views);
  const { posts, reply } = views[Math.min(state.side, views.length - 1)];
  byId("legend").textContent =
    (posts.length < reply.candidates.length ? `${posts.length} authors of ${reply.candidates.length} posts. ` : "") +
    `Small bars: the probabilities of ${reply.actions.map(words).join(", ")}, by their square roots. ` +
    `Blue counts for a post and red against it, from ${number(-reach.loss, 1)} to ${number(reach.gain, 1)}; the mark is the score that is left.`;
  drawHeat(app);
  drawSweep(app);
  drawCandidates(app);
  hold();
}

/** Keeps a part of the page where it is on the screen, if it is in sight, when what is above it grows: reasons come later than their row opens.
 * @param {HTMLElement} part @returns {() => void} to call after drawing */
function heldInSight(part) {
  const { top, bottom } = part.getBoundingClientRect();
  const isInSight = !part.hidden && top < innerHeight && bottom > 0;
  return () => isInSight && scrollBy(0, part.getBoundingClientRect().top - top);
}

function pressed(/** @type {App} */ app, /** @type {string} */ what, /** @type {Shown} */ post) {
  const side = lists.findIndex((list) => list.rows.get(post.key)?.post === post);
  if (what !== "why") app.state.side = Math.min(Math.max(side, 0), app.state.sides.length - 1);
  app.act(what, post);
}

function title(/** @type {App} */ app, /** @type {number} */ side) {
  const reply = app.replies[side];
  const model = reply.model ?? reply.models.ranker;
  return `${"AB"[side]} · ${model.name} ${model.version}${app.held && !side ? ", held" : ""}`;
}

/** What the last edit did, with those before it that had no reply, or how far the lists agree. @param {App} app @param {{posts: Shown[], side: number}[]} views */
function say(app, views) {
  const side = Math.min(app.state.side, views.length - 1);
  const before = app.before[side];
  const did = app.told.length && before ? caption(app.told, before, views[side].posts, app.names) : "";
  const agree = views.length === 2 ? agreement(views[0].posts, views[1].posts) : null;
  const two = agree && `A and B agree by τ = ${number(agree.tau)} over ${agree.shared} posts; ${agree.same} of the first ${agree.first} are in both. Arrows in B: from its place in A.`;
  byId("caption").textContent = [did, two].filter(Boolean).join(" ") || "Change anything: this line says what it did.";
}
