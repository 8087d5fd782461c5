// Numbers as a person reads them, and small helpers for elements.

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return Number(value.toPrecision(digits)).toString();
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0005) return "0 s";
  if (seconds < 0.1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function clock(seconds) {
  const whole = Math.floor(seconds);
  const parts = [Math.floor(whole / 60) % 60, whole % 60].map((part) => String(part).padStart(2, "0"));
  return (whole >= 3600 ? `${Math.floor(whole / 3600)}:` : "") + parts.join(":");
}

export function gigabytes(value) {
  if (value === null || value === undefined) return "–";
  return value < 0.1 ? `${number(value * 1000, 3)} MB` : `${number(value, 3)} GB`;
}

export function count(value, one, many = `${one}s`) {
  return `${value.toLocaleString("en-US")} ${value === 1 ? one : many}`;
}

// An element with attributes and children; a string child is text, never markup.
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A table; a cell is a text, an element or {n: text} for a number. `stack`: a card for each row on a narrow screen.
export function table(caption, titles, rows, stack = true) {
  const isNumber = (cell) => cell !== null && typeof cell === "object" && "n" in cell && !(cell instanceof Node);
  const numeric = titles.map((_, place) => rows.length > 0 && rows.every((row) => isNumber(row[place])));
  const head = titles.map((title, place) => make("th", { scope: "col", class: numeric[place] ? "n" : null }, title));
  const body = rows.map((row) => make("tr", {}, ...row.map((cell, place) =>
    make("td", { class: isNumber(cell) ? "n" : null, "data-label": titles[place] }, isNumber(cell) ? cell.n : cell))));
  return make("table", { class: stack ? "stack" : null, "aria-label": caption },
    make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
