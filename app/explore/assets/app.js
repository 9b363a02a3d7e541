// The state of the page and what changes it. How it is drawn: draw.js. What asks the service: explore.js.

import { call } from "./api.js";
import { kept } from "./changes.js";
import { draw, drawLists } from "./draw.js";
import { byId } from "./dom.js";
import { AGAINST, words } from "./names.js";
import { Past } from "./past.js";
import { body, normal, withKeys } from "./state.js";
import { STORIES } from "./stories.js";
import { eventWith, liked } from "./timeline.js";

const START_K = 500; // posts of the corpus: one author's may fill the first hundred
const ONE_GESTURE_MS = 1500;

/** The state and all that changes it. `rank`, `explainSoon`, `keepLink` and `tell` are added by explore.js.
 * @type {App} */
export const app = /** @type {any} */ ({
  state: null,
  replies: [], // the last of each side
  held: null, // the reply of A that stays
  explained: [], // of each side, what /explain said of its posts
  before: [], // of each side, its list before the gestures of `edits`
  edits: [], // the last gesture, in words; before it those that had no reply yet when it began
  told: [], // those whose effect the replies show: the same list as `edits` once that are all
  chosen: {},
  gesture: { key: "", at: 0 },
  past: new Past(),
  sweep: "",
  attention: false,

  get request() {
    return this.state.sides[this.state.side];
  },
  get actions() {
    return this.info.actions;
  },
  get canRetrieve() {
    return this.info.retrieval !== null;
  },
  /** The actions that speak against an author, of those that the checkpoint knows. */
  get negative() {
    return Object.keys(AGAINST).filter((name) => this.actions.includes(name));
  },
  weights(side = this.state.side) {
    return this.state.sides[side].weights ?? this.info.weights;
  },
  weightOf(name) {
    return this.weights()[name] ?? 0;
  },
  body(side) {
    return body(this.state, side);
  },
  /** Of the reply that a side has; none before its first, as when a comparison has just begun. Each has a `key` that it keeps from one
   * ranking to the next, and as `slot` its place in the reply, which is that in the request. */
  posts(side = this.state.side) {
    const { candidates = [], sent } = this.replies[side] ?? {};
    return withKeys(candidates.map((post, slot) => ({ ...this.known({ ...sent.candidates?.[slot], ...post }), slot })));
  },
  /** What a side's list shows, best first: each with its `place`, and an author's `key` where each has one post; `own` is always the post's. */
  shown(side) {
    const { onePer } = this.state;
    const keys = new Set();
    return this.posts(side)
      .sort((a, b) => a.rank - b.rank)
      .map((post) => ({ ...post, own: post.key, key: onePer && post.author_id !== this.names.nobody ? `author ${post.author_id}` : post.key }))
      .filter(({ key }) => !keys.has(key) && keys.add(key))
      .map((post, place) => ({ ...post, place: place + 1 }));
  },
  /** A post of a reply, with its author and its time: as they were sent, else as they are known. */
  known(post) {
    return { author_id: this.names.nobody, ...this.names.posts.get(String(post.post_id)), ...post, post_id: String(post.post_id) };
  },
  /** An id for a made-up post: neither known here nor on the page. */
  unseen() {
    return this.names.unseen(new Set(this.state.sides.flatMap(({ history, candidates }) => [...history, ...candidates]).map(({ post_id }) => post_id)));
  },
  /** The one thing to try of the open story; none once it is done. */
  hint() {
    return STORIES[this.state.story]?.hint(this, this.request) ?? null;
  },
  /** The request of a story; none where this checkpoint has not what it takes. */
  story(name) {
    return name === "corpus" ? { ...this.start, candidates: this.start.candidates } : (STORIES[name]?.make(this, this.start) ?? null);
  },

  /** Change the side that is edited, then rank. Changes of one `key` in quick succession are one gesture. */
  change(key, label, mutate, { redraw = true } = {}) {
    const now = performance.now();
    if (key !== this.gesture.key || now - this.gesture.at > ONE_GESTURE_MS) {
      this.past.keep(this.state, label);
      this.look(label);
    } else this.edits = [...this.edits.slice(0, -1), label];
    this.gesture = { key, at: now };
    mutate(this.request);
    if (redraw) draw(this);
    else this.drawTools();
    this.rank();
  },
  /** Compare the next list with this one: it shows what is done now. Of edits without a reply yet it will show the effect too. */
  look(label) {
    const isPending = this.edits.length > 0 && this.told !== this.edits;
    if (!isPending) Object.assign(this, { before: this.replies.map((_, side) => kept(this.shown(side))), told: [] });
    this.edits = [...(isPending ? this.edits : []), label];
  },

  undo() {
    this.stepTo(this.past.undo(this.state), "Undone");
  },
  redo() {
    this.stepTo(this.past.redo(this.state), "Done again");
  },
  stepTo(step, what) {
    if (!step) return;
    const isSame = step.state.sides.length === this.state.sides.length && step.state.source === this.state.source;
    this.look(`${what} (${step.label})`);
    this.state = step.state;
    this.gesture.key = "";
    if (!isSame) this.before = [];
    this.held = null;
    draw(this);
    this.rank();
  },
  restart() {
    this.tellStory(STORIES[this.state.story] || this.state.story === "corpus" ? this.state.story : this.first(), "Started over");
  },
  /** The story that the page begins with. */
  first() {
    return ["report", "own"].find((name) => name === "own" || (this.carried.example && this.story(name))) ?? "own";
  },
  /** Begin a story; what was there before can be had back by Undo. */
  tellStory(name, label) {
    if (this.state) this.past.keep(this.state, label);
    const request = this.withK(structuredClone(this.story(name) ?? this.start));
    const source = name === "corpus" ? "recommend" : "rank";
    const onePer = name === "corpus";
    this.state = { source, sides: [request], side: 0, open: null, onePer, story: name, start: request.impression_ts };
    this.reset();
  },
  /** Forget what belongs to the lists before, and draw anew. */
  reset() {
    Object.assign(this, { before: [], edits: [], held: null, explained: [], replies: this.replies.slice(0, this.state.sides.length) });
    this.gesture.key = "";
    for (const request of this.state.sides) this.names.learn([...request.history, ...request.candidates]);
    draw(this);
    return this.rank();
  },

  setUser(id) {
    this.change("user", `Made it ${this.names.user(id)}`, (request) => (request.user_id = id));
  },
  addEvent(author, actions) {
    const done = Object.keys(actions).map(words).join(", ");
    this.change("add", `Added “${done}” with ${this.names.author(author)}`, (request) => request.history.push(eventWith(this, author, actions)));
  },
  removeEvent(place) {
    const event = this.request.history[place];
    const what = this.negative.find((name) => name in event.actions);
    const label = `Removed ${what ? `the ${words(what)} of` : `event ${place + 1} with`} ${this.names.post(event)}`;
    this.change(`remove ${place}`, label, (request) => request.history.splice(place, 1));
    this.gesture.key = "";
  },
  moveEvent(from, to) {
    this.change("order", `Moved event ${from + 1} ${to > from ? "later" : "earlier"}`, ({ history }) => history.splice(to, 0, ...history.splice(from, 1)));
  },
  moveCandidate(from, to) {
    if (from === to) return;
    this.change("candidates", `Moved post ${from + 1} of the request to place ${to + 1}`, ({ candidates }) => candidates.splice(to, 0, ...candidates.splice(from, 1)));
  },
  removeCandidate(place) {
    const who = this.names.author(this.request.candidates[place].author_id);
    this.change(`remove post ${place}`, `Took out the post of ${who}`, ({ candidates }) => candidates.splice(place, 1));
    this.gesture.key = "";
  },
  addCandidate() {
    const met = new Set(this.request.candidates.map(({ post_id }) => post_id));
    const fresh = [...this.names.posts].find(([id]) => !met.has(id));
    const [post_id, { author_id, created_at }] = fresh ?? [this.unseen(), { author_id: "1", created_at: 0 }];
    this.change("add post", `Added a post of ${this.names.author(author_id)}`, ({ candidates }) => candidates.push({ post_id, author_id, created_at, ...this.names.codes({ post_id }) }));
    this.gesture.key = "";
  },

  /** Like a post of a topic: the best one of the corpus for this user, else one that is known here. For nobody without a history the
   * service has no best ones: then a post of an author of the topic, where one is known. */
  async likeTopic(topic) {
    const met = new Set(this.request.history.map((event) => event.post_id));
    const isNew = ([id, post]) => post.topic === topic && !met.has(id);
    const ofTopic = Object.keys(this.names.authors).find((each) => this.names.authors[each].topic === topic);
    const { user_id, history } = this.body(this.state.side);
    const isAnybody = user_id !== this.names.nobody || history.length > 0;
    if (this.canRetrieve && (isAnybody || !ofTopic) && ![...this.names.posts].some(isNew)) {
      try {
        this.names.learn((await call("retrieve", { user_id, history, topics: [topic], k: 20 })).value.posts);
      } catch (refused) {
        this.tell(refused, () => this.likeTopic(topic));
        return;
      }
    }
    const [id, post] = [...this.names.posts].find(isNew) ?? [];
    const author = post?.author_id ?? ofTopic;
    if (!author) return;
    const event = id ? { post_id: id, author_id: author, actions: liked(this.actions), dwell_time: 12, ...this.names.codes({ post_id: id }) } : eventWith(this, author, liked(this.actions));
    this.change(`like ${topic} ${this.request.history.length}`, `Liked a post about ${topic}, of ${this.names.author(author)}`, (request) => request.history.push(event));
  },

  act(what, post) {
    const who = this.names.author(post.author_id);
    if (what === "why") {
      this.state.open = this.state.open === post.key ? null : post.key;
      drawLists(this);
      this.explainSoon(0);
      this.keepLink();
      return;
    }
    const actions = what === "report" ? { [this.negative[0]]: 1 } : liked(this.actions);
    const event = { post_id: post.post_id, author_id: post.author_id, actions, dwell_time: what === "report" ? 1 : 12 };
    this.change(what, what === "report" ? `${AGAINST[this.negative[0]].done} ${who}` : `Liked the post of ${who}`, (request) => request.history.push(event));
    this.gesture.key = "";
  },

  /** Begin to compare two requests, the second a copy that is edited; or keep the edited one alone. */
  compare() {
    const two = this.state.sides.length === 2;
    const sides = two ? [this.request] : [this.request, structuredClone(this.request)];
    this.past.keep(this.state, two ? "Stopped comparing" : "Compared");
    Object.assign(this.state, { sides, side: sides.length - 1 });
    Object.assign(this, { held: null, before: [], edits: [] });
    draw(this);
    this.rank();
  },
  edit(side) {
    this.state.side = side;
    draw(this);
    drawLists(this);
    this.keepLink();
  },
  /** Keep A's scores as they are now, whatever serves later: a checkpoint that is loaded meanwhile ranks B alone. */
  hold(on) {
    this.held = on ? this.replies[0] : null;
    this.rank();
  },
  from(source) {
    this.past.keep(this.state, source === "rank" ? "These posts" : "All posts");
    Object.assign(this.state, { source, onePer: source === "recommend" });
    Object.assign(this, { before: [], edits: [] });
    draw(this);
    this.rank();
  },
  onePerAuthor(on) {
    Object.assign(this, { before: [], edits: [] });
    this.state.onePer = on;
    drawLists(this);
    this.keepLink();
  },
  openSweep(name) {
    this.sweep = this.sweep === name ? "" : name;
    drawLists(this);
    if (this.sweep) byId("sweep").scrollIntoView({ block: "nearest" }); // it may be far below a row whose “why” is open
  },
  withK(request) {
    return { k: Math.min(START_K, this.info.limits.max_retrieved), ...request };
  },
  /** Begin anew with a pasted request. Raises an Error, and leaves all as it was, where the request cannot be read or drawn. */
  use(request) {
    if (!request || typeof request !== "object" || Array.isArray(request)) throw new Error("it must be one object");
    const own = this.withK(normal(request, this.actions));
    const [was, posts] = [this.state, new Map(this.names.posts)];
    const sides = was.sides.map((side, at) => (at === was.side ? own : side));
    const source = own.candidates.length ? "rank" : "recommend";
    this.state = { ...was, sides, source, onePer: source === "recommend", start: own.impression_ts, story: "" };
    try {
      this.names.learn([...own.history, ...own.candidates]);
      draw(this);
    } catch (error) {
      this.state = was;
      this.names.posts = posts;
      draw(this);
      throw new Error(`the page cannot show it (${/** @type {Error} */ (error).message})`);
    }
    this.past.keep(was, "A request of your own");
    this.reset();
  },
});
