// The charts: uPlot draws them. Here: which curves each has, their colors, the zoom, the keyboard, and a table of each.

import { color, gigabytes, make, number, table } from "./format.js";

const TABLE_ROWS = 12;

// Each chart: a title, and its curves by name, or one value of each node. `losses`: lost nodes are marked.
const CHARTS = [
  { title: "Loss", wide: true, curves: ["loss", "val/loss"], checkpoints: true },
  { title: "Rewards and margins", curves: ["rewards/chosen", "rewards/rejected", "rewards/margins"] },
  { title: "Rewards and margins, validation", curves: ["val/rewards/chosen", "val/rewards/rejected", "val/rewards/margins"] },
  { title: "Accuracy of rewards", curves: ["rewards/accuracies", "val/rewards/accuracies"] },
  { title: "KL", curves: ["kl", "val/kl"] },
  { title: "Learning rate", curves: ["learning_rate"] },
  { title: "Gradient norm", curves: ["grad_norm"] },
  { title: "Seconds of a step", curves: ["seconds"], losses: true },
  { title: "Tokens per second, by node", node: "tokens_per_second", losses: true },
  { title: "Memory peak, by node", node: "peak_gb", unit: gigabytes },
];
const WORDS = {
  loss: "training", "val/loss": "validation", learning_rate: "learning rate", grad_norm: "norm before clipping",
  seconds: "seconds", "rewards/accuracies": "training", "val/rewards/accuracies": "validation", kl: "training", "val/kl": "validation",
};

export class Charts {
  // `place`: the element; `zoomed(range)`: called when the person chose steps [from, to], or null for all.
  constructor(place, zoomed) {
    this.place = place;
    this.zoomed = zoomed;
    this.drawn = new Map();
    this.range = null;
    this.lost = []; // the steps in which nodes of the chosen run were lost
  }

  // The names of the curves to fetch of a run: all charts for every run, those by node for the chosen one alone.
  names(facts, chosen) {
    const known = Object.keys(facts.last);
    const shared = CHARTS.flatMap((chart) => chart.curves || []);
    return known.filter((name) => shared.includes(name) || (chosen && name.startsWith("node/")));
  }

  // `runs`: [{name, facts, curves, place}] with curves {name: [steps, values]}.
  draw(runs, chosen) {
    const several = runs.length > 1;
    this.lost = [...new Set(runs[chosen].facts.troubles.filter((one) => one.step !== null && !one.evaluation).map((one) => one.step))];
    for (const chart of CHARTS) {
      const lines = chart.node ? linesByNode(chart, runs.find((run) => run.place === chosen)) : linesOf(chart, runs, several);
      if (chart.checkpoints) lines.push(...runs.flatMap((run) => markersOf(run, several)));
      if (lines.some((line) => line.steps.length)) this.drawOne(chart, lines.filter((line) => line.steps.length));
      else this.remove(chart.title);
    }
  }

  drawOne(chart, lines) {
    const data = joined(lines);
    const shape = lines.map((line) => line.label + line.color).join("|");
    let drawn = this.drawn.get(chart.title);
    if (!drawn || drawn.shape !== shape) {
      this.remove(chart.title);
      drawn = this.create(chart, lines, data);
      drawn.shape = shape;
      this.drawn.set(chart.title, drawn);
      const order = CHARTS.map((one) => one.title).filter((title) => this.drawn.has(title));
      order.forEach((title) => this.place.append(this.drawn.get(title).figure));
    } else {
      drawn.plot.setData(data);
      if (drawn.plot.cursor.left < 0) showLast(drawn.plot);
    }
    const marked = chart.losses && this.lost.length > 0;
    drawn.note.hidden = !marked;
    const text = summary(chart, lines) + (marked ? `. Nodes were lost in steps ${this.lost.join(", ")}` : "");
    drawn.canvas.setAttribute("aria-label", text);
    if (drawn.details.open) drawn.fill();
    drawn.fill = () => drawn.body.replaceChildren(tableOf(chart, lines, data));
    if (drawn.details.open) drawn.fill();
  }

  create(chart, lines, data) {
    const holder = make("div", { class: "plot", tabindex: "0", role: "group",
      "aria-label": `${chart.title}: arrow keys move the cursor, plus and minus zoom, 0 shows all steps` });
    const body = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${chart.title} as a table` });
    const details = make("details", {}, make("summary", {}, "As a table"), body);
    const note = make("span", { class: "note" }, "a node was lost");
    const figure = make("figure", { class: `card${chart.wide ? " wide" : ""}` },
      make("figcaption", {}, make("h3", {}, chart.title), note), holder, details);
    this.place.append(figure);
    const plot = new uPlot(this.options(chart, lines, holder), data, holder);
    const canvas = holder.querySelector("canvas");
    canvas.setAttribute("role", "img");
    const drawn = { figure, note, plot, canvas, details, body, holder, fill: () => {} };
    details.addEventListener("toggle", () => details.open && drawn.fill());
    showLast(plot);
    plot.over.addEventListener("mouseleave", () => setTimeout(showLast, 0, plot));
    holder.addEventListener("keydown", (event) => this.key(event, plot));
    drawn.watcher = new ResizeObserver(() => plot.setSize({ width: Math.max(holder.clientWidth, 100), height: height(chart) }));
    drawn.watcher.observe(holder);
    return drawn;
  }

  options(chart, lines, holder) {
    const show = chart.unit || ((value) => number(value));
    const axis = { stroke: color("--quiet"), font: "11px system-ui, sans-serif", ticks: { show: false },
      grid: { stroke: color("--line"), width: 1 } };
    return {
      width: Math.max(holder.clientWidth, 100), height: height(chart), padding: [10, 10, 0, 0],
      cursor: {
        sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, points: { size: 7 },
        bind: { dblclick: () => () => { this.zoomed(null); return null; } },
      },
      scales: { x: { time: false, range: (plot, low, high) => this.range || (low === high ? [low - 1, high + 1] : [low, high]) } },
      axes: [
        { ...axis, grid: { show: false }, size: 30, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] },
        { ...axis, size: 62, values: (plot, ticks) => ticks.map((tick) => show(tick)) },
      ],
      legend: { live: true },
      series: [
        { label: "step", value: (plot, value) => value === null || value === undefined ? "–" : value.toLocaleString("en-US") },
        ...lines.map((line) => ({
          label: line.label, stroke: line.color, width: line.width || 1.6, dash: line.dash, spanGaps: false,
          value: (plot, value) => value === null || value === undefined ? "–" : show(value),
          points: line.points || { show: line.steps.length < 2 },
          ...(line.points?.only ? { paths: () => null } : {}),
        })),
      ],
      hooks: { drawAxes: [(plot) => { if (chart.losses) markLosses(plot, this.lost); }], setSelect: [(plot) => {
        if (plot.select.width < 4) return;
        const from = Math.floor(plot.posToVal(plot.select.left, "x")), to = Math.ceil(plot.posToVal(plot.select.left + plot.select.width, "x"));
        plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        this.zoomed([Math.max(from, 0), Math.max(to, from + 1)]);
      }] },
    };
  }

  key(event, plot) {
    const steps = plot.data[0], scale = plot.scales.x;
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (move) {
      const place = plot.cursor.idx === null || plot.cursor.idx === undefined ? steps.length - 1 : plot.cursor.idx + move;
      const step = steps[Math.min(Math.max(place, 0), steps.length - 1)];
      plot.setCursor({ left: plot.valToPos(step, "x"), top: 10 });
    } else if (factor) {
      const middle = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : (scale.min + scale.max) / 2;
      const half = (scale.max - scale.min) / 2 * factor;
      this.zoomed([Math.max(Math.floor(middle - half), 0), Math.ceil(middle + half)]);
    } else if (event.key === "0" || event.key === "Escape") this.zoomed(null);
    else return;
    event.preventDefault();
  }

  remove(title) {
    const drawn = this.drawn.get(title);
    if (!drawn) return;
    drawn.watcher.disconnect();
    drawn.plot.destroy();
    drawn.figure.remove();
    this.drawn.delete(title);
  }

  clear() {
    for (const title of [...this.drawn.keys()]) this.remove(title);
  }
}

function markLosses({ ctx, bbox, scales, valToPos }, steps) {
  ctx.save();
  ctx.strokeStyle = color("--lost");
  ctx.globalAlpha = 0.55;
  ctx.setLineDash([4, 4]);
  ctx.beginPath();
  for (const step of steps.filter((one) => one >= scales.x.min && one <= scales.x.max)) {
    const x = Math.round(valToPos(step, "x", true));
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
  }
  ctx.stroke();
  ctx.restore();
}

// Without a cursor the legend shows the last values.
function showLast(plot) {
  plot.setLegend({ idxs: plot.data.map((values) => values.findLastIndex((value) => value !== null && value !== undefined)) }, false);
}

const height = (chart) => chart.wide ? 270 : 200;
export const runColor = (place) => color(`--c${place % 6}`);

function linesOf(chart, runs, several) {
  const lines = [];
  for (const run of runs) {
    chart.curves.forEach((name, place) => {
      const [steps, values] = run.curves[name] || [[], []];
      const isVal = name.startsWith("val/"), word = WORDS[name] || name.replace(/^val\//, "").replace("rewards/", "");
      lines.push({
        steps, values, label: several ? `${run.name} ${word}` : word, color: runColor(several ? run.place : place),
        dash: several && place ? [[], [5, 4], [2, 3]][place % 3] : undefined, width: isVal ? 2 : 1.6,
        points: isVal ? { show: true, size: 5, fill: runColor(several ? run.place : place) } : undefined,
      });
    });
  }
  return lines;
}

function linesByNode(chart, run) {
  const names = Object.keys(run?.curves || {}).filter((name) => name.startsWith("node/") && name.endsWith(`/${chart.node}`)).sort();
  return names.map((name, place) => ({
    steps: run.curves[name][0], values: run.curves[name][1], color: runColor(place),
    label: name.slice("node/".length, -chart.node.length - 1),
  }));
}

// Checkpoints stand on the validation loss where there is one, else on the training loss; the best one is filled.
function markersOf(run, several) {
  const [steps, values] = run.curves["val/loss"] || run.curves.loss || [[], []];
  const at = new Map(steps.map((step, place) => [step, values[place]]));
  const mark = (best) => {
    const found = run.facts.checkpoints.filter((one) => one.best === best && at.get(one.step) !== undefined).map((one) => one.step).sort((a, b) => a - b);
    const shade = several ? runColor(run.place) : color("--c2");
    return { steps: found, values: found.map((step) => at.get(step)), color: shade,
      label: `${several ? `${run.name} ` : ""}${best ? "best checkpoint" : "checkpoint"}`,
      points: { show: true, only: true, size: best ? 13 : 11, width: 2, fill: best ? shade : color("--card"), stroke: shade } };
  };
  return [mark(false), mark(true)];
}

// One x axis for all lines. What a line lacks is undefined, which uPlot spans; null is a gap.
function joined(lines) {
  return uPlot.join(lines.map((line) => [line.steps, line.values]), lines.map(() => [0, 1]));
}

function summary(chart, lines) {
  const show = chart.unit || ((value) => number(value));
  return `${chart.title}. ${lines.map((line) => {
    const first = line.values.findIndex((value) => value !== null), last = line.values.findLastIndex((value) => value !== null);
    return first < 0 ? `${line.label}: no value` : `${line.label}: ${show(line.values[first])} at step ${line.steps[first]}, ${show(line.values[last])} at step ${line.steps[last]}`;
  }).join("; ")}`;
}

function tableOf(chart, lines, data) {
  const show = chart.unit || ((value) => number(value));
  const steps = data[0], every = Math.max((steps.length - 1) / (TABLE_ROWS - 1), 1), rows = [];
  for (let place = 0; place <= steps.length - 1 + 1e-9; place += every) rows.push(Math.round(place));
  const markers = new Set(lines.flatMap((line) => line.steps.length <= 40 ? line.steps : []));
  const places = [...new Set([...rows, ...steps.map((step, place) => markers.has(step) ? place : -1).filter((place) => place >= 0)])].sort((a, b) => a - b);
  return table(chart.title, ["step", ...lines.map((line) => line.label)], places.map((place) => [
    { n: steps[place].toLocaleString("en-US") },
    ...data.slice(1).map((values) => ({ n: values[place] === undefined || values[place] === null ? "–" : show(values[place]) })),
  ]), false);
}
