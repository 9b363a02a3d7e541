// Requests as the page keeps them, what is sent of them, and the call as text.

export const FOR_RETRIEVAL = ["k", "exclude", "exclude_history", "topics", "min_score", "max_age_seconds"];
const LEFT_OUT = ["top_k", "actions_wanted", "reply", "request_id", "score", "explore"]; // the page shows all posts by the sum, and all actions

/** A request as the page keeps it: lists of objects, ids as text, actions and weights by name with their values.
 * @param {any} request @param {string[]} actions @returns {Side} */
export function normal(request, actions) {
  if (request.context !== undefined) throw new Error("a context exists only in the service; give user_id and history instead");
  if (typeof request.weights === "string") throw new Error("give each weight by its action, since the page draws and moves them");
  const kept = without(request, LEFT_OUT);
  const named = (/** @type {any} */ taken) =>
    Object.fromEntries(entries(taken, actions).map(([name, value]) => [actions[Number(name)] ?? name, value]));
  const history = rows(request.history).map((event, place) => ({ ...withTextIds(event, `history[${place}]`), actions: named(event.actions) }));
  if (request.weights) kept.weights = named(request.weights);
  const candidates = rows(request.candidates).map((post, place) => withTextIds(post, `candidates[${place}]`));
  return { ...kept, user_id: textId(request, "user_id"), history, candidates };
}

/** An id as text. `where`: what the request calls the item that must have it. @param {any} item @param {string} name @param {string} [where] */
function textId(item, name, where) {
  const id = item?.[name];
  if (id === undefined || id === null) throw new Error(`${name}${where ? ` of ${where}` : ""} is missing; the service ranks nothing without it`);
  return String(id);
}

const withTextIds = (/** @type {any} */ item, /** @type {string} */ where) => ({ ...item, post_id: textId(item, "post_id", where), author_id: textId(item, "author_id", where) });
/** @param {any} taken names, names with values, or an integer whose bits are actions @param {string[]} actions @returns {[string, number][]} */
function entries(taken = [], actions) {
  if (Array.isArray(taken)) return taken.map((name) => [name, 1]);
  if (typeof taken === "object") return Object.entries(taken);
  const mask = BigInt(taken);
  if (mask >> BigInt(actions.length)) throw new Error(`${taken} has bits beyond the ${actions.length} actions`);
  return actions.filter((_, place) => (mask >> BigInt(place)) & 1n).map((name) => [name, 1]);
}

/** @param {any} items @returns {any[]} */ function rows(items = []) {
  if (Array.isArray(items)) return items;
  const names = Object.keys(items);
  return (items[names[0]] ?? []).map((/** @type {any} */ _, /** @type {number} */ row) =>
    Object.fromEntries(names.map((name) => [name, items[name][row]])),
  );
}

/** The posts, each with a `key` of its own: its id or, where an earlier one has that id, how many have it too.
 * @template {{post_id: string}} P @param {P[]} posts @returns {(P & {key: string})[]} */
export function withKeys(posts) {
  /** @type {Map<string, number>} */ const met = new Map();
  return posts.map((post) => {
    const count = 1 + (met.get(post.post_id) ?? 0);
    met.set(post.post_id, count);
    return { ...post, key: count === 1 ? post.post_id : `${post.post_id} no. ${count}` };
  });
}

/** A request's text as a value; numbers that JavaScript would round stay text. @param {string} text */
export function parse(text) {
  const reviver = (/** @type {string} */ _, /** @type {any} */ value, /** @type {any} */ context) => {
    if (typeof value !== "number" || !Number.isInteger(value) || Number.isSafeInteger(value)) return value;
    if (!context?.source) throw new Error("send ids as text: this browser rounds them");
    return context.source;
  };
  return JSON.parse(text, /** @type {any} */ (reviver));
}

/** What is sent for a side. @param {State} state @param {number} side @returns {any} */
export function body(state, side) {
  const { candidates, ...request } = state.sides[Math.min(side, state.sides.length - 1)];
  const history = request.history.map((event) => {
    const { actions } = event;
    return { ...event, actions: Object.values(actions).every((value) => value === 1) ? Object.keys(actions) : actions };
  });
  const sent = { ...request, history };
  if (state.source === "recommend") return sent;
  return without({ ...sent, candidates }, FOR_RETRIEVAL);
}

/** @param {Record<string, any>} request @param {string[]} names */
export const without = (request, names) => Object.fromEntries(Object.entries(request).filter(([name]) => !names.includes(name)));

/** The call as a command. @param {string} url @param {any} sent */
export function asCurl(url, sent) {
  return `curl -s '${url}' -H 'content-type: application/json' -d '${JSON.stringify(sent).replaceAll("'", "'\\''")}'`;
}

/** The call as a program. @param {string} url @param {any} sent */
export function asPython(url, sent) {
  const text = JSON.stringify(sent).replaceAll("\\", "\\\\").replaceAll("'", "\\'");
  return [
    "import json",
    "import urllib.request",
    "",
    `request = json.loads('${text}')`,
    `call = urllib.request.Request('${url}', json.dumps(request).encode(), {"content-type": "application/json"})`,
    "reply = json.load(urllib.request.urlopen(call))",
    'for post in sorted(reply["candidates"], key=lambda post: post["rank"]):',
    '    print(post["rank"], post["post_id"], post["score"])',
  ].join("\n");
}
