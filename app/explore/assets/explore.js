// The page: asks the service for scores at each change, for reasons a little later, and keeps the link.

import { call, isPassing, latest } from "./api.js";
import { app } from "./app.js";
import { button, byId, linkHighlights, rebuild } from "./dom.js";
import { draw, drawLists } from "./draw.js";
import { pack, unpack } from "./link.js";
import { Names, number } from "./names.js";
import { listen } from "./past.js";
import { explainSide, lookAt } from "./reasons.js";
import { normal } from "./state.js";
import { withoutExample } from "./stories.js";
import { askForKey, drawTools } from "./tools.js";

const PENDING_MS = 150; // after which it is shown that the service is asked
const LONG_SECONDS = 5; // a wait that is said
const MOST_MS = 2 ** 31 - 1; // of a timer

/** Ask for one side's ranking, and who wrote the posts where the reply does not say it. The reply keeps what it answers.
 * @param {number} side @returns {Promise<{value: Reply, milliseconds: number}>} */
async function ask(side) {
  const sent = app.body(side);
  const asked = await call(app.state.source, sent).catch(async (refused) => {
    if (refused.status === 422) await meet(); // another model may know other actions, or another kind of ids
    throw refused;
  });
  const { model, models } = asked.value;
  if ((model ?? models.ranker).version !== app.info.model.version) await meet();
  Object.assign(asked.value, { sent, weights: sent.weights ?? app.info.weights });
  const isMet = (/** @type {any} */ post) => app.names.posts.has(String(post.post_id));
  if (app.state.source === "recommend" && !asked.value.candidates.every(isMet)) {
    const { weights, ...posts } = sent;
    app.names.learn((await call("retrieve", posts)).value.posts);
  }
  return asked;
}

const rank = latest(async () => {
  clearTimeout(waiting.get(rank));
  const { edits } = app;
  const pending = setTimeout(() => byId("lists").setAttribute("aria-busy", "true"), PENDING_MS);
  try {
    const sides = app.state.sides.map((_, side) => side);
    const asked = await Promise.all(sides.map((side) => (app.held && !side ? { value: app.held, milliseconds: 0 } : ask(side))));
    if (asked.length !== app.state.sides.length) return; // comparing began or ended meanwhile, and asks again
    app.replies = asked.map(({ value }) => value);
    app.told = edits;
    const { value, milliseconds } = asked[app.state.side];
    const { timings_ms: stages, model, models } = value;
    const { name, version } = model ?? models.ranker;
    byId("model").textContent = `${name} ${version}`;
    const served = Object.values(stages).reduce((sum, stage) => sum + stage, 0);
    byId("pace").textContent = `${number(served, 1)} ms in the service, ${number(milliseconds, 0)} ms in all`;
    byId("problem").hidden = true;
    delete document.body.dataset.stale;
    rankedAt = new Date();
    drawLists(app);
    explainSoon(200);
    say();
    document.body.dataset.ranked = String(Number(document.body.dataset.ranked ?? 0) + 1);
  } catch (refused) {
    tell(refused, rank);
  } finally {
    clearTimeout(pending);
    byId("lists").removeAttribute("aria-busy");
  }
});

/** @type {Date | null} */ let rankedAt = null;
/** @type {Map<() => void, number>} */ const waiting = new Map(); // the timer of what is asked again

const explain = latest(async () => {
  for (const side of due) {
    due.delete(side);
    if (app.state.open === null || (app.held && !side) || !app.shown(side).some(({ key }) => key === app.state.open)) continue;
    const again = (/** @type {number} */ seconds) => explainSoon(1000 * seconds, [side]);
    app.explained[side] = await explainSide(app, side, again);
    drawLists(app);
    if (app.attention && (await lookAt(app, side, again))) drawLists(app);
  }
});

/** @type {Set<number>} */ const due = new Set(); // the sides to explain
/** @type {number[]} */ const explaining = []; // the timer of each
function explainSoon(/** @type {number} */ milliseconds, sides = [0, 1]) {
  for (const side of sides) {
    clearTimeout(explaining[side]);
    if (app.state.open !== null) explaining[side] = setTimeout(() => (due.add(side), explain()), milliseconds);
  }
}

/** Show why there is no ranking, mark the list that is old, and ask again where that can help; a refused state can be left.
 * @param {any} refused @param {() => void} again */
function tell(refused, again) {
  const when = rankedAt && byId("lists").childElementCount ? ` The list is the ranking of ${rankedAt.toLocaleTimeString("en-GB")}, and may be out of date.` : "";
  const isAway = isPassing(refused.status);
  const seconds = refused.retryAfter ?? 1;
  const soon = isAway ? ` Trying again${seconds > LONG_SECONDS ? ` in ${seconds} s` : ""}.` : "";
  if (rankedAt) document.body.dataset.stale = "";
  const ways = [
    app.past.back.length > 0 && button("problem-undo", "Undo", () => app.undo()),
    app.carried && button("problem-restart", "Open the start", () => app.tellStory(app.first(), "Opened the start")),
  ];
  problem(`${refused.message}${when}${soon}`, refused.status >= 400 && !isAway ? ways : []);
  if (refused.status === 401) askForKey(again);
  else if (isAway) {
    clearTimeout(waiting.get(again));
    waiting.set(again, setTimeout(again, Math.min(1000 * seconds, MOST_MS)));
  } else if (refused.status === undefined) throw refused;
}

/** @param {string} text @param {any[]} ways out of it */ function problem(text, ways) {
  rebuild(byId("problem"), [text, ...ways]);
  byId("problem").hidden = false;
}

let spoken = 0;
function say() {
  clearTimeout(spoken);
  spoken = setTimeout(() => {
    const posts = app.shown(Math.min(app.state.side, app.replies.length - 1));
    byId("spoken").textContent = posts.length ? `${posts.length} posts. ${byId("caption").textContent} First: ${app.names.post(posts[0])}.` : "No posts.";
  }, 600);
}

let linked = "";
let linking = 0;
function keepLink() {
  clearTimeout(linking);
  linking = setTimeout(async () => {
    linked = `#${await pack(app.state)}`;
    history.replaceState(null, "", linked);
  }, 120);
}

/** The state of the link: a story by its name, or all of a state; the start where there is none, or a broken one, which is said. */
async function restore() {
  const given = location.hash.slice(1);
  const story = given.startsWith("story=") ? given.slice(6) : "";
  byId("notice").hidden = true;
  if (!given || story) {
    if (story && !app.story(story)) notice(`There is no story “${story}” here; this is the start.`);
    return app.tellStory(story && app.story(story) ? story : app.first(), "Opened a story");
  }
  let state;
  try {
    state = await unpack(given, app.info.actions);
  } catch (error) {
    notice(`This link cannot be opened: ${/** @type {Error} */ (error).message}. This is the start.`);
    return app.tellStory(app.first(), "Opened the start");
  }
  if (!app.canRetrieve && state.source === "recommend") {
    notice("This link asks for posts of a corpus, and none is served here; its own posts are ranked.");
    state.source = "rank";
  }
  if (app.state) app.past.keep(app.state, "Opened a link");
  app.state = state;
  return app.reset();
}

function notice(/** @type {string} */ text) {
  rebuild(byId("notice"), [text, button("notice-close", "Close", () => (byId("notice").hidden = true), { class: "quiet" })]);
  byId("notice").hidden = false;
}

/** The request that the API's description shows, with actions that the checkpoint knows. @param {string[]} actions */
async function firstExample(actions) {
  const { value } = await call("openapi.json");
  const [example] = Object.values(value.paths["/rank"].post.requestBody.content["application/json"].examples);
  return withoutExample(/** @type {any} */ (example).value, actions);
}

/** Learn which model answers. Of another one than before all is loaded anew: its names, and what it starts with. No list of the model before is
 * compared with its own, except one that is held. */
const meet = latest(async () => {
  const info = (await call("info")).value;
  if (info.checkpoint.digest === app.info?.checkpoint.digest) {
    app.info = info;
    return;
  }
  const carried = (await call("explore/checkpoint.json")).value;
  const names = new Names(carried.names, info.retrieval?.corpus.topics, info.ids);
  const start = normal(carried.example ?? (await firstExample(info.actions)), info.actions);
  for (const { history, candidates } of [start, ...(app.state?.sides ?? [])]) names.learn([...history, ...candidates]);
  Object.assign(app, { info, carried, names, start, replies: [], explained: [], before: [], edits: [] });
  app.gesture.key = "";
  if (!app.state) return; // the page begins
  if (app.state.story !== "corpus") app.state.story = ""; // it was told of the example before
  notice(`Another model answers now: ${info.model.name} ${info.model.version}. The request is the one from before; its ids may mean nothing here.`);
  draw(app);
});

async function start() {
  try {
    await meet();
    await restore();
    draw(app);
  } catch (refused) {
    tell(refused, start);
  }
}

byId("reset").addEventListener("click", () => {
  app.change("reset", "Reset the weights", (request) => delete request.weights);
  app.gesture.key = "";
});
addEventListener("hashchange", () => {
  if (location.hash !== linked) restore();
});
document.querySelector(".skip")?.addEventListener("click", (event) => {
  event.preventDefault(); // the fragment of the address is the state
  byId("ranking-title").focus();
});
addEventListener("offline", () => tell({ status: 0, message: "This computer is offline." }, rank));
listen(() => app.undo(), () => app.redo());
linkHighlights();
const drawn = { drawTools: () => drawTools(app), askAttention: (/** @type {boolean} */ on) => ((app.attention = on), on && explainSoon(0)) };
const changed = () => {
  keepLink(); // whatever the service answers
  return rank();
};
Object.assign(app, { rank: changed, explainSoon, keepLink, tell, ...drawn });
start();
