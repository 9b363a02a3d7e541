// The user, the history as a timeline, and what can be added to it.

import { byId, h, rebuild } from "./dom.js";
import { short, words } from "./names.js";

const LIKED = { favorite: 1, dwell: 1 };

/** Draw both from the app's state. */
export function drawTimeline(app) {
  const { request } = app;
  rebuild(byId("viewer"), [userChoice(app), topicButtons(app), eventForm(app)]);
  const dropped = app.replies[app.state.side]?.history_dropped ?? 0;
  const events = request.history.map((event, place) => drawEvent(app, event, place, place < dropped)).reverse();
  rebuild(
    byId("events"),
    events.length ? events : [h("li", { class: "soft none" }, "No events: the model knows the user's id alone.")],
  );
}

function userChoice(app) {
  const { names, request } = app;
  const ids = [...new Set([request.user_id, "0", ...Object.keys(names.users)])];
  const choose = (event) =>
    app.change("user", (changed) => {
      changed.user_id = event.target.value;
    });
  const options = ids.map((id) => h("option", { value: id, selected: id === request.user_id }, names.user(id)));
  return h(
    "label",
    { class: "field" },
    "User",
    h("select", { id: "user", "data-key": "user", onchange: choose }, options),
  );
}

function topicButtons(app) {
  const { names } = app;
  if (!names.topics.length) return null;
  const like = (topic) =>
    h(
      "button",
      {
        type: "button",
        class: "topic chip",
        "data-key": `like ${topic}`,
        "data-topic": topic,
        vars: { "--hue": names.hue(topic) },
        onclick: () => app.likeTopic(topic),
      },
      topic,
    );
  return h(
    "div",
    { class: "field", role: "group", "aria-label": "Like a topic" },
    h("span", {}, "Like a topic"),
    h("div", { class: "chips" }, names.topics.map(like)),
  );
}

function eventForm(app) {
  const { names, request } = app;
  const met = [...request.history, ...app.posts()].map((post) => post.author_id);
  const ids = [...new Set([...met, ...Object.keys(names.authors)])].sort((a, b) =>
    names.author(a).localeCompare(names.author(b)),
  );
  const author = h(
    "select",
    { id: "author", "data-key": "author", "aria-label": "Author" },
    ids.map((id) =>
      h("option", { value: id }, [names.author(id), names.authors[id]?.topic].filter(Boolean).join(", ")),
    ),
  );
  const action = h(
    "select",
    { id: "action", "data-key": "action", "aria-label": "Action" },
    app.actions.map((name) => h("option", { value: name }, words(name))),
  );
  author.value = app.chosen.author ?? ids[0];
  action.value = app.chosen.action ?? app.actions[0];
  const add = (event) => {
    event.preventDefault();
    app.chosen = { author: author.value, action: action.value };
    app.addEvent(author.value, { [action.value]: 1 });
  };
  return h(
    "form",
    { class: "field add", onsubmit: add },
    h("span", {}, "Add an event"),
    author,
    action,
    h("button", { "data-key": "add" }, "Add"),
  );
}

function drawEvent(app, event, place, isDropped) {
  const { names } = app,
    topic = names.topic(event),
    author = names.author(event.author_id);
  const key = `${event.post_id} ${place}`;
  const edit = (change) => app.change(`event ${key}`, (request) => change(request.history[place], request));
  const taken = Object.entries(event.actions).map(([name, value]) =>
    h(
      "button",
      {
        type: "button",
        class: `chip ${app.weightOf(name) < 0 ? "against" : ""}`,
        "data-key": `${key} ${name}`,
        "aria-label": `Remove ${words(name)} from the event with ${author}`,
        onclick: () =>
          edit((changed) => {
            delete changed.actions[name];
          }),
      },
      words(name),
      value === 1 ? "" : ` ${value}`,
      h("span", { class: "cross", "aria-hidden": "true" }, "×"),
    ),
  );
  const more = h(
    "select",
    {
      class: "chip more",
      "data-key": `${key} more`,
      "aria-label": `Add an action to the event with ${author}`,
      onchange: (chosen) =>
        edit((changed) => {
          changed.actions[chosen.target.value] = 1;
        }),
    },
    h("option", { value: "" }, "+"),
    app.actions.filter((name) => !(name in event.actions)).map((name) => h("option", { value: name }, words(name))),
  );
  const about = [event.dwell_time ? `${event.dwell_time} s` : "", names.surfaces[event.product_surface ?? 0] ?? ""]
    .filter(Boolean)
    .join(" · ");
  return h(
    "li",
    {
      class: `event ${isDropped ? "dropped" : ""}`,
      "data-event": place,
      vars: { "--hue": names.hue(topic) },
      "data-topic": topic ?? "",
    },
    h(
      "div",
      { class: "head" },
      h("strong", { title: `post ${event.post_id}` }, author),
      h("span", { class: "soft" }, [topic, about || short(event.post_id)].filter(Boolean).join(" · ")),
      h(
        "button",
        {
          type: "button",
          class: "quiet remove",
          "data-key": `${key} remove`,
          "aria-label": `Remove the event with ${author}`,
          onclick: () =>
            edit((_, request) => {
              request.history.splice(place, 1);
            }),
        },
        "×",
      ),
    ),
    h("div", { class: "chips" }, taken, more),
    isDropped && h("p", { class: "soft" }, "older than the model's window"),
  );
}

/** An event with a post of this author: one that is known here, else one that the model has never seen. */
export function eventWith(app, author, actions) {
  const met = new Set(app.request.history.map((event) => event.post_id));
  const theirs = [...app.names.posts].filter(([, post]) => post.author_id === author).map(([id]) => id);
  const post = theirs.find((id) => !met.has(id)) ?? theirs[0] ?? author;
  return { post_id: post, author_id: author, actions, dwell_time: actions.dwell ? 12 : 0 };
}

export const liked = (known) => Object.fromEntries(Object.entries(LIKED).filter(([name]) => known.includes(name)));
