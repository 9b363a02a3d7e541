// What stands in the head of the page: comparing, a request of one's own, and taking one along as text.

import { useKey } from "./api.js";
import { byId, h, rebuild } from "./dom.js";
import { asCurl, asPython, body, lists, parse } from "./state.js";

export function drawTools(app) {
  const { state } = app,
    two = state.sides.length === 2;
  const button = (key, text, press, more = {}) =>
    h("button", { type: "button", "data-key": key, id: key, onclick: press, ...more }, text);
  const url = new URL(state.source, location.href).href;
  const copy = (key, text, make) =>
    button(key, text, async (event) => {
      const told = await copied(make());
      if (told) flash(event.target, text);
    });
  rebuild(byId("tools"), [
    two &&
      choice(
        "Edit",
        [
          ["0", "A"],
          ["1", "B"],
        ],
        String(state.side),
        (side) => app.edit(Number(side)),
      ),
    lists(state) === 2 &&
      h(
        "label",
        { class: "check" },
        h("input", {
          type: "checkbox",
          id: "hold",
          "data-key": "hold",
          ...(app.held && { checked: true }),
          onchange: (event) => app.hold(event.target.checked),
        }),
        "Hold A",
      ),
    button("compare", "Compare", () => app.compare(), { "aria-pressed": String(two) }),
    app.versions.length === 2 &&
      button("checkpoints", "Checkpoints", () => app.compareCheckpoints(), {
        "aria-pressed": String(state.versions.length === 2),
        title: `Side by side: ${app.versions.join(" and ")}`,
      }),
    button("paste", "Request…", () => openRequest(app)),
    copy("curl", "curl", () => asCurl(url, body(state), state.versions[state.side])),
    copy("python", "Python", () => asPython(url, body(state), state.versions[state.side])),
    copy("link", "Link", () => location.href),
  ]);
}

export function drawSource(app) {
  const { state } = app,
    hasBoth = app.canRetrieve && state.sides.some((request) => request.candidates.length);
  rebuild(byId("source"), [
    h(
      "label",
      { class: "check" },
      h("input", {
        type: "checkbox",
        id: "one",
        "data-key": "one",
        checked: state.onePer,
        onchange: (event) => app.onePerAuthor(event.target.checked),
      }),
      "best of each author",
    ),
    hasBoth &&
      choice(
        "Posts",
        [
          ["recommend", "of the corpus"],
          ["rank", "of the request"],
        ],
        state.source,
        (source) => app.from(source),
      ),
  ]);
}

function choice(name, options, chosen, choose) {
  const key = name.toLowerCase();
  return h(
    "fieldset",
    { class: "choice" },
    h("legend", { class: "unseen" }, name),
    options.map(([value, text]) =>
      h(
        "label",
        {},
        h("input", {
          type: "radio",
          name: key,
          value,
          "data-key": `${key} ${value}`,
          checked: value === chosen,
          onchange: () => choose(value),
        }),
        h("span", {}, text),
      ),
    ),
  );
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // not allowed, or not served over https: to be copied by hand
    show(
      h("h2", { id: "request-title" }, "Copy"),
      h("textarea", { readonly: true, "aria-label": "Text to copy" }, text),
      h("div", { class: "tools" }, closing("Close")),
    );
    byId("request").querySelector("textarea").select();
    return false;
  }
}

function flash(button, text) {
  button.textContent = "copied";
  setTimeout(() => {
    button.textContent = text;
  }, 1200);
}

const closing = (text) => h("button", { type: "button", onclick: () => byId("request").close() }, text);

function show(...children) {
  byId("request").replaceChildren(...children);
  byId("request").showModal();
}

function openRequest(app) {
  const text = h("textarea", { id: "text", spellcheck: "false", "aria-label": "Request as JSON" });
  text.value = JSON.stringify(body(app.state), null, 1);
  const told = h("p", { class: "against", role: "alert" });
  const use = async (event) => {
    event.preventDefault();
    try {
      app.use(parse(text.value));
      byId("request").close();
    } catch (error) {
      told.textContent = `This is no request: ${error.message}`;
    }
  };
  show(
    h(
      "form",
      { onsubmit: use },
      h("h2", { id: "request-title" }, "A request of your own"),
      h(
        "p",
        { class: "soft" },
        "As for /rank; without candidates, as for /recommend. It is sent from this page to this service alone.",
      ),
      text,
      told,
      h("div", { class: "tools" }, closing("Cancel"), h("button", { class: "main", id: "use" }, "Use it")),
    ),
  );
}

/** Ask for an API key, which stays in this page. */
export function askForKey(again) {
  const key = h("input", { type: "password", id: "key", autocomplete: "off" });
  const use = (event) => {
    event.preventDefault();
    useKey(key.value);
    byId("request").close();
    again();
  };
  show(
    h(
      "form",
      { onsubmit: use },
      h("h2", { id: "request-title" }, "This service wants an API key"),
      h("label", { class: "field" }, "Key", key),
      h("div", { class: "tools" }, h("button", { class: "main" }, "Use it")),
    ),
  );
}
