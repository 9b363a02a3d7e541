// The user, the history as a timeline, and what can be added to it.

import { button, byId, h, rebuild } from "./dom.js";
import { meaning, short, words } from "./names.js";
import { withKeys } from "./state.js";

const LIKED = { favorite: 1, dwell: 1 };

/** Draw both from the app's state. @param {App} app */
export function drawTimeline(app) {
  const { request } = app;
  const hint = app.hint();
  rebuild(byId("viewer"), [userChoice(app, hint), topicButtons(app, hint), eventForm(app)]);
  const dropped = request.history.length - app.info.architecture.history_length;
  const events = withKeys(request.history).map((event, place) => drawEvent(app, event, place, place < dropped, hint)).reverse();
  const none = h("li", { class: "soft none" }, "No events: the model knows the user's id alone.");
  rebuild(byId("events"), events.length ? events : [none]);
}

const tried = (/** @type {Hint | null} */ hint, /** @type {string} */ kind, /** @type {string} */ value) => (hint?.kind === kind && hint.value === value ? "try" : "");

function userChoice(/** @type {App} */ app, /** @type {Hint | null} */ hint) {
  const { names, request } = app;
  const ids = [...new Set([request.user_id, names.nobody, ...Object.keys(names.users)])].filter(Boolean);
  const options = ids.map((id) => h("option", { value: id, selected: id === request.user_id }, names.user(id)));
  const choose = (/** @type {any} */ event) => app.setUser(event.target.value);
  const box = h("select", { id: "user", "data-key": "user", onchange: choose, class: hint?.kind === "user" ? "try" : "" }, options);
  return h("label", { class: "field" }, "User", box);
}

function topicButtons(/** @type {App} */ app, /** @type {Hint | null} */ hint) {
  const { names } = app;
  if (!names.topics.length) return null;
  const like = (/** @type {string} */ topic) =>
    button(`like ${topic}`, topic, () => app.likeTopic(topic), {
      class: `topic chip ${tried(hint, "topic", topic)}`,
      "data-topic": topic,
      vars: { "--hue": names.hue(topic) },
    });
  const chips = h("div", { class: "chips" }, names.topics.map(like));
  return h("div", { class: "field", role: "group", "aria-label": "Like a topic" }, h("span", {}, "Like a topic"), chips);
}

/** The authors that can be chosen, those met first by name. @param {App} app @param {string[]} more @returns {any[]} */
function authors(app, more = []) {
  const { names, request } = app;
  const met = [...more, ...request.history, ...request.candidates, ...app.posts()].map((each) => (typeof each === "string" ? each : each.author_id));
  const ids = [...new Set([...met, ...Object.keys(names.authors)])].sort((a, b) => names.author(a).localeCompare(names.author(b)));
  return ids.map((id) => h("option", { value: id }, [...new Set([names.author(id), names.authors[id]?.topic])].filter(Boolean).join(", ")));
}

/** A choice of an author, filled when it is first touched: a list of them may be long, and stand in many rows.
 * @param {App} app @param {string} key @param {string} label @param {string} chosen @param {(id: string) => void} choose */
export function authorChoice(app, key, label, chosen, choose) {
  const box = h("select", { "data-key": key, "aria-label": label, onchange: () => choose(box.value) }, h("option", { value: chosen }, app.names.author(chosen)));
  const fill = () => {
    if (box.options.length > 1) return;
    box.replaceChildren(...authors(app, [chosen]));
    box.value = chosen;
  };
  for (const kind of ["pointerdown", "focus"]) box.addEventListener(kind, fill);
  return box;
}

function eventForm(/** @type {App} */ app) {
  const author = h("select", { id: "author", "data-key": "author", "aria-label": "Author" }, authors(app));
  const options = app.actions.map((name) => h("option", { value: name, title: meaning(name) }, words(name)));
  const action = h("select", { id: "action", "data-key": "action", "aria-label": "Action" }, options);
  author.value = app.chosen.author ?? author.options[0]?.value;
  action.value = app.chosen.action ?? app.actions[0];
  const add = (/** @type {any} */ event) => {
    event.preventDefault();
    app.chosen = { author: author.value, action: action.value };
    app.addEvent(author.value, { [action.value]: 1 });
  };
  return h("form", { class: "field add", onsubmit: add }, h("span", {}, "Add an event"), author, action, h("button", { "data-key": "add" }, "Add"));
}

function drawEvent(/** @type {App} */ app, /** @type {Event_ & {key: string}} */ event, /** @type {number} */ place, /** @type {boolean} */ isDropped, /** @type {Hint | null} */ hint) {
  const { names } = app;
  const topic = names.topic(event);
  const author = names.post(event);
  const { key } = event; // without its place: what has the focus keeps it when the event moves
  const edit = (/** @type {string} */ label, /** @type {(event: Event_) => void} */ change) =>
    app.change(`event ${key}`, label, (/** @type {Side} */ request) => change(request.history[place]));
  const one = ([/** @type {string} */ name, /** @type {number} */ value]) =>
    h(
      "button",
      {
        type: "button",
        class: `chip ${app.weightOf(name) < 0 ? "against" : ""}`,
        "data-key": `${key} ${name}`,
        title: meaning(name),
        "aria-label": `Remove ${words(name)} from the event with ${author}`,
        onclick: () => edit(`Removed “${words(name)}” from event ${place + 1}`, (changed) => delete changed.actions[name]),
      },
      words(name),
      value === 1 ? "" : ` ${value}`,
      h("span", { class: "cross", "aria-hidden": "true" }, "×"),
    );
  const added = (/** @type {any} */ { target }) =>
    edit(`Added “${words(target.value)}” to event ${place + 1}`, (changed) => (changed.actions[target.value] = 1));
  const more = h(
    "select",
    { class: "chip more", "data-key": `${key} more`, "aria-label": `Add an action to the event with ${author}`, onchange: added },
    h("option", { value: "" }, "+"),
    app.actions.filter((name) => !(name in event.actions)).map((name) => h("option", { value: name }, words(name))),
  );
  const about = [event.dwell_time ? `${event.dwell_time} s` : "", names.surfaces[event.product_surface ?? 0] ?? "", names.coded(event)].filter(Boolean).join(" · ");
  const press = (/** @type {string} */ what, /** @type {string} */ sign, /** @type {string} */ label, /** @type {() => void} */ act, off = false) =>
    button(`${key} ${what}`, sign, act, { class: `quiet ${what}`, "aria-label": label, disabled: off });
  const isTried = tried(hint, "event", String(place));
  return h(
    "li",
    { class: `event ${isDropped ? "dropped" : ""} ${isTried}`, "data-event": place, vars: { "--hue": names.hue(topic) }, "data-topic": topic ?? "" },
    isTried && h("p", { class: "try-label" }, "try removing this"),
    h(
      "div",
      { class: "head" },
      h("span", { class: "soft number" }, String(place + 1)),
      h("strong", { title: `post ${event.post_id}` }, author),
      h("span", { class: "soft" }, [topic, about || short(event.post_id)].filter(Boolean).join(" · ")),
      press("later", "↑", `Move the event with ${author} later`, () => app.moveEvent(place, place + 1), place === app.request.history.length - 1),
      press("earlier", "↓", `Move the event with ${author} earlier`, () => app.moveEvent(place, place - 1), place === 0),
      press("remove", "×", `Remove the event with ${author}`, () => app.removeEvent(place)),
    ),
    h("div", { class: "chips" }, Object.entries(event.actions).map(one), more),
    isDropped && h("p", { class: "soft" }, "older than the model's window"),
  );
}

/** An event with a post of this author: one that is known here, else a made-up one.
 * @param {App} app @param {string} author @param {Record<string, number>} actions @returns {Event_} */
export function eventWith(app, author, actions) {
  const met = new Set(app.request.history.map((event) => event.post_id));
  const theirs = [...app.names.posts].filter(([, post]) => post.author_id === author).map(([id]) => id);
  const post = theirs.find((id) => !met.has(id)) ?? theirs[0] ?? app.unseen();
  return { post_id: post, author_id: author, actions, dwell_time: actions.dwell ? 12 : 0, ...app.names.codes({ post_id: post }) };
}

/** @param {string[]} known @returns {Record<string, number>} */
export const liked = (known) => Object.fromEntries(Object.entries(LIKED).filter(([name]) => known.includes(name)));
