// The page: one state, drawn again at each change, and ranked by the service.

import { call, latest } from "./api.js";
import { byId } from "./dom.js";
import { drawLevers } from "./levers.js";
import { Names, number, words } from "./names.js";
import { balance, RankedList } from "./ranking.js";
import { body, FOR_RETRIEVAL, normal, pack, unpack } from "./state.js";
import { drawTimeline, eventWith, liked } from "./timeline.js";
import { askForKey, drawSource, drawTools } from "./tools.js";

const START_K = 500; // posts of the corpus: one author's may fill the first hundred
const MOST_ROWS = 60;
const ONE_GESTURE_MS = 1500;

const app = {
  state: null,
  names: null,
  info: null,
  carried: null, // by the checkpoint: an example and names, each of them perhaps null
  replies: [], // the last of each side
  held: null, // the reply of A that stays
  explained: [], // of each side, what /explain said of the post whose row is open
  before: [], // rank by post, before the last gesture
  chosen: {},
  gesture: { key: "", at: 0 },

  get request() { return this.state.sides[this.state.side]; },
  get actions() { return this.info.actions; },
  get canRetrieve() { return this.info.retrieval !== null; },
  weights(request = this.request) { return request.weights ?? this.info.weights; },
  weightOf(name) { return this.weights()[name] ?? 0; },
  posts() { return (this.replies[this.state.side]?.candidates ?? []).map((post) => this.known(post)); },

  /** What a side's list shows, best first: each with a `key` that it keeps from one ranking to the next, and its `place`. */
  shown(side) {
    const { onePer } = this.state, keys = new Set();
    const posts = this.replies[side].candidates.map((post) => this.known(post)).sort((a, b) => a.rank - b.rank);
    const rows = posts.map((post) => ({ ...post, key: onePer && post.author_id !== "0" ? `author ${post.author_id}` : post.post_id }));
    return rows.filter(({ key }) => !keys.has(key) && keys.add(key)).slice(0, MOST_ROWS).map((post, place) => ({ ...post, place: place + 1 }));
  },

  /** A post of a reply, with its author and its time. */
  known(post) { return { author_id: "0", ...this.names.posts.get(String(post.post_id)), ...post, post_id: String(post.post_id) }; },

  /** Change the side that is edited, then rank. Changes of one `key` in quick succession are one gesture. */
  change(key, mutate, { redraw = true } = {}) {
    const now = performance.now();
    if (key !== this.gesture.key || now - this.gesture.at > ONE_GESTURE_MS) this.remember();
    this.gesture = { key, at: now };
    mutate(this.request);
    if (redraw) this.draw();
    rank();
  },

  remember() { this.before = this.replies.map((_, side) => new Map(this.shown(side).map(({ key, place }) => [key, place]))); },

  addEvent(author, actions) { this.change("add", (request) => request.history.push(eventWith(this, author, actions))); },

  /** Like a post of a topic: the best one of the corpus for this user, else one that is known here. */
  async likeTopic(topic) {
    const met = new Set(this.request.history.map((event) => event.post_id));
    const isNew = ([id, post]) => post.topic === topic && !met.has(id);
    if (this.canRetrieve && ![...this.names.posts].some(isNew)) {
      const { user_id, history } = body({ ...this.state, source: "recommend" });
      const { value } = await call("retrieve", { user_id, history, topics: [topic], k: 20 });
      this.names.learn(value.posts);
    }
    const [id, post] = [...this.names.posts].find(isNew) ?? [];
    const author = post?.author_id ?? Object.keys(this.names.authors).find((each) => this.names.authors[each].topic === topic);
    if (!author) return;
    const event = id ? { post_id: id, author_id: author, actions: liked(this.actions), dwell_time: 12 } : eventWith(this, author, liked(this.actions));
    this.change("like", (request) => request.history.push(event));
  },

  act(what, post) {
    if (what === "why") {
      this.state.open = this.state.open === post.key ? null : post.key;
      this.drawLists();
      explainSoon(0);
      keepLink();
      return;
    }
    const actions = what === "report" ? { report: 1 } : liked(this.actions);
    const event = { post_id: post.post_id, author_id: post.author_id, actions, dwell_time: what === "report" ? 1 : 12 };
    this.change(what, (request) => request.history.push(event));
  },

  compare() {
    const { state } = this;
    if (state.sides.length === 2) Object.assign(state, { sides: [this.request], side: 0 });
    else Object.assign(state, { sides: [this.request, structuredClone(this.request)], side: 1 });
    this.held = null;
    this.before = [];
    this.draw();
    rank();
  },

  edit(side) {
    this.state.side = side;
    this.draw();
    keepLink();
  },

  /** Keep A's scores as they are now, whatever serves later: a checkpoint that is loaded meanwhile ranks B alone. */
  hold(on) {
    this.held = on ? this.replies[0] : null;
    rank();
  },

  from(source) {
    this.before = [];
    this.state.source = source;
    this.draw();
    rank();
  },

  onePerAuthor(on) {
    this.before = [];
    this.state.onePer = on;
    this.drawLists();
    keepLink();
  },

  use(request) {
    if (!request || typeof request !== "object" || Array.isArray(request)) throw new Error("it must be one object");
    this.state.sides[this.state.side] = withK(normal(request, this.actions));
    this.state.source = this.request.candidates.length ? "rank" : "recommend";
    this.state.start = this.request.impression_ts;
    this.names.learn([...this.request.history, ...this.request.candidates]);
    this.before = [];
    this.draw();
    rank();
  },

  draw() {
    drawTools(this);
    drawSource(this);
    drawTimeline(this);
    drawLevers(this);
  },

  drawLists() {
    const { state, names } = this, two = this.replies.length === 2;
    const views = this.replies.map((reply, side) => ({ reply, posts: this.shown(side) }));
    const sums = views.flatMap(({ posts, reply }) => posts.map((post) => balance(post, reply.actions, reply.weights)));
    const most = (what) => Math.max(...sums.map((sum) => sum[what]), 1e-9), reach = { gain: most("gain"), loss: most("loss") };
    const ofA = new Map(views[0].posts.map(({ key, place }) => [key, place]));
    while (lists.length < views.length) {
      lists.push(new RankedList((what, post) => {
        if (what !== "why") this.state.side = lists.findIndex((list) => list.rows.get(post.key)?.post === post);
        this.act(what, post);
      }));
    }
    byId("lists").className = two ? "two" : "";
    lists.forEach((list, side) => (side < views.length ? list.element.isConnected || byId("lists").append(list.element) : list.element.remove()));
    views.forEach(({ posts, reply }, side) => {
      const model = reply.model ?? reply.models.ranker;
      const title = two ? `${"AB"[side]} · ${model.name} ${model.version}${this.held && !side ? ", held" : ""}` : "";
      lists[side].show(title, posts, { names, actions: reply.actions, weights: reply.weights, reach, impression: reply.sent.impression_ts,
        open: state.open, explained: this.explained[side], before: two && side ? ofA : this.before[side] });
    });
    const count = this.replies[state.side].candidates.length, rows = views[state.side].posts.length;
    byId("legend").textContent = `${rows < count ? `${rows} of ${count} posts. ` : ""}Small bars: the probabilities of ${this.actions.map(words).join(", ")}, by their square roots. ` +
      "Blue counts for a post and red against it; the mark is the score that is left.";
  },
};

const lists = [];
const withK = (request) => ({ k: START_K, ...request });

/** Ask for one side's ranking, and who wrote the posts where the reply does not say it. The reply keeps what it answers. */
async function ask(side) {
  const sent = body(app.state, side), asked = await call(app.state.source, sent);
  Object.assign(asked.value, { sent, weights: app.weights(sent) });
  if (app.state.source === "recommend" && asked.value.candidates.some((post) => !app.names.posts.has(String(post.post_id)))) {
    const { weights, ...posts } = sent;
    app.names.learn((await call("retrieve", posts)).value.posts);
  }
  return asked;
}

const rank = latest(async () => {
  try {
    const sides = app.state.sides.map((_, side) => side);
    const asked = await Promise.all(sides.map((side) => (app.held && !side ? { value: app.held, milliseconds: 0 } : ask(side))));
    if (asked.length !== app.state.sides.length) return; // comparing began or ended meanwhile, and asks again
    app.replies = asked.map(({ value }) => value);
    const last = asked[Math.min(app.state.side, asked.length - 1)], { timings_ms: stages, model, models } = last.value;
    const { name, version } = model ?? models.ranker;
    if (version !== app.info.model.version) {
      app.info = (await call("info")).value;
      app.draw();
    }
    byId("model").textContent = `${name} ${version}`;
    byId("pace").textContent = `${number(Object.values(stages).reduce((sum, stage) => sum + stage, 0), 1)} ms in the service, ${number(last.milliseconds, 0)} ms in all`;
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
    const { sent } = app.replies[side], { post_id, author_id, created_at = 0 } = post;
    const candidates = sent.candidates ?? [{ post_id, author_id, created_at }];
    const question = Object.entries({ ...sent, candidates, explain: [post_id] }).filter(([name]) => !FOR_RETRIEVAL.includes(name));
    try {
      const { value } = await call("explain", Object.fromEntries(question));
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
    const posts = app.shown(app.state.side), before = app.before[app.state.side];
    const moved = posts.filter(({ key, place }) => before && before.get(key) !== place).length;
    byId("spoken").textContent = posts.length ? `${posts.length} posts, ${moved} moved. First: ${app.names.author(posts[0].author_id)}.` : "No posts.";
  }, 600);
}

let linked = "", linking = 0;
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
    const request = withK(normal(app.carried.example ?? (await firstExample()), app.actions));
    app.state = { source: app.canRetrieve ? "recommend" : "rank", sides: [request], side: 0, open: null, onePer: true, start: request.impression_ts };
  }
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

byId("reset").addEventListener("click", () => app.change("reset", (request) => { delete request.weights; }));
addEventListener("hashchange", () => { if (location.hash !== linked) restore(); });
start();
