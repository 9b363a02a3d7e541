// Where the page begins: three stories out of the checkpoint's example, each with one thing to try.

import { AGAINST } from "./names.js";

/** A story of the example: its title, what it says, the request, what to try (null once it is done).
 * @type {Record<string, Story>} */
export const STORIES = {
  __proto__: null, // a name in a link is no property of every object
  report: {
    title: (app) => AGAINST[disliked(app, app.start)].title,
    text: (app, request) => `${app.names.user(request.user_id)}, has ${against(app, request).join(" an author. Remove ")}, and see what it cost that author's posts.`,
    make: (app, example) => (reported(app, example) < 0 ? null : example),
    done: "That was the story. Undo brings it back (Ctrl+Z); “why” says what moved a post; the next story is a link away.",
    hint: (app, request) => {
      const place = reported(app, request);
      if (place < 0) return null;
      const act = () => app.removeEvent(place);
      return { kind: "event", value: String(place), text: `Remove ${against(app, request)[1]}`, act };
    },
  },
  taste: {
    title: () => "A new taste",
    text: (app) => `Of this user the model knows four events and no id. Like a post about ${lastTopic(app)}, and see whose posts rise.`,
    make: (app, example) => {
      const history = example.history.filter(({ actions }) => !app.negative.some((name) => name in actions)).slice(-4);
      return app.names.nobody && app.names.topics.length && lastTopic(app) ? { ...example, user_id: app.names.nobody, history } : null;
    },
    done: "One event of a new kind. Like it again, or another topic; the line above the list says whom each like moves.",
    hint: (app, request) => {
      const topic = lastTopic(app);
      if (!topic || request.history.some((event) => app.names.topic(event) === topic)) return null;
      return { kind: "topic", value: topic, text: `Like ${topic}`, act: () => app.likeTopic(topic) };
    },
  },
  unknown: {
    title: () => "An unknown user",
    text: ({ names, start }) => `Nobody is signed in, and nothing has been read yet. Say that it is ${names.user(start.user_id)}: the id alone moves the posts.`,
    make: ({ names }, example) => (names.nobody ? { ...example, user_id: names.nobody, history: [] } : null),
    done: "Now the model knows who it is, and still nothing of what they read: add an event, or like a topic.",
    hint: (app, request) => {
      const id = app.start.user_id;
      if (request.user_id !== app.names.nobody || id === app.names.nobody) return null;
      return { kind: "user", value: id, text: `Be ${app.names.users[id]?.name ?? "the example's user"}`, act: () => app.setUser(id) };
    },
  },
};

/** @param {App} app @param {Side} request the place of the newest event that speaks against its author, or −1 */
const reported = (app, request) => request.history.findLastIndex(({ actions }) => app.negative.some((name) => name in actions));

/** @param {App} app @param {Side} request the action of that event */
const disliked = (app, request) => app.negative.find((name) => name in (request.history[reported(app, request)]?.actions ?? {})) ?? "report";

const TOLD = /** @type {Record<string, string[]>} */ ({
  report: ["reported", "the report"], block_author: ["blocked", "the block"], mute_author: ["muted", "the mute"], not_interested: ["turned down", "“not interested”"],
});
/** @param {App} app @param {Side} request what that event did, and what to remove @returns {string[]} */
const against = (app, request) => TOLD[disliked(app, request)];

/** @param {App} app @returns {string | undefined} the topic of the example's last post */
const lastTopic = (app) => app.start.candidates.length ? app.names.topic(app.start.candidates[app.start.candidates.length - 1]) : undefined;

/** A request for a checkpoint that carries no example: made-up ids, as many posts as one sees at a glance, and its own weights.
 * @param {any} shown the example of the API's description */
export function withoutExample(shown, actions) {
  const { weights, ...request } = shown;
  const history = request.history.map((/** @type {any} */ event) => {
    const known = event.actions.filter((/** @type {string} */ name) => actions.includes(name));
    return { ...event, actions: known.length ? known : actions.slice(0, 1) };
  });
  const more = Array.from({ length: 6 }, (_, place) => ({
    post_id: String(91 + place),
    author_id: String(11 + place),
    created_at: request.impression_ts - 3600 * (2 + 5 * place),
  }));
  return { ...request, history, candidates: [...request.candidates, ...more] };
}
