// What stands in the head of the page: stories, undo, comparing, a request of one's own, and taking one along as text.

import { useKey } from "./api.js";
import { button, byId, check, choice, h, rebuild } from "./dom.js";
import { pack } from "./link.js";
import { lower } from "./names.js";
import { asCurl, asPython, parse } from "./state.js";
import { STORIES } from "./stories.js";

export function drawTools(/** @type {App} */ app) {
  const { state } = app;
  const two = state.sides.length === 2;
  const press = (/** @type {string} */ key, /** @type {string} */ text, /** @type {() => void} */ act, more = {}) => button(key, text, act, { id: key, ...more });
  const url = new URL(state.source, location.href).href;
  const copy = (/** @type {string} */ key, /** @type {string} */ text, /** @type {() => string | Promise<string>} */ make) =>
    button(key, text, async ({ target }) => (await copied(await make())) && flash(target, text), { id: key });
  const call = (/** @type {(url: string, sent: any) => string} */ as) => as(url, app.body(state.side));
  const undone = (/** @type {{label: string}[]} */ steps, /** @type {string} */ keys) => ({ disabled: !steps.length, title: `${steps[steps.length - 1]?.label ?? "nothing"} (${keys})` });
  rebuild(byId("tools"), [
    press("undo", "Undo", () => app.undo(), undone(app.past.back, "Ctrl+Z")),
    press("redo", "Redo", () => app.redo(), undone(app.past.ahead, "Ctrl+Shift+Z")),
    press("restart", "Start over", () => app.restart()),
    two && choice("Edit", [["0", "A"], ["1", "B"]], String(state.side), (side) => app.edit(Number(side))),
    two && check("hold", "Hold A", !!app.held, (on) => app.hold(on)),
    press("compare", "Compare", () => app.compare(), { "aria-pressed": String(two) }),
    press("paste", "Request…", () => openRequest(app)),
    copy("curl", "curl", () => call(asCurl)),
    copy("python", "Python", () => call(asPython)),
    copy("link", "Link", async () => new URL(`#${await pack(app.state)}`, location.href).href),
  ]);
}

/** The stories as links, what the open one says, and its one thing to try. @param {App} app */
export function drawStory(app) {
  const { state } = app;
  const told = STORIES[state.story];
  const links = Object.keys(STORIES).filter((name) => app.story(name)).map((name) => link(name, STORIES[name].title(app), state.story === name));
  const corpus = app.canRetrieve && link("corpus", `All ${app.info.retrieval.corpus.posts} posts`, state.story === "corpus");
  rebuild(byId("stories"), [...links, corpus]);
  const hint = app.hint();
  byId("story-text").textContent = told
    ? hint
      ? told.text(app, app.request)
      : told.done
    : state.story === "corpus"
      ? `The service finds ${app.request.k} posts of the corpus for this user, and ranks them. The list is long: changes may be far down, and the line below the title names the largest.`
      : state.story === "own"
        ? "This checkpoint carries no example: the ids are made up, the weights are its own defaults."
        : "A request of your own.";
  rebuild(byId("hint"), [hint && button("try", `Try it: ${lower(hint.text)}`, hint.act, { id: "try", class: "main" })]);
}

/** @param {string} name @param {string} text @param {boolean} isOpen */
const link = (name, text, isOpen) => h("a", { href: `#story=${name}`, "data-key": `story ${name}`, "aria-current": isOpen ? "page" : null }, text);

export function drawSource(/** @type {App} */ app) {
  const { state } = app;
  const hasBoth = app.canRetrieve && state.sides.some((request) => request.candidates.length);
  rebuild(byId("source"), [
    state.source === "recommend" && check("one", "best of each author", state.onePer, (on) => app.onePerAuthor(on)),
    hasBoth && choice("Posts", [["rank", app.request.candidates.length === 1 ? "this post" : `these ${app.request.candidates.length} posts`], ["recommend", "all posts"]], state.source, (source) => app.from(source)),
  ]);
}

async function copied(/** @type {string} */ text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // not allowed, or not served over https: to be copied by hand
    const area = h("textarea", { readonly: true, "aria-label": "Text to copy" }, text);
    show(h("h2", { id: "request-title" }, "Copy"), area, h("div", { class: "tools" }, closing("Close")));
    area.select();
    return false;
  }
}

function flash(/** @type {HTMLElement} */ pressed, /** @type {string} */ text) {
  pressed.textContent = "copied";
  setTimeout(() => (pressed.textContent = text), 1200);
}

const closing = (/** @type {string} */ text) => button("close", text, () => byId("request").close());

/** @param {...any} children */ function show(...children) {
  byId("request").replaceChildren(...children);
  byId("request").showModal();
}

function openRequest(/** @type {App} */ app) {
  const text = h("textarea", { id: "text", spellcheck: "false", "aria-label": "Request as JSON" });
  text.value = JSON.stringify(app.body(app.state.side), null, 1);
  const told = h("p", { class: "against", role: "alert" });
  const use = (/** @type {any} */ event) => {
    event.preventDefault();
    try {
      app.use(parse(text.value));
      byId("request").close();
    } catch (error) {
      told.textContent = `This is not a request: ${/** @type {Error} */ (error).message}`;
    }
  };
  const about = "A body of /rank, or without candidates of /recommend. This page sends it only to this service.";
  const press = h("div", { class: "tools" }, closing("Cancel"), h("button", { class: "main", id: "use" }, "Use it"));
  show(h("form", { onsubmit: use }, h("h2", { id: "request-title" }, "A request of your own"), h("p", { class: "soft" }, about), text, told, press));
}

/** Ask for an API key, which stays in this page. @param {() => void} again */
export function askForKey(again) {
  const key = h("input", { type: "password", id: "key", autocomplete: "off" });
  const told = h("p", { class: "against", role: "alert" });
  const use = (/** @type {any} */ event) => {
    event.preventDefault();
    try {
      useKey(key.value.trim());
    } catch (error) {
      told.textContent = /** @type {Error} */ (error).message;
      return;
    }
    byId("request").close();
    again();
  };
  const press = h("div", { class: "tools" }, h("button", { class: "main" }, "Use it"));
  show(h("form", { onsubmit: use }, h("h2", { id: "request-title" }, "This service requires an API key"), h("label", { class: "field" }, "Key", key), told, press));
}
