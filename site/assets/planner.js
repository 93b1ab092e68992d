// The form, the address and the drawing of the planner page; planner.py computes.
const form = document.getElementById("settings");
const place = document.getElementById("answer");
const short = document.getElementById("short"); // on a phone, below the form while it scrolls
const loading = document.getElementById("loading");
const worker = new Worker(new URL("planner_worker.js", import.meta.url), { type: "module" });
let defaults = {};

const make = (tag, text, parent, cls) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (cls) node.className = cls;
  parent.append(node);
  return node;
};

function fill({ lists, defaults: given }) {
  defaults = given;
  for (const [name, values] of Object.entries(lists))
    for (const value of values) {
      const option = make("option", value || "none", form.elements[name]);
      option.value = value;
    }
  const asked = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(defaults)) {
    const field = form.elements[name];
    const wanted = asked.get(name) ?? value;
    if (field.type === "checkbox") field.checked = wanted !== "";
    else field.value = wanted;
    if (field.type !== "checkbox" && field.value !== wanted) field.value = value; // unknown
  }
  ask();
}

function settings() {
  const entries = Object.keys(defaults).map((name) => {
    const field = form.elements[name];
    return [name, field.type === "checkbox" ? (field.checked ? "1" : "") : field.value];
  });
  return Object.fromEntries(entries);
}

function ask() {
  const now = settings();
  const changed = Object.entries(now).filter(([name, value]) => value !== defaults[name]);
  const query = new URLSearchParams(changed).toString();
  history.replaceState(null, "", query ? `?${query}` : location.pathname);
  worker.postMessage(JSON.stringify(now));
}

function show(found) {
  place.replaceChildren();
  const shown = (bytes) => found.shown[bytes];
  const range = found.error ? "" : `${shown(found.peak)} to ${shown(found.most)}`;
  const words = { yes: "fit", maybe: "may fit", no: "do not fit" };
  short.textContent = found.error ?? `${range} ${words[found.fits]} into ${shown(found.budget)}`;
  short.className = found.fits === "yes" ? "verdict" : "wrong";
  if (found.error) return make("p", found.error, place, "wrong");
  const verdict = {
    yes: `It fits into ${shown(found.budget)}.`,
    maybe: `It may fit into ${shown(found.budget)}: run memlab plan, which predicts reserved memory.`,
    no: `It does not fit: ${shown(found.peak - found.budget)} more than ${shown(found.budget)}.`,
  }[found.fits];
  make("p", `Peak: ${shown(found.peak)} allocated, at the moment “${found.moment}”, and up to `
    + `${shown(found.most)} reserved. ${verdict}`, place,
    found.fits === "yes" ? "verdict fits" : "verdict wrong");
  const tokens = (count) => count.toLocaleString("en-US");
  const [sure, possible] = found.longest;
  const limit = possible > found.made_for
    ? ` (the model is made for ${tokens(found.made_for)})` : "";
  make("p", possible
    ? `Longest sequence that fits: between ${tokens(sure)} and ${tokens(possible)} tokens, `
      + `depending on what the allocator reserves${limit}.`
    : "Not even a sequence of one token fits.", place);
  make("p", `${tokens(found.parameters)} parameters; ${found.recipe}`, place);
  bars(found, shown);
  moments(found, shown);
}

function bars(found, shown) {
  const chart = make("div", undefined, place, "bars");
  const whole = Math.max(found.peak, found.budget);
  const terms = Object.entries(found.terms).filter(([, bytes]) => bytes);
  terms.sort((a, b) => b[1] - a[1]);
  for (const [name, bytes] of terms) {
    const row = make("div", undefined, chart, "bar");
    make("span", name, row);
    const track = make("span", undefined, row, "track");
    make("i", undefined, track).style.width = `${(100 * bytes) / whole}%`;
    make("span", shown(bytes), row, "bytes");
  }
}

function moments(found, shown) {
  const table = make("table", undefined, place);
  const head = make("tr", undefined, make("thead", undefined, table));
  ["moment", "bytes"].forEach((text) => make("th", text, head));
  const body = make("tbody", undefined, table);
  for (const [name, terms] of Object.entries(found.moments)) {
    const row = make("tr", undefined, body);
    const bytes = Object.values(terms).reduce((a, b) => a + b, 0);
    make("td", name === found.moment ? `${name} (peak)` : name, row);
    make("td", shown(bytes), row);
  }
}

function progress(loaded) {
  const size = Number(loading.dataset.bytes);
  const bar = loading.querySelector("progress");
  bar.max = size;
  bar.value = loaded;
  bar.previousSibling.textContent = loaded < size
    ? `Loading Python: ${(loaded / 1e6).toFixed(1)} of ${(size / 1e6).toFixed(1)} MB `
    : "Starting Python … ";
}

function failed(why) {
  loading.hidden = true;
  place.replaceChildren();
  make("p", `Python failed: ${why}`, place, "wrong");
}

worker.onmessage = ({ data }) => {
  if (data.loaded) return progress(data.loaded);
  if (data.choices) return fill(data.choices);
  if (data.failed) return failed(data.failed);
  if (data.settings !== JSON.stringify(settings())) return; // a newer question is on its way
  loading.hidden = true;
  show(data.answer);
  place.dataset.answer = JSON.stringify(data.answer);
  place.dataset.asked = data.settings;
};
worker.onerror = (event) => failed(event.message ?? "the worker failed to load");
form.addEventListener("input", ask);
form.addEventListener("submit", (event) => event.preventDefault());
