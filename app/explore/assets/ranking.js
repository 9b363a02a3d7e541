// One ranked list: a row a post, moved rather than made anew, so that a person sees what an event does.

import { animated, button, h } from "./dom.js";
import { AGAINST, number, percent, short, signed, span, words } from "./names.js";
import { details } from "./why.js";

const HIGH = 22; // of the bars, in their own units
const AT_ONCE = 24; // rows that are in sight; the others follow, so many at a time
const GUTTER = 36; // of the lines from the place before to the place now

export class RankedList {
  /** `act(what, post)` is called for "like", "report" and "why". @param {(what: string, post: Shown) => void} act */
  constructor(act) {
    this.act = act;
    /** @type {Map<string, Row>} */ this.rows = new Map();
    this.turn = 0;
    this.title = h("h3");
    const heads = ["", "", "", "post", "probabilities, √", "", "score"];
    this.axis = h("span", { class: "against-for" }, h("span", { class: "against" }, "against"), h("span", { class: "forit" }, "for"));
    this.heads = h("div", { class: "row heads", "aria-hidden": "true" }, heads.map((text, at) => h("span", {}, at === 5 ? this.axis : text)));
    this.lines = h("svg", { class: "lines", "aria-hidden": "true" });
    this.list = h("ol", { class: "posts" });
    this.element = h("div", { class: "list" }, this.title, this.heads, h("div", { class: "under" }, this.lines, this.list));
  }

  /** Show a reply's posts. @param {string} title @param {Shown[]} posts @param {View} view */
  show(title, posts, view) {
    Object.assign(this.title, { textContent: title, hidden: !title });
    const turn = ++this.turn;
    delete this.element.dataset.drawn;
    animated(
      () => [...this.list.children],
      () => {
        const kept = new Set(posts.map(({ key }) => key));
        for (const [key, row] of this.rows) {
          if (kept.has(key)) continue;
          row.element.remove();
          this.rows.delete(key);
        }
        this.place(posts.slice(0, AT_ONCE), 0, view);
      },
    );
    this.draw(posts.slice(0, AT_ONCE), view);
    this.rest(turn, posts, AT_ONCE, view);
  }

  /** Rows out of sight, some at a time, until another list is to be shown.
   * @param {number} turn @param {Shown[]} posts @param {number} from @param {View} view */
  rest(turn, posts, from, view) {
    if (turn !== this.turn) return;
    if (from >= posts.length) {
      this.element.dataset.drawn = "";
      return;
    }
    setTimeout(() => {
      if (turn !== this.turn) return;
      this.place(posts.slice(from, from + AT_ONCE), from, view);
      this.rest(turn, posts, from + AT_ONCE, view);
    }, 30);
  }

  place(/** @type {Shown[]} */ posts, /** @type {number} */ from, /** @type {View} */ view) {
    const focused = /** @type {HTMLElement} */ (document.activeElement);
    const held = this.list.contains(focused);
    posts.forEach((post, at) => {
      const row = this.rows.get(post.key) ?? new Row(post, this.act);
      this.rows.set(post.key, row);
      row.fill(post, view);
      const there = this.list.children[from + at];
      if (there !== row.element) this.list.insertBefore(row.element, there ?? null);
    });
    if (held) focused.focus({ preventScroll: true }); // what is moved loses it
  }

  /** Lines from where each row was to where it is. @param {Shown[]} posts @param {View} view */
  draw(posts, { before, open }) {
    const moved = posts.every(({ key }) => key !== open) && posts.some(({ key, place }) => (before?.get(key)?.place ?? place) !== place);
    this.lines.replaceChildren();
    if (!moved) return;
    const heights = [...this.list.children].slice(0, AT_ONCE).map((/** @type {any} */ row) => row.offsetTop + row.firstChild.offsetHeight / 2);
    posts.forEach(({ key, place }) => {
      const was = before?.get(key)?.place;
      if (was === undefined || heights[was - 1] === undefined) return;
      const [from, to] = [heights[was - 1], heights[place - 1]];
      const path = `M1 ${from}C${GUTTER / 2} ${from} ${GUTTER / 2} ${to} ${GUTTER - 1} ${to}`;
      this.lines.append(h("path", { d: path, class: was > place ? "up" : was < place ? "down" : "" }));
    });
  }
}

class Row {
  constructor(/** @type {Shown} */ post, /** @type {(what: string, post: Shown) => void} */ act) {
    this.key = post.key;
    this.post = post;
    const does = (/** @type {string} */ what) => button(`${what} ${this.key}`, what, () => act(what, this.post), { class: "quiet" });
    const cell = (/** @type {string} */ kind) => h("span", { class: `${kind} number` });
    this.rank = cell("rank");
    this.move = cell("move");
    this.score = cell("score");
    this.delta = cell("delta");
    this.name = h("strong");
    this.topic = h("span", { class: "topic" });
    this.about = h("span", { class: "soft about" });
    this.like = does("like");
    this.report = does("report");
    this.why = does("why");
    this.bars = h("svg", { class: "bars", role: "img", preserveAspectRatio: "none" }, h("title"));
    this.balance = h(
      "svg",
      { class: "balance", preserveAspectRatio: "none", "aria-hidden": "true" },
      h("rect", { class: "against", y: 2, height: 6 }),
      h("rect", { class: "for", y: 2, height: 6 }),
      h("line", { class: "axis", y1: 0, y2: 10 }),
      h("line", { class: "net", y1: 0, y2: 10 }),
    );
    this.detail = h("div", { class: "detail", id: `why-${Math.random().toString(36).slice(2)}`, hidden: true });
    this.why.setAttribute("aria-controls", this.detail.id);
    const who = h("div", {}, this.name, this.topic, this.about);
    const line = h("div", { class: "line" }, this.like, this.report, this.why);
    const cells = [this.rank, h("span"), this.move, h("div", { class: "who" }, who, line), this.bars, this.balance];
    const head = h("div", { class: "row" }, cells, h("span", { class: "scores" }, this.score, this.delta));
    this.element = h("li", { "data-key": this.key }, head, this.detail);
  }

  fill(/** @type {Shown} */ post, /** @type {View} */ view) {
    this.post = post;
    const { names } = view;
    const author = names.post(post);
    const topic = names.topic(post);
    Object.assign(this.element.dataset, { post: post.post_id, rank: post.rank, score: post.score });
    this.rank.textContent = String(post.place);
    this.name.textContent = author;
    this.topic.textContent = topic ?? "";
    this.topic.hidden = !topic;
    this.topic.style.setProperty("--hue", String(names.hue(topic)));
    const coded = names.coded(post);
    this.about.textContent = [age(post, view.impression) || `post ${short(post.post_id)}`, coded].filter(Boolean).join(" · ");
    const found = post.retrieval_rank ? `, rank ${post.rank} of all, retrieved as ${post.retrieval_rank}` : "";
    this.about.title = `post ${post.post_id}, author ${post.author_id}${found}${coded && `, ${coded}`}`;
    const verb = AGAINST[view.disliked ?? ""]?.verb ?? "";
    this.report.textContent = verb;
    const says = ["Like a post of", verb && verb[0].toUpperCase() + verb.slice(1), "Why is this post here:"];
    [this.like, this.report, this.why].forEach((each, at) => each.setAttribute("aria-label", `${says[at]} ${author}`));
    this.report.hidden = !view.disliked;
    this.score.textContent = number(post.score, 3);
    this.compare(post, view.before);
    this.drawBars(post, view);
    this.drawBalance(post, view);
    const open = view.open === this.key;
    this.why.setAttribute("aria-expanded", open);
    this.detail.hidden = !open;
    if (open) this.detail.replaceChildren(...details(post, view));
  }

  /** Beside the list before. @param {Shown} post @param {Map<string, Shown> | undefined} before */
  compare(post, before) {
    const was = before?.get(this.key);
    const moved = was ? was.place - post.place : 0;
    this.move.textContent = before && !was ? "new" : moved ? `${moved > 0 ? "▲" : "▼"}${Math.abs(moved)}` : "";
    this.move.className = `move number ${moved > 0 ? "up" : moved < 0 ? "down" : ""}`;
    const change = was ? post.score - was.score : 0;
    this.delta.textContent = was ? (change === 0 ? "=" : signed(change, Math.abs(change) < 0.005 ? 4 : 2)) : "";
    this.delta.title = was ? `before: ${was.score}` : "";
    this.delta.className = `delta number ${change > 0 ? "up" : change < 0 ? "down" : ""}`;
  }

  /** @param {Shown} post @param {View} view */ drawBars(post, { actions, weights }) {
    if (this.bars.childElementCount !== actions.length + 1) {
      this.bars.setAttribute("viewBox", `0 0 ${actions.length * 5 - 1} ${HIGH}`);
      this.bars.replaceChildren(this.bars.firstChild, ...actions.map((_, place) => h("rect", { x: place * 5, width: 4 })));
    }
    actions.forEach((name, place) => {
      const shape = this.bars.children[place + 1];
      const height = Math.max(0.6, HIGH * Math.sqrt(post.probabilities[place]));
      shape.setAttribute("y", String(HIGH - height));
      shape.setAttribute("height", String(height));
      shape.setAttribute("class", side(weights[name]));
    });
    const most = actions.map((name, place) => ({ name, share: post.probabilities[place] })).sort((a, b) => b.share - a.share);
    this.bars.firstChild.textContent = most.slice(0, 4).map(({ name, share }) => `${words(name)} ${percent(share)}`).join(", ");
  }

  /** @param {Shown} post @param {View} view */ drawBalance(post, { actions, weights, reach }) {
    const { gain, loss } = balance(post, actions, weights);
    const [against, forIt, , net] = this.balance.children;
    this.balance.setAttribute("viewBox", `${-reach.loss} 0 ${reach.gain + reach.loss} 10`);
    against.setAttribute("x", String(-loss));
    against.setAttribute("width", String(loss));
    forIt.setAttribute("width", String(gain));
    for (const end of ["x1", "x2"]) net.setAttribute(end, String(gain - loss));
  }
}

/** How old a post is when it is shown; it may also be written later. @param {Shown} post @param {number | undefined} shown */
function age(post, shown) {
  if (!post.created_at || !shown) return "";
  const seconds = shown - post.created_at;
  return seconds < 0 ? `written ${span(seconds)} later` : `${span(seconds)} old`;
}

/** What speaks for a post and against it: its score is `gain` − `loss`.
 * @param {Shown} post @param {string[]} actions @param {Record<string, number>} weights */
export function balance(post, actions, weights) {
  const terms = actions.map((name, place) => (weights[name] ?? 0) * post.probabilities[place]);
  const sum = (/** @type {number} */ sign) => terms.reduce((total, term) => total + Math.max(0, sign * term), 0);
  return { gain: sum(1), loss: sum(-1) };
}

const side = (/** @type {number} */ weight) => (weight > 0 ? "for" : weight < 0 ? "against" : "idle");
