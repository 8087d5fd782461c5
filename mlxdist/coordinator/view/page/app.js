// The page: it fetches what the server has read from the run's files, draws it, and does so again when it has news.

import { Charts, runColor } from "./charts.js";
import { make } from "./format.js";
import { checkpointsOf, configOf, lossesOf, nodesOf, numbersOf, saidOf, stateOf } from "./tables.js";
import { drawTimeline, legendOf, stepSentence, stepTable } from "./timeline.js";

const REFRESH_MILLISECONDS = 700;
const byId = (id) => document.getElementById(id);
const state = { runs: [], chosen: 0, range: null, step: null, shown: null, connected: true };
const charts = new Charts(byId("charts"), (range) => { state.range = range; refresh(); });

async function get(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

let running = false, again = false;
async function refresh() {
  if (running) { again = true; return; }
  running = true;
  try {
    const query = state.step === null ? "" : `&step=${state.step}`;
    await Promise.all(state.runs.map(async (run) => {
      run.facts = await get(`facts?run=${run.place}`);
      run.name = run.facts.name;
      const names = charts.names(run.facts, run.place === state.chosen);
      const range = state.range ? `&from=${state.range[0]}&to=${state.range[1]}` : "";
      const asked = names.map((name) => `&name=${encodeURIComponent(name)}`).join("");
      run.curves = names.length ? await get(`curves?run=${run.place}&pixels=${Math.round(innerWidth)}${range}${asked}`) : {};
    }));
    state.shown = await get(`timeline?run=${state.chosen}${query}`);
    draw();
    setConnected(true);
  } catch (error) {
    setConnected(!(error instanceof TypeError));
  } finally {
    running = false;
    if (again) { again = false; setTimeout(refresh, REFRESH_MILLISECONDS); }
  }
}

function setConnected(connected) {
  state.connected = connected;
  const facts = state.runs[state.chosen]?.facts;
  if (!facts) return;
  const [kind, words] = stateOf(facts, connected);
  byId("state").className = kind;
  if (byId("state").textContent !== words) byId("state").textContent = words;
}

function draw() {
  const run = state.runs[state.chosen], { facts } = run;
  document.title = `${facts.step}${facts.total_steps ? ` / ${facts.total_steps}` : ""} · ${run.name} · mlxdist`;
  byId("title").textContent = run.name;
  byId("about").textContent = [facts.method?.toUpperCase(), facts.model?.split("/").at(-1), facts.promise,
    facts.created_at ? `begun ${new Date(facts.created_at).toLocaleString()}` : null].filter(Boolean).join(" · ");
  byId("path").textContent = facts.path;
  const share = facts.total_steps ? Math.round(100 * facts.step / facts.total_steps) : facts.state === "done" ? 100 : 0;
  byId("bar").setAttribute("aria-valuenow", share);
  byId("bar").firstElementChild.style.width = `${share}%`;
  byId("numbers").replaceChildren(...numbersOf(facts));
  replace(byId("nodes"), JSON.stringify([state.chosen, facts.nodes]), () => nodesOf(facts));
  drawRuns();
  drawStep();
  replace(byId("losses"), JSON.stringify(facts.troubles), () => {
    const [sentence, losses] = lossesOf(facts, showStep);
    byId("losses-sentence").textContent = sentence;
    return losses;
  });
  charts.range = state.range;
  charts.draw(state.runs, state.chosen);
  byId("zoom-out").hidden = !state.range;
  replace(byId("checkpoints"), JSON.stringify(facts.checkpoints), () => checkpointsOf(facts));
  replace(byId("config"), JSON.stringify(state.runs.map((one) => one.facts.config)), () => {
    const [settings, different] = configOf(state.runs);
    byId("config-summary").textContent = state.runs.length > 1 ? `All settings; ${different} differ and come first` : "All settings";
    if (state.runs.length > 1) byId("config-card").open = true;
    return settings;
  });
  replace(byId("said"), JSON.stringify(facts.said), () => saidOf(facts));
}

// Replaces the content only when it has changed, so that what is open, focused or selected stays.
function replace(place, key, content) {
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  const made = content();
  place.replaceChildren(...(Array.isArray(made) ? made : [made]).filter(Boolean));
}

function drawRuns() {
  byId("runs").hidden = state.runs.length < 2;
  replace(byId("runs"), JSON.stringify([state.chosen, ...state.runs.map((run) => run.name)]), () => state.runs.map((run) => {
    const swatch = make("i", {});
    swatch.style.background = runColor(run.place);
    const button = make("button", { type: "button", "aria-pressed": String(run.place === state.chosen) }, swatch, run.name);
    button.addEventListener("click", () => { state.chosen = run.place; state.step = null; refresh(); });
    return button;
  }));
}

function drawStep() {
  const { shown } = state;
  byId("timeline-section").hidden = shown.step === null;
  const key = JSON.stringify([state.chosen, shown, byId("lanes").clientWidth]);
  if (byId("lanes").dataset.key === key) return;
  byId("lanes").dataset.key = key;
  if (document.activeElement !== byId("step-input")) byId("step-input").value = shown.step ?? "";
  byId("step-before").disabled = shown.before === null || shown.before === undefined;
  byId("step-after").disabled = shown.after === null || shown.after === undefined;
  byId("step-last").setAttribute("aria-pressed", String(state.step === null));
  const sentence = make("span", {}, ...stepSentence(shown));
  byId("step-sentence").setAttribute("aria-live", state.step === null ? "off" : "polite");
  byId("step-sentence").replaceChildren(sentence);
  drawTimeline(byId("lanes"), shown, (text) => { byId("pointed").textContent = text; });
  byId("pointed").textContent = "";
  byId("legend").replaceChildren(...legendOf(shown));
  byId("lanes-table").replaceChildren(stepTable(shown));
}

function showStep(step) {
  state.step = step;
  refresh();
  byId("timeline-section").scrollIntoView({ block: "start" });
}

function listen() {
  byId("step-before").addEventListener("click", () => showStep(state.shown.before));
  byId("step-after").addEventListener("click", () => showStep(state.shown.after));
  byId("step-last").addEventListener("click", () => { state.step = null; refresh(); });
  byId("step-input").addEventListener("change", (event) => {
    const step = Number.parseInt(event.target.value, 10);
    if (step >= 0) showStep(step);
  });
  byId("zoom-out").addEventListener("click", () => { state.range = null; refresh(); });
  let resized = 0;
  addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(refresh, 150); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { charts.clear(); byId("runs").dataset.key = ""; refresh(); });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
  const news = new EventSource("news");
  news.addEventListener("changed", () => { if (!document.hidden) refresh(); });
  news.addEventListener("error", () => setConnected(false));
  news.addEventListener("open", () => { if (!state.connected) refresh(); });
}

const { runs } = await get("runs");
state.runs = runs.map((name, place) => ({ name, place, facts: null, curves: {} }));
await refresh();
listen();
document.body.dataset.ready = "true";
