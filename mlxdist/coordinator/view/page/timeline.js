// The timeline of one step: a lane for each node. Time runs to the right; long stretches in which no node works are
// drawn short, so that a pause of minutes leaves the work readable.

import { count, duration, make, svg, table } from "./format.js";

const HEIGHT = 44, BAR = [4, 23], WIRE = [30, 7];
const GAP_PIXELS = 62;
const KINDS = {
  leaf: "a leaf is computed", copy: "a copy of a late leaf", audit: "an audit", score: "a forward pass",
  up: "gradient sent", down: "adapter received", room: "waits to send", lost: "lost work", dropped: "another was faster",
};
const WIRES = ["up", "down", "room"];

export function drawTimeline(place, step, point) {
  if (!step.lanes || !step.lanes.length) { place.replaceChildren(); return; }
  const narrow = matchMedia("(max-width: 760px)").matches;
  const width = Math.max(place.clientWidth - (narrow ? 0 : 164), 160);
  const scale = scaleOf(step, width);
  const lanes = step.lanes.map((lane) => laneOf(lane, step, scale, width, point));
  place.replaceChildren(patterns(), ...lanes, make("div", { class: "lane", "aria-hidden": "true" },
    make("div", { class: "who" }), axis(step, scale, width)));
}

// Pieces of time with the pixels that each gets: work in proportion, a long gap a fixed width.
function scaleOf(step, width) {
  const end = Math.max(step.seconds || 0, ...step.lanes.flatMap((lane) => lane.rows.map((row) => row[2])), 1e-6);
  const busy = step.lanes.flatMap((lane) => lane.rows.filter((row) => row[0] !== "lost").map((row) => [row[1], row[2]]))
    .sort((one, other) => one[0] - other[0]);
  const pieces = [];
  let reached = 0;
  for (const [began, ended] of [...busy, [end, end]]) {
    if (began - reached > 0.18 * end) {
      if (pieces.length && !pieces.at(-1).gap) pieces.at(-1).ended = reached;
      pieces.push({ began: reached, ended: began, gap: true });
      pieces.push({ began, ended, gap: false });
    } else if (!pieces.length) pieces.push({ began: 0, ended, gap: false });
    reached = Math.max(reached, ended);
    pieces.at(-1).ended = Math.max(pieces.at(-1).ended, reached);
  }
  const kept = pieces.filter((piece) => piece.gap || piece.ended > piece.began);
  const gaps = kept.filter((piece) => piece.gap);
  const shared = Math.min(GAP_PIXELS, width / (2 * Math.max(gaps.length, 1)));
  const worked = kept.reduce((sum, piece) => sum + (piece.gap ? 0 : piece.ended - piece.began), 0) || 1;
  const each = gaps.length === kept.length ? width / gaps.length : shared;
  let at = 0;
  for (const piece of kept) {
    piece.from = at;
    at += piece.gap ? each : (piece.ended - piece.began) / worked * (width - each * gaps.length);
    piece.to = at;
  }
  const x = (time) => {
    const piece = kept.find((one) => time <= one.ended) || kept.at(-1);
    const share = piece.ended > piece.began ? (time - piece.began) / (piece.ended - piece.began) : 0;
    return piece.from + Math.min(Math.max(share, 0), 1) * (piece.to - piece.from);
  };
  return { x, pieces: kept, end };
}

function laneOf(lane, step, { x, pieces, end }, width, point) {
  const picture = svg("svg", { height: HEIGHT, role: "img", "aria-label": sentenceOf(lane, step) });
  picture.append(svg("rect", { class: "track", x: 0, y: BAR[0], width, height: BAR[1], rx: 5 }));
  for (const trouble of step.troubles.filter((one) => one.node === lane.node)) {
    const from = x(Math.max(trouble.at, 0)), to = x(Math.min(trouble.back_at ?? end, end));
    picture.append(svg("rect", { class: "away", x: from, y: BAR[0], width: Math.max(to - from, 0), height: BAR[1] }));
  }
  for (const row of lane.rows) picture.append(...barOf(lane, row, x, point));
  for (const piece of pieces.filter((one) => one.gap)) {
    const middle = (piece.from + piece.to) / 2;
    picture.append(svg("path", { class: "gap", d: `M${middle - 5} 0l6 9-6 9 6 9-6 9 6 8h8l-6-8 6-9-6-9 6-9-6-9z` }));
  }
  const busy = lane.computing / end;
  const facts = [count(lane.leaves, "leaf", "leaves"), lane.losses ? null : `${Math.round(100 * Math.min(busy, 1))} % busy`];
  return make("div", { class: "lane" },
    make("div", { class: "who" }, make("b", { title: lane.node }, lane.node),
      make("span", { class: lane.losses ? "bad" : null }, [...facts, lane.losses ? "lost" : null].filter(Boolean).join(" · "))),
    picture);
}

function barOf(lane, [kind, began, ended, start, stop], x, point) {
  const [top, height] = WIRES.includes(kind) ? WIRE : BAR;
  const from = x(began), wide = Math.max(x(ended) - from, 1.5);
  const drawn = Math.max(wide - (wide > 4 ? 1 : 0), 1);
  const bar = svg("rect", {
    class: `k-${kind}${kind === "leaf" && start % 2 ? " odd" : ""}`, x: from, y: top, width: drawn, height,
    rx: Math.min(3, wide / 3), "data-kind": kind,
  });
  const leaves = stop > start ? (stop - start === 1 ? `leaf ${start}: ` : `leaves ${start} to ${stop - 1}: `) : "";
  bar.addEventListener("pointerenter", () => point(
    `${lane.node}, ${leaves}${KINDS[kind] || kind}, ${duration(ended - began)}, from ${duration(began)} to ${duration(ended)}`));
  const parts = [bar];
  if (["leaf", "copy", "audit"].includes(kind) && wide > (stop - start > 1 ? 34 : 17)) {
    const text = stop - start > 1 ? `${start}–${stop - 1}` : `${start}`;
    parts.push(svg("text", { class: "num", x: from + wide / 2, y: BAR[0] + 15.5, "text-anchor": "middle" }, text));
  }
  if (kind === "lost") {
    const at = x(ended), y = BAR[0] + BAR[1] / 2;
    parts.push(svg("path", { class: "cross", "data-kind": "cross", d: `M${at - 5} ${y - 5}l10 10m0-10l-10 10` }));
  }
  return parts;
}

function axis(step, { x, pieces }, width) {
  const picture = svg("svg", { height: 22, "aria-hidden": "true" });
  let free = -20;
  const label = (at, text, anchor, side) => {
    if (at - side < free) return;
    picture.append(svg("text", { x: at, y: 16, "text-anchor": anchor }, text));
    free = at + 46;
  };
  for (const piece of pieces) {
    if (piece.gap) {
      label((piece.from + piece.to) / 2, `↔ ${duration(piece.ended - piece.began)}`, "middle", 26);
      continue;
    }
    const pixels = piece.to - piece.from, every = nice((piece.ended - piece.began) / Math.max(pixels / 90, 1));
    for (let time = Math.ceil(piece.began / every) * every; time <= piece.ended + 1e-9; time += every) {
      const at = x(time);
      picture.append(svg("path", { class: "tick", d: `M${at} 0v4` }));
      label(at, ticked(time, every), at < 12 ? "start" : at > width - 24 ? "end" : "middle", 20);
    }
  }
  return picture;
}

const nice = (least) => {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least * 0.999);
};
const ticked = (time, every) => time < 1e-9 ? "0" : every < 0.1 && time < 1 ? `${Math.round(time * 1000)} ms`
  : `${time.toFixed(Math.max(0, Math.ceil(-Math.log10(every) - 1e-9)))} s`;

function sentenceOf(lane, step) {
  const lost = step.troubles.filter((one) => one.node === lane.node).map((one) => `lost: ${one.cause}`);
  return [`${lane.node} computed ${count(lane.leaves, "leaf", "leaves")} in ${duration(lane.computing)}`, ...lost].join("; ");
}

function patterns() {
  const hatch = (name) => svg("pattern", { id: `hatch-${name}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
    svg("path", { d: "M-1 7L7-1M-1 1L1-1M5 7L7 5", "stroke-width": 1.6 }));
  return svg("svg", { width: 0, height: 0, "aria-hidden": "true", class: "defs" }, svg("defs", {}, hatch("lost"), hatch("dropped")));
}

export function legendOf(step) {
  const used = new Set((step.lanes || []).flatMap((lane) => lane.rows.map((row) => row[0])));
  const items = Object.keys(KINDS).filter((kind) => used.has(kind)).map((kind) => make("li", {},
    svg("svg", { viewBox: "0 0 22 11", "aria-hidden": "true" }, svg("rect", { class: `k-${kind}`, width: 22, height: 11, rx: 3 })),
    KINDS[kind]));
  return [...items, make("li", {}, svg("svg", { viewBox: "0 0 22 11", "aria-hidden": "true" },
    svg("rect", { class: "track", width: 22, height: 11, rx: 3 })), "waits")];
}

export function stepTable(step) {
  const rows = (step.lanes || []).map((lane) => [lane.node, { n: `${lane.leaves}` }, { n: duration(lane.computing) },
    { n: duration(lane.sending) }, { n: duration(lane.receiving) }, { n: duration(lane.waiting_for_room) },
    { n: duration(Math.max((step.seconds || 0) - lane.computing, 0)) }, { n: duration(lane.in_vain) }, { n: `${lane.copies}` }]);
  return table("This step, node by node", ["node", "leaves", "computing", "sending", "receiving", "waiting to send",
    "not computing", "in vain", "copies"], rows);
}

// The step in sentences: what was lost in it, and what that cost.
export function stepSentence(step) {
  if (step.step === null) return ["The timeline appears with the first step."];
  const parts = [`Step ${step.step.toLocaleString("en-US")} took ${duration(step.seconds)}. `];
  for (const trouble of step.troubles) {
    parts.push(make("b", { class: "bad" }, `${trouble.node} was ${trouble.state === "suspect" ? "silent" : "lost"}`),
      ` after ${duration(Math.max(trouble.at, 0))}: ${trouble.cause}. `);
    if (trouble.action) parts.push(`${trouble.action[0].toUpperCase()}${trouble.action.slice(1)}. `);
    if (trouble.back_at !== null && trouble.back !== null) parts.push(`It was ready again after ${duration(trouble.back - trouble.wall)}. `);
  }
  if (step.leaves_recomputed) parts.push(`${count(step.leaves_recomputed, "leaf was", "leaves were")} begun or computed again. `);
  if (step.lost_seconds > 0) {
    const paused = step.paused_seconds > 0 ? `, ${duration(step.paused_seconds)} of it as a pause` : "";
    parts.push(make("b", {}, `This cost ${duration(step.lost_seconds)}${paused}.`));
  } else parts.push(step.troubles.length ? make("b", {}, "It cost no time against the steps around it.") : "Nothing was lost in it.");
  return parts;
}
