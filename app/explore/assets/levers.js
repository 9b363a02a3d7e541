// The time of the impression, and the weights of the score.

import { button, byId, h, rebuild } from "./dom.js";
import { meaning, number, span, words } from "./names.js";

export function drawLevers(/** @type {App} */ app) {
  const { state } = app;
  byId("levers-title").textContent = `Time and weights${state.sides.length === 2 ? ` of ${"AB"[state.side]}` : ""}`;
  rebuild(byId("time"), [timeSlider(app)]);
  rebuild(byId("weights"), app.actions.map((name) => weightSlider(app, name)));
}

function timeSlider(/** @type {App} */ app) {
  const { request, state } = app;
  if (!request.impression_ts) {
    const newest = Math.max(0, ...app.posts().map((post) => post.created_at ?? 0)) || Math.floor(Date.now() / 1000);
    const set = () =>
      app.change("time", "Gave the request a time", (/** @type {Side} */ changed) => {
        changed.impression_ts = state.start = newest + 3 * 3600;
      });
    return h("p", { class: "soft" }, "The request has no time, so every age is unknown. ", button("time", "Give it one", set));
  }
  const start = (state.start ??= request.impression_ts);
  const told = h("output", { class: "number" }, clock(request.impression_ts, start));
  const move = (/** @type {any} */ { target }) => {
    const seconds = start + Number(target.value) * 3600;
    told.textContent = clock(seconds, start);
    target.setAttribute("aria-valuetext", clock(seconds, start));
    const label = `Shown ${shifted(seconds - start)}`;
    app.change("time", label, (/** @type {Side} */ changed) => (changed.impression_ts = seconds), { redraw: false });
  };
  const hours = Math.round((request.impression_ts - start) / 3600);
  const range = { min: Math.min(-48, hours), max: Math.max(14 * 24, hours), step: 1, value: hours };
  const says = { "aria-valuetext": clock(request.impression_ts, start), oninput: move };
  return h("label", { class: "lever time" }, h("span", {}, "Shown at"), told, h("input", { type: "range", id: "clock", "data-key": "time", ...range, ...says }));
}

/** @param {number} shift seconds */
const shifted = (shift) => (shift ? `${span(shift)} ${shift > 0 ? "later" : "earlier"}` : "at the time of the start");

function clock(/** @type {number} */ seconds, /** @type {number} */ start) {
  const when = new Date(seconds * 1000).toLocaleString("en-GB", { timeZone: "UTC", dateStyle: "medium", timeStyle: "short" });
  return `${when} UTC${seconds === start ? "" : `, ${shifted(seconds - start)}`}`;
}

// A slider goes by the square root: fine near 0, and as far as −25 … 25.
const toPlace = (/** @type {number} */ weight) => Math.sign(weight) * Math.sqrt(Math.abs(weight));
const toWeight = (/** @type {number} */ place) => Math.round(Math.sign(place) * place * place * 100) / 100;
const kind = (/** @type {number} */ weight) => (weight > 0 ? "for" : weight < 0 ? "against" : "");

function weightSlider(/** @type {App} */ app, /** @type {string} */ name) {
  const weight = app.weightOf(name);
  const far = Math.max(5, Math.ceil(Math.abs(toPlace(weight))));
  const set = (/** @type {number} */ value) => {
    slider.setAttribute("aria-valuetext", number(value));
    lever.className = `lever ${kind(value)}`;
    const write = (/** @type {Side} */ changed) => (changed.weights = { ...app.weights(), [name]: value });
    app.change(`weight ${name}`, `Weight of ${words(name)} ${number(value)}`, write, { redraw: false });
  };
  const moved = () => {
    typed.value = String(toWeight(Number(slider.value)));
    set(Number(typed.value));
  };
  const written = () => {
    if (typed.value === "" || !Number.isFinite(Number(typed.value))) return;
    slider.value = String(toPlace(Number(typed.value)));
    set(Number(typed.value));
  };
  const typed = h("input", { type: "number", step: "any", value: weight, "data-key": `typed ${name}`, "data-weight": name, "aria-label": `Weight of ${words(name)}, typed`, onchange: written });
  const slider = h("input", {
    type: "range", "data-key": `weight ${name}`, "data-action": name, "aria-label": `Weight of ${words(name)}`, min: -far, max: far, step: 0.1,
    value: toPlace(weight).toFixed(1), "aria-valuetext": number(weight), oninput: moved,
  });
  const open = button(`sweep ${name}`, "sweep", () => app.openSweep(name), { class: "quiet", "aria-label": `Sweep the weight of ${words(name)}` });
  const lever = h("div", { class: `lever ${kind(weight)}` }, h("span", { title: meaning(name) }, words(name)), open, typed, slider);
  return lever;
}
