// The state of the page, what changes it, and how it is drawn. Not for what asks the service for scores: that is explore.js.

import { call } from "./api.js";
import { byId } from "./dom.js";
import { drawLevers } from "./levers.js";
import { words } from "./names.js";
import { balance, RankedList } from "./ranking.js";
import { body, normal } from "./state.js";
import { drawTimeline, eventWith, liked } from "./timeline.js";
import { drawSource, drawTools } from "./tools.js";

const START_K = 500; // posts of the corpus: one author's may fill the first hundred
const MOST_ROWS = 60;
const ONE_GESTURE_MS = 1500;

const lists = []; // of A, and of B

/** The state and all that changes it. `rank`, `explainSoon`, `keepLink` and `tell` are added by explore.js. */
export const app = {
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

  get request() {
    return this.state.sides[this.state.side];
  },
  get actions() {
    return this.info.actions;
  },
  get canRetrieve() {
    return this.info.retrieval !== null;
  },
  /** The action that speaks against an author; none where the checkpoint knows none of these. */
  get disliked() {
    return ["report", "block_author", "mute_author", "not_interested"].find((name) => this.actions.includes(name));
  },
  /** Of the checkpoints that the process holds. */
  get versions() {
    return [this.info.model.version, this.info.second?.model?.version].filter((version) => version !== undefined);
  },
  weights(request = this.request, version = this.info.model.version) {
    return request.weights ?? (version === this.info.model.version ? this.info : this.info.second).weights;
  },
  weightOf(name) {
    return this.weights()[name] ?? 0;
  },
  /** Of the reply that a side has; none before its first, as when a comparison has just begun. */
  posts(side = this.state.side) {
    return (this.replies[side]?.candidates ?? []).map((post) => this.known(post));
  },

  /** What a side's list shows, best first: each with a `key` that it keeps from one ranking to the next, and its `place`. */
  shown(side) {
    const { onePer } = this.state;
    const keys = new Set();
    const posts = this.posts(side).sort((a, b) => a.rank - b.rank);
    const rows = posts.map((post) => ({
      ...post,
      key: onePer && post.author_id !== "0" ? `author ${post.author_id}` : post.post_id,
    }));
    return rows
      .filter(({ key }) => !keys.has(key) && keys.add(key))
      .slice(0, MOST_ROWS)
      .map((post, place) => ({ ...post, place: place + 1 }));
  },

  /** A post of a reply, with its author and its time. */
  known(post) {
    return { author_id: "0", ...this.names.posts.get(String(post.post_id)), ...post, post_id: String(post.post_id) };
  },

  /** Change the side that is edited, then rank. Changes of one `key` in quick succession are one gesture. */
  change(key, mutate, { redraw = true } = {}) {
    const now = performance.now();
    if (key !== this.gesture.key || now - this.gesture.at > ONE_GESTURE_MS) this.remember();
    this.gesture = { key, at: now };
    mutate(this.request);
    if (redraw) this.draw();
    this.rank();
  },

  remember() {
    this.before = this.replies.map((_, side) => new Map(this.shown(side).map(({ key, place }) => [key, place])));
  },

  addEvent(author, actions) {
    this.change("add", (request) => request.history.push(eventWith(this, author, actions)));
  },

  /** Like a post of a topic: the best one of the corpus for this user, else one that is known here. */
  async likeTopic(topic) {
    const met = new Set(this.request.history.map((event) => event.post_id));
    const isNew = ([id, post]) => post.topic === topic && !met.has(id);
    if (this.canRetrieve && ![...this.names.posts].some(isNew)) {
      const { user_id, history } = body({ ...this.state, source: "recommend" });
      try {
        this.names.learn((await call("retrieve", { user_id, history, topics: [topic], k: 20 })).value.posts);
      } catch (refused) {
        this.tell(refused, () => this.likeTopic(topic));
        return;
      }
    }
    const [id, post] = [...this.names.posts].find(isNew) ?? [];
    const author =
      post?.author_id ?? Object.keys(this.names.authors).find((each) => this.names.authors[each].topic === topic);
    if (!author) return;
    const event = id
      ? { post_id: id, author_id: author, actions: liked(this.actions), dwell_time: 12 }
      : eventWith(this, author, liked(this.actions));
    this.change("like", (request) => request.history.push(event));
  },

  act(what, post) {
    if (what === "why") {
      this.state.open = this.state.open === post.key ? null : post.key;
      this.drawLists();
      this.explainSoon(0);
      this.keepLink();
      return;
    }
    const actions = what === "report" ? { [this.disliked]: 1 } : liked(this.actions);
    const event = { post_id: post.post_id, author_id: post.author_id, actions, dwell_time: what === "report" ? 1 : 12 };
    this.change(what, (request) => request.history.push(event));
  },

  compare() {
    const two = this.state.sides.length === 2;
    this.standing(two ? [this.request] : [this.request, structuredClone(this.request)], []);
  },

  /** One request by both checkpoints that the process holds, or by whichever answers. */
  compareCheckpoints() {
    this.standing([this.request], this.state.versions.length ? [] : this.versions);
  },

  standing(sides, versions) {
    Object.assign(this.state, { sides, versions, side: sides.length - 1 });
    this.held = null;
    this.before = [];
    this.draw();
    this.rank();
  },

  edit(side) {
    this.state.side = side;
    this.draw();
    this.keepLink();
  },

  /** Keep A's scores as they are now, whatever serves later: a checkpoint that is loaded meanwhile ranks B alone. */
  hold(on) {
    this.held = on ? this.replies[0] : null;
    this.rank();
  },

  from(source) {
    this.before = [];
    this.state.source = source;
    this.draw();
    this.rank();
  },

  onePerAuthor(on) {
    this.before = [];
    this.state.onePer = on;
    this.drawLists();
    this.keepLink();
  },

  withK(request) {
    return { k: Math.min(START_K, this.info.limits.max_retrieved), ...request };
  },

  use(request) {
    if (!request || typeof request !== "object" || Array.isArray(request)) throw new Error("it must be one object");
    this.state.sides[this.state.side] = this.withK(normal(request, this.actions));
    this.state.source = this.request.candidates.length ? "rank" : "recommend";
    this.state.start = this.request.impression_ts;
    this.names.learn([...this.request.history, ...this.request.candidates]);
    this.before = [];
    this.draw();
    this.rank();
  },

  draw() {
    drawTools(this);
    drawSource(this);
    drawTimeline(this);
    drawLevers(this);
  },

  drawLists() {
    const { state, names } = this;
    const two = this.replies.length === 2;
    const views = this.replies.map((reply, side) => ({ reply, posts: this.shown(side) }));
    const sums = views.flatMap(({ posts, reply }) => posts.map((post) => balance(post, reply.actions, reply.weights)));
    const most = (what) => Math.max(...sums.map((sum) => sum[what]), 1e-9);
    const reach = { gain: most("gain"), loss: most("loss") };
    const ofA = new Map(views[0].posts.map(({ key, place }) => [key, place]));
    while (lists.length < views.length) {
      lists.push(
        new RankedList((what, post) => {
          const side = lists.findIndex((list) => list.rows.get(post.key)?.post === post);
          if (what !== "why") this.state.side = Math.min(side, this.state.sides.length - 1);
          this.act(what, post);
        }),
      );
    }
    byId("lists").className = two ? "two" : "";
    lists.forEach((list, side) =>
      side < views.length ? list.element.isConnected || byId("lists").append(list.element) : list.element.remove(),
    );
    views.forEach(({ posts, reply }, side) => {
      const model = reply.model ?? reply.models.ranker;
      const title = two ? `${"AB"[side]} · ${model.name} ${model.version}${this.held && !side ? ", held" : ""}` : "";
      lists[side].show(title, posts, {
        names,
        disliked: this.disliked,
        actions: reply.actions,
        weights: reply.weights,
        reach,
        impression: reply.sent.impression_ts,
        open: state.open,
        explained: this.explained[side],
        before: two && side ? ofA : this.before[side],
      });
    });
    const { posts, reply } = views[Math.min(state.side, views.length - 1)];
    const [rows, count] = [posts.length, reply.candidates.length];
    byId("legend").textContent =
      (rows < count ? `${rows} of ${count} posts. ` : "") +
      `Small bars: the probabilities of ${this.actions.map(words).join(", ")}, by their square roots. ` +
      "Blue counts for a post and red against it; the mark is the score that is left.";
  },
};
