// Asks /explain why the posts in sight stand where they stand, and /rank what several events do together.

import { call, isPassing } from "./api.js";
import { FOR_RETRIEVAL, without } from "./state.js";

const MOST = 12; // posts in the map
const PAUSE = 1; // seconds before asking again, where the refusal says none

/** What is asked of a side: the open post, the posts in the map, and the request of some of its posts. Scores are each post's own, so no others are sent.
 * @param {App} app @param {number} side */
function question(app, side) {
  const shown = app.shown(side);
  const open = shown.findIndex(({ key }) => key === app.state.open);
  const posts = /** @type {Shown[]} */ ([...new Set([...shown.slice(0, MOST), ...shown.slice(open, open + 2)])]);
  const { sent } = app.replies[side];
  const found = (/** @type {Shown} */ post) => ({ post_id: post.post_id, author_id: post.author_id, created_at: post.created_at ?? 0, ...app.names.codes(post) });
  const request = (/** @type {Shown[]} */ some) =>
    without({ ...sent, candidates: some.map((post) => sent.candidates?.[post.slot] ?? found(post)) }, FOR_RETRIEVAL);
  return { posts, request, open: /** @type {Shown | undefined} */ (shown[open]) };
}

/** The posts in lists that have no id twice: of several candidates with one id, /explain explains the first. @param {Shown[]} posts */
function withoutTwins(posts) {
  /** @type {Shown[][]} */ const lists = [];
  for (const post of posts) {
    const list = lists.find((each) => each.every(({ post_id }) => post_id !== post.post_id));
    if (list) list.push(post);
    else lists.push([post]);
  }
  return lists;
}

/** What a refusal says; where asking again can help, it is asked `again`. @param {any} refused @param {(seconds: number) => void} again */
function told(refused, again) {
  if (!isPassing(refused.status)) return refused.message;
  again(refused.retryAfter ?? PAUSE);
  return `${refused.message} Trying again.`;
}

/** What /explain says of a side's posts. Where another model answers than ranked them, they are ranked anew.
 * @param {App} app @param {number} side @param {any} body */
async function ask(app, side, body) {
  const { model, models } = app.replies[side];
  const { value } = await call("explain", body);
  if (value.model.version === (model ?? models.ranker).version) return value;
  setTimeout(() => app.rank(), 1000 * PAUSE); // some replicas may have another model for longer
  throw new Error("Another model answers now.");
}

/** The reasons of one side. What an earlier call got for the same question is not asked for again.
 * @param {App} app @param {number} side @param {(seconds: number) => void} again @returns {Promise<Explained>} */
export async function explainSide(app, side, again) {
  const { posts, request } = question(app, side);
  const { sent } = app.replies[side];
  const asked = JSON.stringify(request(posts));
  const before = app.explained[side];
  const isPart = before?.asked === asked && before.of.size > 0 && (before.message || before.refused);
  /** @type {Explained} */ const explained = { asked, of: new Map(), places: [], history: sent.history, groups: [], looked: null };
  if (isPart) Object.assign(explained, { ...before, message: undefined, refused: undefined });
  try {
    if (!isPart) Object.assign(explained, await askReasons(app, side, posts, request));
  } catch (/** @type {any} */ refused) {
    return { ...explained, message: told(refused, again) };
  }
  return { ...explained, ...(await askGroups(app, request(posts), posts, explained, again)) };
}

/** @param {App} app @param {number} side @param {Shown[]} posts @param {(posts: Shown[]) => any} request */
async function askReasons(app, side, posts, request) {
  /** @type {Map<string, any>} */ const of = new Map();
  /** @type {number[]} */ let places = [];
  for (const list of withoutTwins(posts)) {
    const value = await ask(app, side, { ...request(list), explain: list.map(({ post_id }) => post_id) });
    list.forEach(({ own }, at) => of.set(own, value.candidates[at]));
    places = value.events.place;
  }
  return { of, places };
}

/** How each head of each layer looks at the events for the open post alone.
 * @param {App} app @param {number} side @param {(seconds: number) => void} again */
export async function lookAt(app, side, again) {
  const { open, request } = question(app, side);
  const explained = app.explained[side];
  if (!open || explained.message || explained.looked?.post === open.own) return false;
  try {
    const value = await ask(app, side, { ...request([open]), explain: [open.post_id] });
    explained.looked = { post: open.own, ...value.candidates[0].attention };
  } catch (/** @type {any} */ refused) {
    explained.message = told(refused, again);
  }
  return true;
}

/** What leaving out several events at once changes: all of an author, of a topic, the whole history. Groups that were got before stay.
 * @param {App} app @param {any} request @param {Shown[]} posts its candidates @param {Explained} explained @param {(seconds: number) => void} again
 * @returns {Promise<Pick<Explained, "groups" | "refused">>} */
async function askGroups(app, request, posts, { of, groups: before }, again) {
  /** @type {Map<string, {key: string, name: string, places: number[]}>} */ const groups = new Map();
  const add = (/** @type {string} */ key, /** @type {string} */ name, /** @type {number} */ place) =>
    groups.set(key, { key, name, places: [...(groups.get(key)?.places ?? []), place] });
  request.history.forEach((/** @type {Event_} */ event, /** @type {number} */ place) => {
    const [author, topic] = [app.names.author(event.author_id), app.names.topic(event)];
    add(`author ${event.author_id}`, `all of ${author}`, place);
    if (topic && topic !== author) add(`topic ${topic}`, `all about ${topic}`, place);
  });
  const whole = request.history.map((/** @type {any} */ _, /** @type {number} */ place) => place);
  const several = [...groups.values()].filter(({ places }) => places.length > 1);
  const wanted = whole.length ? [...several, { key: "whole", name: "the whole history", places: whole }] : several;
  const some = wanted.slice(-app.info.limits.max_batch_requests);
  const missing = some.filter(({ key }) => !before.some((group) => group.key === key));
  if (!missing.length) return { groups: before };
  const requests = missing.map(({ places }) => ({ ...request, history: request.history.filter((/** @type {any} */ _, /** @type {number} */ at) => !places.includes(at)) }));
  /** @type {{candidates?: any[], error?: any}[]} */ let results;
  try {
    results = (await call("rank/batch", { requests })).value.results;
  } catch (error) {
    results = missing.map(() => ({ error }));
  }
  /** @type {Map<string, Explained["groups"][0]>} */ const got = new Map(before.map((group) => [group.key, group]));
  missing.forEach((group, at) => {
    const left = results[at].candidates;
    if (left) got.set(group.key, { ...group, changes: new Map(posts.map(({ own }, post) => [own, of.get(own).score - left[post].score])) });
  });
  const refusals = missing.map(({ name }, at) => ({ name, error: results[at].error })).filter(({ error }) => error);
  const names = refusals.map(({ name }) => `“${name}”`).join(", ");
  const first = refusals.find(({ error }) => isPassing(error.status)) ?? refusals[0];
  return {
    groups: some.flatMap(({ key }) => got.get(key) ?? []),
    refused: first && `No numbers for ${names}: ${told({ ...first.error, message: first.error.detail ?? first.error.message }, again)}`,
  };
}
