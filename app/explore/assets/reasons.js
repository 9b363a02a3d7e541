// Asks /explain why the posts in sight stand where they stand, and /rank what several events do together.

import { call } from "./api.js";
import { FOR_RETRIEVAL, without } from "./state.js";

const MOST = 12; // posts in the map

/** What is asked of a side: its posts as candidates, where they are of the corpus only those in the map, since scores are each post's own.
 * The open one comes first: of several posts with one id the first is explained.
 * @param {App} app @param {number} side */
function question(app, side) {
  const shown = app.shown(side);
  const open = shown.findIndex(({ key }) => key === app.state.open);
  const posts = [...new Set([...shown.slice(0, MOST), ...shown.slice(open, open + 2)])];
  const { sent } = app.replies[side];
  const few = posts.map((post) => ({ post_id: post.post_id, author_id: post.author_id, created_at: post.created_at ?? 0, ...app.names.codes(post) }));
  const slot = shown[open]?.slot ?? 0;
  const candidates = sent.candidates ? [sent.candidates[slot], ...sent.candidates.toSpliced(slot, 1)] : few;
  return { posts, request: without({ ...sent, candidates }, FOR_RETRIEVAL), open: shown[open] };
}

/** The reasons of one side. @param {App} app @param {number} side @param {(seconds: number) => void} again @returns {Promise<Explained>} */
export async function explainSide(app, side, again) {
  const { posts, request } = question(app, side);
  const { sent } = app.replies[side];
  const empty = { of: new Map(), places: [], history: sent.history, groups: [], looked: null };
  try {
    const { value } = await call("explain", { ...request, explain: posts.map(({ post_id }) => post_id) });
    const of = new Map(posts.map(({ post_id }, at) => [post_id, value.candidates[at]]));
    return { ...empty, of, places: value.events.place, groups: await askGroups(app, request, of) };
  } catch (/** @type {any} */ refused) {
    if (refused.status === 429) again(refused.retryAfter ?? 1);
    return { ...empty, message: refused.message };
  }
}

/** How each head of each layer looks at the events for the open post alone. @param {App} app @param {number} side */
export async function lookAt(app, side) {
  const { open, request } = question(app, side);
  const explained = app.explained[side];
  if (!open || explained.message || explained.looked?.post === open.post_id) return false;
  const { value } = await call("explain", { ...request, explain: [open.post_id] }).catch((refused) => {
    explained.message = refused.message;
    return { value: null };
  });
  if (value) explained.looked = { post: open.post_id, ...value.candidates[0].attention };
  return true;
}

/** What leaving out several events at once changes: all of an author, of a topic, the whole history. @param {App} app @param {any} request
 * @param {Map<string, any>} of */
async function askGroups(app, request, of) {
  /** @type {Map<string, number[]>} */ const groups = new Map();
  const add = (/** @type {string | undefined} */ name, /** @type {number} */ place) => name && groups.set(name, [...(groups.get(name) ?? []), place]);
  request.history.forEach((/** @type {Event_} */ event, /** @type {number} */ place) => {
    const [author, topic] = [app.names.author(event.author_id), app.names.topic(event)];
    add(`all of ${author}`, place);
    add(topic && topic !== author ? `all about ${topic}` : undefined, place);
  });
  const whole = request.history.map((/** @type {any} */ _, /** @type {number} */ place) => place);
  const several = [...groups].filter(([, places]) => places.length > 1);
  const wanted = whole.length && (request.user_id !== "0" || request.candidates) ? [...several, ["the whole history", whole]] : several;
  const some = /** @type {[string, number[]][]} */ (wanted.slice(-app.info.limits.max_batch_requests));
  if (!some.length) return [];
  const requests = some.map(([, places]) => ({ ...request, history: request.history.filter((/** @type {any} */ _, /** @type {number} */ at) => !places.includes(at)) }));
  const { value } = await call("rank/batch", { requests });
  return some.map(([name, places], at) => {
    const left = new Map((value.results[at].candidates ?? []).map((/** @type {any} */ post) => [String(post.post_id), post.score]));
    const changes = new Map([...of].map(([id, found]) => [id, found.score - (left.get(id) ?? NaN)]));
    return { name, places, changes };
  });
}
