// The time of the impression, and the weights of the score.

import { byId, h, rebuild } from "./dom.js";
import { number, span, words } from "./names.js";

const DAY = 86400;

export function drawLevers(app) {
  rebuild(byId("time"), [timeSlider(app)]);
  rebuild(
    byId("weights"),
    app.actions.map((name) => weightSlider(app, name)),
  );
  byId("reset").disabled = !app.request.weights;
}

function timeSlider(app) {
  const { request, state } = app;
  if (!request.impression_ts) {
    const newest = Math.max(0, ...app.posts().map((post) => post.created_at ?? 0)) || Math.floor(Date.now() / 1000);
    const set = () =>
      app.change("time", (changed) => {
        changed.impression_ts = state.start = newest + 3 * 3600;
      });
    return h(
      "p",
      { class: "soft" },
      "The request has no time, so every age is unknown. ",
      h("button", { type: "button", "data-key": "time", onclick: set }, "Give it one"),
    );
  }
  const start = (state.start ??= request.impression_ts);
  const told = h("output", { class: "number" }, clock(request.impression_ts, start));
  const move = (event) => {
    const seconds = start + Number(event.target.value) * 3600;
    told.textContent = clock(seconds, start);
    event.target.setAttribute("aria-valuetext", clock(seconds, start));
    app.change(
      "time",
      (changed) => {
        changed.impression_ts = seconds;
      },
      { redraw: false },
    );
  };
  const hours = Math.round((request.impression_ts - start) / 3600);
  return h(
    "label",
    { class: "lever time" },
    h("span", {}, "Shown at"),
    told,
    h("input", {
      type: "range",
      id: "clock",
      "data-key": "time",
      min: Math.min(-48, hours),
      max: Math.max(14 * 24, hours),
      step: 1,
      value: hours,
      "aria-valuetext": clock(request.impression_ts, start),
      oninput: move,
    }),
  );
}

function clock(seconds, start) {
  const when = new Date(seconds * 1000).toLocaleString("en-GB", {
    timeZone: "UTC",
    day: "numeric",
    month: "short",
    year: "numeric",
    hour: "2-digit",
    minute: "2-digit",
  });
  const shift = seconds - start;
  return `${when} UTC${shift ? `, ${span(shift)} ${shift > 0 ? "later" : "earlier"}` : ""}`;
}

// A slider goes by the square root: fine near 0, and as far as −25 … 25.
const toPlace = (weight) => Math.sign(weight) * Math.sqrt(Math.abs(weight));
const toWeight = (place) => Math.round(Math.sign(place) * place * place * 100) / 100;

function weightSlider(app, name) {
  const weight = app.weightOf(name),
    far = Math.max(5, Math.ceil(Math.abs(toPlace(weight))));
  const told = h("output", { class: "number" }, number(weight));
  const move = (event) => {
    const value = toWeight(Number(event.target.value));
    told.textContent = number(value);
    event.target.setAttribute("aria-valuetext", number(value));
    app.change(
      `weight ${name}`,
      (changed) => {
        changed.weights = { ...app.weights(), [name]: value };
      },
      { redraw: false },
    );
    byId("reset").disabled = false;
  };
  return h(
    "label",
    { class: `lever ${weight > 0 ? "for" : weight < 0 ? "against" : ""}` },
    h("span", {}, words(name)),
    told,
    h("input", {
      type: "range",
      "data-key": `weight ${name}`,
      "data-action": name,
      min: -far,
      max: far,
      step: 0.1,
      value: toPlace(weight).toFixed(1),
      "aria-valuetext": number(weight),
      oninput: move,
    }),
  );
}
