// What an edit has changed: its caption, and how far two lists agree.

import { lower, many, number, ordinal, signed } from "./names.js";

const FIRST = 10;

/** What is kept of a list to compare the next one with. @param {Shown[]} posts @returns {Map<string, Shown>} */
export const kept = (posts) => new Map(posts.map((post) => [post.key, post]));

/** What edits did to a list, in a sentence. @param {string[]} edits @param {Map<string, Shown>} before @param {Shown[]} posts @param {Names} names */
export function caption(edits, before, posts, names) {
  const did = edits.map((each, at) => (at ? lower(each) : each)).join(", then ");
  const both = posts.filter(({ key }) => before.has(key)).map((post) => change(/** @type {Shown} */ (before.get(post.key)), post));
  const moved = both.filter(({ places }) => places);
  const fresh = posts.length - both.length;
  const set = fresh ? ` ${many(fresh, "row")} new.` : "";
  if (!both.length) return `${did}: ${posts.length ? "another list" : "no posts"}.`;
  if (!fresh && both.every(({ score }) => score === 0)) return `${did}: no score changed; every score has the same bits.`;
  const mover = both.reduce((most, each) => (bigger(each, most) ? each : most));
  const { post, was, score, places } = mover;
  const who = names.post(post);
  if (!moved.length) {
    return `${did}: no post moved. The largest change of a score: ${who} ${Math.abs(score) < 0.001 ? "less than 0.001" : signed(score, 3)}.${set}`;
  }
  const [verb, size] = [places > 0 ? "rises" : "falls", many(Math.abs(places), "place")];
  const untouched = posts.length > FIRST && moved.every((each) => each.post.place > FIRST && each.was.place > FIRST);
  return (
    `${signed(score)}: ${lower(did)}, and ${who} ${verb} ${size}, from ${ordinal(was.place)} to ${ordinal(post.place)} ` +
    `(score ${number(was.score)} → ${number(post.score)}). ${many(moved.length, "post")} of ${posts.length} moved` +
    `${untouched ? `, all below the first ${FIRST}` : ""}.${set}`
  );
}

const change = (/** @type {Shown} */ was, /** @type {Shown} */ post) => ({ post, was, score: post.score - was.score, places: was.place - post.place });

/** @typedef {ReturnType<typeof change>} Change @param {Change} one @param {Change} other */ const bigger = (one, other) => {
  const further = Math.abs(one.places) - Math.abs(other.places);
  return further > 0 || (further === 0 && Math.abs(one.score) > Math.abs(other.score));
};

/** How far two lists agree: Kendall's τ of the posts in both, and how many of the first ten are in both.
 * @param {Shown[]} a @param {Shown[]} b */
export function agreement(a, b) {
  const places = new Map(b.map(({ key, place }) => [key, place]));
  const shared = a.filter(({ key }) => places.has(key)).map(({ key }) => /** @type {number} */ (places.get(key)));
  let order = 0;
  shared.forEach((one, at) => {
    for (const other of shared.slice(at + 1)) order += Math.sign(other - one);
  });
  const pairs = (shared.length * (shared.length - 1)) / 2;
  const first = Math.min(FIRST, a.length, b.length);
  const top = new Set(a.slice(0, first).map(({ key }) => key));
  const same = b.slice(0, first).filter(({ key }) => top.has(key)).length;
  return { tau: pairs ? order / pairs : 1, first, same, shared: shared.length };
}
