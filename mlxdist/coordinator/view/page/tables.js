// The parts of the page that are text: numbers at the top, losses, checkpoints, the configuration, messages.

import { clock, count, duration, gigabytes, make, number, table } from "./format.js";

const GOOD = ["ready", "busy"], BAD = ["suspect", "dead", "left"];

export function stateOf(facts, connected) {
  const words = { training: facts.paused ? "paused, waits for nodes" : "training", done: "done", interrupted: "interrupted",
    failed: "failed", stopped: "stopped", elsewhere: "its coordinator is on another Mac", waiting: "has not begun" };
  const known = words[facts.state] || facts.state;
  if (connected) return [facts.state, known];
  const gone = "not connected: the page's server has ended, or is unreachable";
  return ["training", "waiting"].includes(facts.state) ? ["away", gone] : [facts.state, `${known}; ${gone}`];
}

export function numbersOf(facts) {
  const { last, lost } = facts;
  const total = facts.total_steps ? `of ${facts.total_steps.toLocaleString("en-US")}` : "";
  const share = lost.goodput === null || !facts.step ? null : `${Math.round(100 * lost.goodput)} % of the time in useful steps`;
  const working = facts.nodes.filter((node) => GOOD.includes(node.state)).length;
  const nodes = facts.state === "training" ? count(working, "node works", "nodes work") : `${count(facts.nodes.length, "node")} took part`;
  const rows = [
    ["step", facts.step.toLocaleString("en-US"), total],
    ["training loss", number(last.loss), last["rewards/accuracies"] === undefined ? "" : `accuracy ${number(last["rewards/accuracies"], 3)}`],
    ["validation loss", number(last["val/loss"]), facts.best ? `best checkpoint: step ${facts.best.step.toLocaleString("en-US")}` : ""],
    ["tokens per second", number(last.tokens_per_second, 3), nodes],
    [facts.seconds_left === null ? "time" : "time left", duration(facts.seconds_left ?? facts.wall_seconds), facts.seconds_left === null ? "" : `${duration(facts.wall_seconds)} so far`],
    ["lost to failures", lost.seconds_lost > 0 ? duration(lost.seconds_lost) : "nothing", share],
  ];
  return rows.map(([name, value, more], place) => make("div", {}, make("dt", {}, name),
    make("dd", {}, make("span", { id: place ? null : "step-done" }, value), make("small", {}, more || "\u00a0"))));
}

export function lossesOf(facts, show) {
  const { lost, troubles } = facts;
  const sentence = !troubles.length && !lost.steps_again
    ? "No node was lost."
    : [`${count(troubles.length, "loss", "losses")}`, `${count(lost.leaves_recomputed, "leaf", "leaves")} begun or computed again`,
      lost.steps_again ? `${count(lost.steps_again, "step")} done again` : null, `${duration(lost.seconds_lost)} lost`,
      lost.seconds_paused ? `${duration(lost.seconds_paused)} of it in pauses` : null].filter(Boolean).join(", ") + ".";
  if (!troubles.length) return [sentence, null];
  const rows = troubles.map((one) => {
    const where = one.step === null ? "now" : one.evaluation ? `evaluation after ${one.step}` : null;
    let step = where;
    if (!where) {
      step = make("button", { type: "button", class: "link" }, `step ${one.step.toLocaleString("en-US")}`);
      step.addEventListener("click", () => show(one.step));
    }
    const what = [one.cause, one.action].filter(Boolean).join("; ");
    const cost = one.lost_seconds === null ? "not known yet" : duration(one.lost_seconds);
    return [step, { n: clock(one.wall) }, make("b", {}, one.node), make("span", {}, what || one.state),
      { n: one.away_seconds === null ? "not back" : duration(one.away_seconds) },
      { n: one.leaves_recomputed === null ? "–" : `${one.leaves_recomputed}` },
      { n: one.paused_seconds ? duration(one.paused_seconds) : "–" }, { n: cost }];
  });
  return [sentence, table("Lost nodes, the last one first", ["where", "time", "node", "what happened", "away", "leaves again", "paused", "cost"], rows)];
}

export function checkpointsOf(facts) {
  if (!facts.checkpoints.length) return make("p", { class: "quiet" }, "None is saved yet.");
  const rows = facts.checkpoints.map((one) => {
    const commands = Object.entries(one.commands).map(([what, command]) => make("div", { class: "command" }, make("code", {}, command), copyButton(command, what)));
    const details = make("details", {}, make("summary", {}, Object.keys(one.commands).join(" · ")), ...commands);
    details.open = one.best;
    return [{ n: one.step.toLocaleString("en-US") }, { n: number(one.loss) },
      make("span", {}, make("code", {}, one.path), one.best ? make("span", { class: "badge" }, "best") : ""), details];
  });
  return table("Checkpoints", ["step", "validation loss", "folder", "commands"], rows);
}

function copyButton(text, what) {
  const button = make("button", { type: "button", "aria-label": `Copy the command to ${what}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.previousElementSibling);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// One column for each run; settings that differ come first and are marked.
export function configOf(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.facts.config)))];
  const text = (run, key) => key in run.facts.config ? JSON.stringify(run.facts.config[key]) : "–";
  const differs = (key) => new Set(runs.map((run) => text(run, key))).size > 1;
  const ordered = [...keys.filter(differs), ...keys.filter((key) => !differs(key))];
  const made = table("All settings", ["setting", ...runs.map((run) => run.name)],
    ordered.map((key) => [make("code", {}, key), ...runs.map((run) => make("code", {}, text(run, key)))]), false);
  const marked = made.querySelectorAll("tbody tr");
  ordered.forEach((key, place) => differs(key) && marked[place].classList.add("differs"));
  return [made, keys.filter(differs).length];
}

export function saidOf(facts) {
  return facts.said.toReversed().map(([wall, sentence]) => make("li", {}, make("time", {}, clock(wall)), make("span", {}, sentence)));
}

// One line for each node: its state while the run trains, its measured speed, its memory peak.
export function nodesOf(facts) {
  return facts.nodes.map((node) => {
    const over = facts.state !== "training";
    const kind = over ? "over" : GOOD.includes(node.state) ? "good" : BAD.includes(node.state) ? "bad" : "between";
    const told = [over ? null : node.state, node.tokens_per_second ? `${number(node.tokens_per_second, 3)} tokens/s` : null,
      node.peak_gb ? gigabytes(node.peak_gb) : null].filter(Boolean).join(" · ");
    return make("li", { class: kind, title: node.message }, make("b", {}, node.name), ` ${told}`);
  });
}
