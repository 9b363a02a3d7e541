// The page: asks the service for scores at each change, for reasons a little later, and keeps the link.

import { call, latest } from "./api.js";
import { app } from "./app.js";
import { byId } from "./dom.js";
import { Names, number } from "./names.js";
import { body, FOR_RETRIEVAL, lists, normal, pack, unpack } from "./state.js";
import { askForKey } from "./tools.js";

/** Ask for one side's ranking, and who wrote the posts where the reply does not say it. The reply keeps what it answers. */
async function ask(side) {
  const sent = body(app.state, side);
  const asked = await call(app.state.source, sent, app.state.versions[side]);
  const { model, models } = asked.value;
  const { version } = model ?? models.ranker;
  if (!app.versions.includes(version)) {
    app.info = (await call("info")).value;
    app.draw();
  }
  Object.assign(asked.value, { sent, version, weights: app.weights(sent, version) });
  if (
    app.state.source === "recommend" &&
    asked.value.candidates.some((post) => !app.names.posts.has(String(post.post_id)))
  ) {
    const { weights, ...posts } = sent;
    app.names.learn((await call("retrieve", posts)).value.posts);
  }
  return asked;
}

const rank = latest(async () => {
  try {
    const sides = [...Array(lists(app.state)).keys()];
    const asked = await Promise.all(
      sides.map((side) => (app.held && !side ? { value: app.held, milliseconds: 0 } : ask(side))),
    );
    if (asked.length !== lists(app.state)) return; // comparing began or ended meanwhile, and asks again
    app.replies = asked.map(({ value }) => value);
    const { value, milliseconds } = asked[app.state.side];
    const { timings_ms: stages, model, models, version } = value;
    byId("model").textContent = `${(model ?? models.ranker).name} ${version}`;
    const served = Object.values(stages).reduce((sum, stage) => sum + stage, 0);
    byId("pace").textContent = `${number(served, 1)} ms in the service, ${number(milliseconds, 0)} ms in all`;
    byId("problem").hidden = true;
    app.drawLists();
    explainSoon(200);
    say();
    keepLink();
    document.body.dataset.ranked = Number(document.body.dataset.ranked ?? 0) + 1;
  } catch (refused) {
    tell(refused, rank);
  }
});

/** Ask why the open row's post stands where it stands: of that post alone where it is of the corpus, since its scores are its own. */
const explain = latest(async () => {
  for (const side of app.replies.keys()) {
    const post = app.shown(side).find(({ key }) => key === app.state.open);
    if (!post || (app.held && !side)) continue;
    const { sent } = app.replies[side];
    const { post_id, author_id, created_at = 0 } = post;
    const candidates = sent.candidates ?? [{ post_id, author_id, created_at }];
    const question = Object.entries({ ...sent, candidates, explain: [post_id] }).filter(
      ([name]) => !FOR_RETRIEVAL.includes(name),
    );
    try {
      const { value } = await call("explain", Object.fromEntries(question), app.replies[side].version);
      app.explained[side] = { post: post_id, history: sent.history, reply: value };
    } catch (refused) {
      app.explained[side] = { post: post_id, message: refused.message };
      if (refused.status === 429) explainSoon(1000 * (refused.retryAfter ?? 1));
    }
    app.drawLists();
  }
});

let explaining = 0;
function explainSoon(milliseconds) {
  clearTimeout(explaining);
  if (app.state.open !== null) explaining = setTimeout(explain, milliseconds);
}

/** Show why there is no ranking, and ask again where that can help. */
function tell(refused, again) {
  byId("problem").textContent = refused.message;
  byId("problem").hidden = false;
  if (refused.status === 401) askForKey(again);
  else if ([0, 429, 503].includes(refused.status)) setTimeout(again, 1000 * Math.min(refused.retryAfter ?? 1, 5));
  else if (refused.status === undefined) throw refused;
}

let spoken = 0;
function say() {
  clearTimeout(spoken);
  spoken = setTimeout(() => {
    const posts = app.shown(app.state.side);
    const before = app.before[app.state.side];
    const moved = posts.filter(({ key, place }) => before && before.get(key) !== place).length;
    byId("spoken").textContent = posts.length
      ? `${posts.length} posts, ${moved} moved. First: ${app.names.author(posts[0].author_id)}.`
      : "No posts.";
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

/** The state of the link, or of the checkpoint's example. */
async function restore() {
  const given = location.hash.slice(1);
  app.state = given ? await unpack(given).catch(() => null) : null;
  if (!app.state) {
    const request = app.withK(normal(app.carried.example ?? (await firstExample()), app.actions));
    app.state = {
      source: app.canRetrieve ? "recommend" : "rank",
      sides: [request],
      versions: [],
      side: 0,
      open: null,
      onePer: true,
      start: request.impression_ts,
    };
  }
  if (!app.state.versions.every((version) => app.versions.includes(version))) app.state.versions = []; // not held here
  if (!app.canRetrieve && app.state.source === "recommend") app.state.source = "rank";
  app.replies = [];
  app.before = [];
  app.held = null;
  app.explained = [];
  for (const request of app.state.sides) app.names.learn([...request.history, ...request.candidates]);
  app.draw();
  await rank();
  app.draw();
}

/** The request that the API's description shows: it fits whatever checkpoint serves. */
async function firstExample() {
  const { value } = await call("openapi.json");
  return Object.values(value.paths["/rank"].post.requestBody.content["application/json"].examples)[0].value;
}

async function start() {
  try {
    app.info = (await call("info")).value;
    app.carried = (await call("explore/checkpoint.json")).value;
    app.names = new Names(app.carried.names, app.info.retrieval?.corpus.topics);
    await restore();
  } catch (refused) {
    tell(refused, start);
  }
}

byId("reset").addEventListener("click", () =>
  app.change("reset", (request) => {
    delete request.weights;
  }),
);
addEventListener("hashchange", () => {
  if (location.hash !== linked) restore();
});
Object.assign(app, { rank, explainSoon, keepLink, tell });
start();
