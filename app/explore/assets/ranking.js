// One ranked list: a row a post, moved rather than made anew, so that a person sees what an event does.

import { animated, h } from "./dom.js";
import { number, percent, short, span, words } from "./names.js";
import { why } from "./why.js";

const HIGH = 22; // of the bars, in their own units

export class RankedList {
  /** `act(what, post)` is called for "like", "report" and "why". */
  constructor(act) {
    this.act = act;
    this.rows = new Map();
    this.title = h("h3");
    this.list = h("ol", { class: "posts" });
    this.element = h("div", { class: "list" }, this.title, this.list);
  }

  /** Show a reply's posts. `view` has what is needed beside them: names, actions, weights, reach, before, open, explained, impression. */
  show(title, posts, view) {
    this.title.textContent = title;
    this.title.hidden = !title;
    animated(
      () => [...this.list.children],
      () => {
        const rows = posts.map((post) => {
          const row = this.rows.get(post.key) ?? new Row(post, this.act);
          row.fill(post, view);
          return row;
        });
        this.rows = new Map(rows.map((row) => [row.key, row]));
        const wanted = rows.map((row) => row.element),
          kept = new Set(wanted);
        for (const child of [...this.list.children]) if (!kept.has(child)) child.remove();
        const focused = document.activeElement;
        wanted.forEach((element, place) => {
          if (this.list.children[place] !== element) this.list.insertBefore(element, this.list.children[place] ?? null);
        });
        if (this.list.contains(focused)) focused.focus({ preventScroll: true }); // what is moved loses it
      },
    );
  }
}

class Row {
  constructor(post, act) {
    this.key = post.key;
    const button = (what, text) =>
      h("button", { type: "button", class: "quiet", onclick: () => act(what, this.post) }, text);
    this.rank = h("span", { class: "rank number" });
    this.move = h("span", { class: "move number" });
    this.name = h("strong");
    this.topic = h("span", { class: "topic" });
    this.about = h("span", { class: "soft about" });
    this.like = button("like", "like");
    this.report = button("report", "report");
    this.why = button("why", "why");
    this.bars = h("svg", { class: "bars", role: "img", preserveAspectRatio: "none" }, h("title"));
    this.balance = h(
      "svg",
      { class: "balance", preserveAspectRatio: "none", "aria-hidden": "true" },
      h("rect", { class: "against", y: 2, height: 6 }),
      h("rect", { class: "for", y: 2, height: 6 }),
      h("line", { class: "axis", y1: 0, y2: 10 }),
      h("line", { class: "net", y1: 0, y2: 10 }),
    );
    this.score = h("span", { class: "score number" });
    this.detail = h("div", { class: "detail", id: `why-${crypto.randomUUID()}`, hidden: true });
    this.why.setAttribute("aria-controls", this.detail.id);
    this.element = h(
      "li",
      { "data-key": this.key },
      h(
        "div",
        { class: "row" },
        this.rank,
        this.move,
        h(
          "div",
          { class: "who" },
          h("div", {}, this.name, this.topic),
          h("div", { class: "line" }, this.about, this.like, this.report, this.why),
        ),
        this.bars,
        this.balance,
        this.score,
      ),
      this.detail,
    );
  }

  fill(post, view) {
    this.post = post;
    const { names } = view;
    const author = names.author(post.author_id),
      topic = names.topic(post);
    const before = view.before?.get(this.key),
      moved = before === undefined ? 0 : before - post.place;
    Object.assign(this.element.dataset, { post: post.post_id, rank: post.rank, score: post.score });
    this.rank.textContent = post.place;
    this.move.textContent =
      view.before && before === undefined ? "new" : moved ? `${moved > 0 ? "▲" : "▼"}${Math.abs(moved)}` : "";
    this.move.className = `move number ${moved > 0 ? "up" : moved < 0 ? "down" : ""}`;
    this.name.textContent = author;
    this.topic.textContent = topic ?? "";
    this.topic.hidden = !topic;
    this.topic.style.setProperty("--hue", names.hue(topic));
    const age = post.created_at && view.impression ? `${span(view.impression - post.created_at)} old` : "";
    const rank = post.retrieval_rank ? `rank ${post.rank}, retrieved ${post.retrieval_rank}` : "";
    this.about.textContent = [age, rank].filter(Boolean).join(" · ") || `post ${short(post.post_id)}`;
    this.about.title = `post ${post.post_id}, author ${post.author_id}`;
    for (const [button, text] of [
      [this.like, "Like a post of"],
      [this.report, "Report"],
      [this.why, "Why is this post here:"],
    ]) {
      button.setAttribute("aria-label", `${text} ${author}`);
    }
    this.report.hidden = !view.disliked;
    this.score.textContent = number(post.score, 3);
    this.drawBars(post, view);
    this.drawBalance(post, view);
    const open = view.open === this.key;
    this.why.setAttribute("aria-expanded", open);
    this.detail.hidden = !open;
    if (open) this.detail.replaceChildren(...why(post, view));
  }

  drawBars(post, { actions, weights }) {
    const shapes = this.bars.querySelectorAll("rect");
    if (shapes.length !== actions.length) {
      this.bars.setAttribute("viewBox", `0 0 ${actions.length * 5 - 1} ${HIGH}`);
      this.bars.replaceChildren(
        this.bars.firstChild,
        ...actions.map((_, place) => h("rect", { x: place * 5, width: 4 })),
      );
    }
    this.bars.querySelectorAll("rect").forEach((shape, place) => {
      const height = Math.max(0.6, HIGH * Math.sqrt(post.probabilities[place]));
      shape.setAttribute("y", HIGH - height);
      shape.setAttribute("height", height);
      shape.setAttribute("class", side(weights[actions[place]]));
    });
    const most = actions
      .map((name, place) => [name, post.probabilities[place]])
      .sort((a, b) => b[1] - a[1])
      .slice(0, 4);
    this.bars.firstChild.textContent = most.map(([name, share]) => `${words(name)} ${percent(share)}`).join(", ");
  }

  drawBalance(post, { actions, weights, reach }) {
    const { gain, loss } = balance(post, actions, weights);
    const [against, forIt, , net] = this.balance.children;
    this.balance.setAttribute("viewBox", `${-reach.loss} 0 ${reach.gain + reach.loss} 10`);
    against.setAttribute("x", -loss);
    against.setAttribute("width", loss);
    forIt.setAttribute("width", gain);
    for (const end of ["x1", "x2"]) net.setAttribute(end, gain - loss);
  }
}

/** What speaks for a post and against it: its score is `gain` − `loss`. */
export function balance(post, actions, weights) {
  const terms = actions.map((name, place) => (weights[name] ?? 0) * post.probabilities[place]);
  const sum = (sign) => terms.reduce((total, term) => total + Math.max(0, sign * term), 0);
  return { gain: sum(1), loss: sum(-1) };
}

const side = (weight) => (weight > 0 ? "for" : weight < 0 ? "against" : "idle");
