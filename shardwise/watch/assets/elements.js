"use strict";
// What every page needs: elements, tables, numbers as text. Data from files is inserted as text, never as markup.
const COLOURS = {
  "compute": "#4e79a7", "optimizer": "#59a14f", "data loading": "#e15759", "checkpoint": "#9c755f",
  "validation": "#bab0ac", "pipeline bubble": "#f28e2b", "collective wait (tensor)": "#76b7b2", "collective wait (context)": "#b07aa1",
  "all-to-all wait (expert)": "#e8c547", "collective wait (shard)": "#ff9da7", "all-reduce wait (replicate)": "#d37295", "collective wait (data)": "#a0cbe8",
  "collective wait (local_sgd)": "#86bcb6", "all-reduce wait (world)": "#8c8c8c", "other": "#d4a6c8",
  "weights": "#4e79a7", "gradients": "#f28e2b", "activations and other": "#bab0ac",
};
const RUN_COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#76b7b2", "#d4a017", "#d37295", "#8c8c8c"];
const colour = (name, n) => COLOURS[name] || RUN_COLOURS[n % RUN_COLOURS.length];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const WHOLE = new Intl.NumberFormat("en"), DATE = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "short" });  // slow to make

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const formatNumber = (x) => x === null || x === undefined ? "" : typeof x !== "number" ? String(x)
  : Number.isInteger(x) && Math.abs(x) < 1e9 ? WHOLE.format(x)
    : x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6) ? x.toExponential(2) : String(+x.toPrecision(4));
const formatCount = (x) => {  // for an axis of tokens: 1.5M
  const power = Math.abs(x) >= 1e3 ? Math.min(4, Math.floor(Math.log10(Math.abs(x)) / 3 + 1e-9)) : 0;
  return `${+(x / 1000 ** power).toPrecision(4)}${["", "k", "M", "B", "T"][power]}`;
};
const formatSeconds = (x) => !isNumber(x) ? "" : x < 1 ? `${+(1e3 * x).toPrecision(3)} ms` : x < 120 ? `${+x.toPrecision(3)} s` : formatDuration(x);
const formatDuration = (x) => {
  if (!isNumber(x)) return "";
  const whole = Math.round(x), [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  return days ? `${days} d ${hours} h` : hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
};
const formatDate = (x) => isNumber(x) ? DATE.format(new Date(1e3 * x)) : "";
const formatPercent = (x) => `${(100 * x).toFixed(x < 0.1 ? 1 : 0)}%`;
const formatLoss = (x) => isNumber(x) ? x.toFixed(4) : x === null || x === undefined ? "" : String(x);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "class") node.className = value; else if (key === "style") node.style.cssText = value;
    else if (typeof value === "function") node.addEventListener(key, value);
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) => child instanceof Node ? child : String(child)));
  return node;
}

const svg = (tag, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

function table(heads, rows, { slow, text, cards } = {}) {
  // Columns from `text` on hold words and are left-aligned; rows for which `slow` is true are highlighted; on a phone, each
  // row of `cards` is a card, in which every value has its column's name.
  const align = (n) => text && n >= text ? { class: "text" } : {};
  return el("table", { class: cards ? "cards" : "", role: "table" }, el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, heads.map((head, n) => head ? el("th", { scope: "col", role: "columnheader", ...align(n) }, head) : el("td", { role: "cell" })))),
    el("tbody", { role: "rowgroup" }, rows.map((row) => el("tr", { role: "row", class: slow && slow(row) ? "slow" : "" }, row.map((cell, n) => el("td", { role: "cell", "data-label": heads[n], ...align(n) }, cell instanceof Node ? cell : formatNumber(cell)))))));
}

const scrolled = (label, ...children) => el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": label }, ...children);
const badge = (text, kind) => el("span", { class: `badge ${kind || String(text).replace(/\W+/g, "-")}` }, text);
const dim = (text) => el("p", { class: "dim" }, text);

const openDetails = new Set();  // ids of <details> that stay open when their panel is redrawn

function collapsible(id, title, children) {
  return el("details", { id, open: openDetails.has(id) }, el("summary", {}, title), scrolled(title, children));
}

function sampleIndices(count, limit) {
  return [...new Array(Math.min(count, limit)).keys()].map((n) => count <= limit ? n : Math.round(n * (count - 1) / (limit - 1)));
}

function legend(names) {
  return el("ul", { class: "key", "aria-label": "legend" }, names.map(([name, shade]) => el("li", {}, el("i", { style: `background:${shade}` }), name)));
}

const drawnState = {};

function showPanels(panels, data) {
  // Draws the panels whose data has changed since they were last drawn: [id, title, draw, wide, data it depends on].
  const main = document.querySelector("main");
  for (const [id, title, draw, wide, depends] of panels) {
    const text = JSON.stringify(depends(data));
    if (drawnState[id] === text) continue;
    drawnState[id] = text;
    let panel = document.getElementById(id);
    if (!panel) {
      panel = el("section", { id, "aria-labelledby": `${id}-title`, class: wide ? "wide" : "" });
      main.append(panel);
    }
    const body = el("div"), focus = panel.contains(document.activeElement) && document.activeElement.closest("details");
    for (const details of panel.querySelectorAll("details")) openDetails[details.open ? "add" : "delete"](details.id);
    panel.style.minHeight = `${panel.offsetHeight}px`;  // keeps the panels below in place while this one is redrawn
    panel.replaceChildren(el("h2", { id: `${id}-title` }, title), body);
    draw(body, data);
    panel.style.minHeight = "";
    if (focus && document.getElementById(focus.id)) document.getElementById(focus.id).querySelector("summary").focus();
  }
}
