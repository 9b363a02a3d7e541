// What the page shows, as one plain value: the requests are made from it, and the link holds it whole.

export const FOR_RETRIEVAL = ["k", "exclude", "exclude_history", "topics", "min_score", "max_age_seconds"];
const LEFT_OUT = ["top_k", "actions_wanted", "reply", "request_id"]; // the page shows all posts and all actions

/** A request as the page keeps it: lists of objects, ids as text, actions by name with their values. */
export function normal(request, actions) {
  const kept = Object.fromEntries(Object.entries(request).filter(([name]) => !LEFT_OUT.includes(name)));
  const history = rows(request.history).map((event) => ({
    ...withTextIds(event),
    actions: Object.fromEntries(entries(event.actions).map(([name, value]) => [actions[name] ?? name, value])),
  }));
  return {
    ...kept,
    user_id: String(request.user_id ?? 0),
    history,
    candidates: rows(request.candidates).map(withTextIds),
  };
}

const withTextIds = (item) => ({ ...item, post_id: String(item.post_id), author_id: String(item.author_id) });
const entries = (taken = []) => (Array.isArray(taken) ? taken.map((name) => [name, 1]) : Object.entries(taken));

function rows(items = []) {
  if (Array.isArray(items)) return items;
  const names = Object.keys(items);
  return (items[names[0]] ?? []).map((_, row) => Object.fromEntries(names.map((name) => [name, items[name][row]])));
}

/** A request's text as a value; numbers that JavaScript would round stay text. */
export function parse(text) {
  return JSON.parse(text, (_, value, context) => {
    if (typeof value !== "number" || !Number.isInteger(value) || Number.isSafeInteger(value)) return value;
    if (!context?.source) throw new Error("send ids as text: this browser rounds them");
    return context.source;
  });
}

/** How many lists stand side by side: two requests, or one by two checkpoints. */
export const lists = (state) => Math.max(state.sides.length, state.versions.length);

/** What is sent for a side. */
export function body(state, side = state.side) {
  const { candidates, ...request } = state.sides[Math.min(side, state.sides.length - 1)];
  const history = request.history.map((event) => ({
    ...event,
    actions: Object.values(event.actions).every((value) => value === 1) ? Object.keys(event.actions) : event.actions,
  }));
  if (state.source === "recommend") return { ...request, history };
  const sent = Object.entries({ ...request, history, candidates });
  return Object.fromEntries(sent.filter(([name]) => !FOR_RETRIEVAL.includes(name)));
}

/** The state as text for a link, and back. */
export async function pack(state) {
  const squeezed = new Blob([JSON.stringify(state)]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(squeezed).arrayBuffer());
  return btoa(String.fromCharCode(...bytes))
    .replaceAll("+", "-")
    .replaceAll("/", "_")
    .replace(/=+$/, "");
}

export async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (each) => each.charCodeAt(0));
  const whole = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const state = { versions: [], ...JSON.parse(await new Response(whole).text()) };
  const isWhole = ({ history, candidates }) => Array.isArray(history) && Array.isArray(candidates);
  if (
    !["rank", "recommend"].includes(state.source) ||
    ![0, 1].includes(state.side) ||
    !state.sides[state.side] ||
    !Array.isArray(state.versions) ||
    !state.sides.every(isWhole)
  ) {
    throw new Error("no state of this page"); // a link may come from anyone
  }
  return state;
}

/** The call as a command and as a program. */
export function asCurl(url, sent, version) {
  const named = version ? ` -H 'x-model-version: ${version}'` : "";
  return `curl -s '${url}' -H 'content-type: application/json'${named} -d '${JSON.stringify(sent).replaceAll("'", "'\\''")}'`;
}

export function asPython(url, sent, version) {
  const headers = { "content-type": "application/json", ...(version && { "x-model-version": version }) };
  const text = JSON.stringify(sent).replaceAll("\\", "\\\\").replaceAll("'", "\\'");
  return [
    "import json",
    "import urllib.request",
    "",
    `request = json.loads('${text}')`,
    `call = urllib.request.Request('${url}', json.dumps(request).encode(), ${JSON.stringify(headers)})`,
    "reply = json.load(urllib.request.urlopen(call))",
    'for post in sorted(reply["candidates"], key=lambda post: post["rank"]):',
    '    print(post["rank"], post["post_id"], post["score"])',
  ].join("\n");
}
