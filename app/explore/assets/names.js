// Who is behind an id, where the checkpoint carries names; else the id itself, shortened. And how numbers are written.

export class Names {
  /** `given`: names.json of the checkpoint, or null. `topics`: of the corpus. `ids`: their kind, as /info says it.
   * @param {any} given @param {string[]} topics @param {"uint64" | "text"} ids */
  constructor(given, topics = [], ids = "uint64") {
    /** The id of no user and of no author. Text ids have none: there it is the empty text, which is no id. */
    this.nobody = ids === "text" ? "" : "0";
    this.ids = ids;
    this.authors = byAnyId(given?.authors);
    this.users = byAnyId(given?.users);
    /** @type {Record<string, {name: string}>} */ this.titles = byAnyId(given?.posts);
    /** @type {string[]} */ this.surfaces = given?.surfaces ?? [];
    /** @type {string[]} */ this.topics = given?.topics ?? topics;
    /** @type {Map<string, {author_id: string, topic?: string, created_at: number, codes?: number[]}>} */ this.posts = new Map();
  }

  /** Remember what was said of posts. @param {any[]} posts */
  learn(posts) {
    for (const post of posts) {
      const known = this.posts.get(post.post_id);
      const topic = post.topics?.[0] ?? this.topic(post);
      const created_at = post.created_at || known?.created_at || 0;
      this.posts.set(post.post_id, { author_id: post.author_id, topic, created_at, ...codesOf(post, known) });
    }
  }

  /** An id for a made-up post: neither known here nor one of `met`. @param {Set<string>} met */
  unseen(met) {
    for (let count = 1; ; count++) {
      const id = this.ids === "text" ? `unseen ${count}` : String(2n ** 64n - BigInt(count));
      if (!met.has(id) && !this.posts.has(id) && !(id in this.titles)) return id;
    }
  }

  /** The content codes of a post as a field of a request; none where they are not known. @param {{post_id: string, codes?: number[]}} post */
  codes(post) {
    return codesOf(post, this.posts.get(post.post_id));
  }

  /** The same for people: `codes 5 16 1`, or empty. @param {{post_id: string, codes?: number[]}} post */
  coded(post) {
    const { codes = [] } = this.codes(post);
    return codes.length ? `codes ${codes.join(" ")}` : "";
  }

  author(/** @type {string} */ id) {
    return this.authors[id]?.name ?? (id === this.nobody ? "unknown author" : `author ${short(id)}`);
  }

  /** What a post is called: its own title where the checkpoint names it, else its author. @param {{post_id: string, author_id: string}} post */
  post(post) {
    return this.titles[post.post_id]?.name ?? this.author(post.author_id);
  }

  /** What is known of the post itself, unless it is given another author here; else its author's. @param {{post_id: string, author_id: string}} post
   * @returns {string | undefined} */
  topic(post) {
    const known = this.posts.get(post.post_id);
    return (known?.author_id === post.author_id ? known.topic : undefined) ?? this.authors[post.author_id]?.topic;
  }

  user(/** @type {string} */ id) {
    const known = this.users[id];
    return known ? [known.name, (known.likes ?? []).join(" and ")].filter(Boolean).join(", ") : id === this.nobody ? "nobody signed in" : `user ${short(id)}`;
  }

  /** The hue of a topic, in degrees. @param {string | undefined} topic */
  hue(topic) {
    const place = topic === undefined ? -1 : this.topics.indexOf(topic);
    return place < 0 ? 0 : 20 + Math.round((place * 360) / this.topics.length);
  }
}

/** The same, without the names that every object has: a text id may be one of them. @param {Record<string, any>} [given] @returns {Record<string, any>} */
const byAnyId = (given) => Object.assign(Object.create(null), given);

/** @param {...({codes?: number[]} | undefined)} posts @returns {{codes?: number[]}} */
function codesOf(...posts) {
  const codes = posts.find((post) => post?.codes?.some(Boolean))?.codes;
  return codes ? { codes } : {};
}

const MEANING = /** @type {Record<string, string>} */ ({
  vqv: "video quality view: the video was watched for long enough",
  dwell: "stayed on the post for a while",
  dwell_time: "stayed, and for how long is known",
  photo_expand: "opened the picture",
  quoted_click: "opened the post that is quoted",
  share_via_dm: "sent it to somebody",
});

export const short = (/** @type {string} */ id) => (id.length > 8 ? `…${id.slice(-5)}` : id);
/** `photo_expand` → `photo expand`. @param {string} name */
export const words = (name) => (name === "vqv" ? "video view (vqv)" : name.replaceAll("_", " "));
/** What an action means, where its name does not say it. @param {string} name */
export const meaning = (name) => MEANING[name] ?? words(name);
/** The names of an event's actions, as a request has them. @param {string[] | Record<string, number>} actions */
export const taken = (actions) => (Array.isArray(actions) ? actions : Object.keys(actions)).map(words).join(", ");

const DAY = 86400;

/** Seconds → `3 h`, `2 d`, `21 y`. @param {number} seconds */
export function span(seconds) {
  const size = Math.abs(seconds);
  if (size < 3600) return `${Math.round(size / 60)} min`;
  if (size < 2 * DAY) return `${Math.round(size / 3600)} h`;
  return size < 730 * DAY ? `${Math.round(size / DAY)} d` : `${Math.round(size / (365.25 * DAY))} y`;
}

/** Numbers that line up, with a real minus, and none before a zero. @param {number} value */
export function number(value, digits = 2) {
  const text = value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
}
export const signed = (/** @type {number} */ value, digits = 2) => (Number(value.toFixed(digits)) > 0 ? "+" : "") + number(value, digits);
/** A sentence's beginning within another sentence; names keep their capitals. @param {string} text */
export const lower = (text) => text[0].toLowerCase() + text.slice(1);

/** Actions against an author: what a button says, what has happened then, the title of a story about it.
 * @type {Record<string, {verb: string, done: string, title: string}>} */
export const AGAINST = {
  report: { verb: "report", done: "Reported", title: "A report" },
  block_author: { verb: "block", done: "Blocked", title: "A block" },
  mute_author: { verb: "mute", done: "Muted", title: "A mute" },
  not_interested: { verb: "not interested", done: "Said “not interested” to", title: "Not interested" },
};
export const percent = (/** @type {number} */ share) => (share < 0.0005 ? "<0.1 %" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);
/** 1 → `1st`. @param {number} place */
export function ordinal(place) {
  const last = place % 100 > 10 && place % 100 < 14 ? 0 : place % 10;
  return `${place}${["th", "st", "nd", "rd"][last] ?? "th"}`;
}
export const many = (/** @type {number} */ count, /** @type {string} */ noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
