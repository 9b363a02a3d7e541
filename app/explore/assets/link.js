// The state as text for a link, and back: a link may come from anyone, so all of it is checked.

import { normal } from "./state.js";

const VERSION = 1; // of the links; those without one are of version 1

export async function pack(/** @type {State} */ state) {
  const text = JSON.stringify({ v: VERSION, ...state });
  const squeezed = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(squeezed).arrayBuffer());
  const letters = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  return letters.replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/** The state of a link; fields that are not of it are ignored. Raises an Error with a sentence for the reader. @param {string} text @param {string[]} actions @returns {Promise<State>} */
export async function unpack(text, actions) {
  let found;
  try {
    const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (each) => each.charCodeAt(0));
    const whole = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    found = JSON.parse(await new Response(whole).text());
  } catch {
    throw new Error("it is cut off or was changed on its way");
  }
  const state = { story: "", onePer: false, open: null, ...(isObject(found) && found) };
  if ((state.v ?? VERSION) !== VERSION) throw new Error("it was made by another version of this page");
  check(state, SHAPE, "it");
  state.sides = state.sides.map((/** @type {any} */ request) => kept(request, actions));
  if (!state.sides[state.side]) throw new Error("it edits a list that it does not hold");
  return /** @type {any} */ (Object.fromEntries(Object.keys(SHAPE).map((field) => [field, state[field]])));
}

const isObject = (/** @type {any} */ value) => typeof value === "object" && value !== null && !Array.isArray(value);
/** As the service reads ids: an integer's digits, or with text ids a text of 1 to 128 bytes. @param {any} value */
const isId = (value) => typeof value === "string" && value !== "" && value.isWellFormed() && new TextEncoder().encode(value).length <= 128;
const isNumber = (/** @type {any} */ value) => Number.isFinite(value);
const isNumbers = (/** @type {any} */ value) => isObject(value) && Object.values(value).every(isNumber);
const isTruth = (/** @type {any} */ value) => typeof value === "boolean";
const optional = (/** @type {(value: any) => boolean} */ rule) => (/** @type {any} */ value) => value == null || rule(value);
const listOf = (/** @type {(value: any) => boolean} */ rule, most = 4096) => (/** @type {any} */ value) =>
  Array.isArray(value) && value.length <= most && value.every(rule);

const SHAPE = {
  source: (/** @type {any} */ value) => ["rank", "recommend"].includes(value),
  sides: (/** @type {any} */ value) => listOf(isObject, 2)(value) && value.length > 0,
  side: (/** @type {any} */ value) => [0, 1].includes(value),
  onePer: isTruth,
  story: (/** @type {any} */ value) => typeof value === "string",
  open: optional((value) => typeof value === "string"),
  start: optional(isNumber),
};
const REQUEST = { user_id: isId, history: listOf(isObject), candidates: listOf(isObject), weights: optional(isNumbers), impression_ts: optional(isNumber) };
const POST = { post_id: isId, author_id: isId, created_at: optional(isNumber), dwell_time: optional(isNumber), codes: optional(listOf(isNumber, 64)) };

function check(/** @type {any} */ value, /** @type {Record<string, (value: any) => boolean>} */ shape, /** @type {string} */ name) {
  for (const [field, rule] of Object.entries(shape)) if (!rule(value[field])) throw new Error(`${name} has no valid “${field}”`);
}

function kept(/** @type {any} */ request, /** @type {string[]} */ actions) {
  let found;
  for (const rows of [request.history, request.candidates]) if (!optional((value) => typeof value === "object")(rows)) throw new Error("its request has no lists");
  try {
    found = normal(request, actions);
  } catch {
    throw new Error("it holds something other than a request");
  }
  check(found, REQUEST, "its request");
  for (const event of found.history) check(event, { ...POST, actions: isNumbers }, "an event");
  for (const post of found.candidates) check(post, POST, "a post");
  return found;
}
