// Who is behind an id, where the checkpoint carries names; else the id itself, shortened.

export class Names {
  /** `given`: names.json of the checkpoint, or null. `topics`: of the corpus. */
  constructor(given, topics = []) {
    this.authors = given?.authors ?? {};
    this.users = given?.users ?? {};
    this.surfaces = given?.surfaces ?? [];
    this.topics = given?.topics ?? topics;
    this.posts = new Map(); // post id → { author_id, topic, created_at }
  }

  /** Remember what was said of posts. */
  learn(posts) {
    for (const post of posts) {
      const known = this.posts.get(post.post_id) ?? {};
      const topic = post.topics?.[0] ?? known.topic ?? this.authors[post.author_id]?.topic;
      this.posts.set(post.post_id, {
        author_id: post.author_id,
        topic,
        created_at: post.created_at || known.created_at || 0,
      });
    }
  }

  author(id) {
    return this.authors[id]?.name ?? (id === "0" ? "unknown author" : `author ${short(id)}`);
  }
  topic(post) {
    return this.posts.get(post.post_id)?.topic ?? this.authors[post.author_id]?.topic;
  }

  user(id) {
    const known = this.users[id];
    return known ? `${known.name}, ${known.likes.join(" and ")}` : id === "0" ? "anonymous" : `user ${short(id)}`;
  }

  /** The hue of a topic, in degrees. */
  hue(topic) {
    const place = this.topics.indexOf(topic);
    return place < 0 ? 0 : 20 + Math.round((place * 360) / this.topics.length);
  }
}

export const short = (id) => (id.length > 8 ? `…${id.slice(-5)}` : id);

/** `photo_expand` → `photo expand`. */
export const words = (name) => name.replaceAll("_", " ");

/** Seconds → `3 h`, `2 d`. */
export function span(seconds) {
  const size = Math.abs(seconds);
  if (size < 3600) return `${Math.round(seconds / 60)} min`;
  return size < 2 * 86400 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

/** Numbers that line up, with a real minus. */
export const number = (value, digits = 2) => value.toFixed(digits).replace("-", "−");
export const percent = (share) => (share < 0.0005 ? "<0.1 %" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);
