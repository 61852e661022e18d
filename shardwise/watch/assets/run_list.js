// The list of all runs: sort by a column, filter, tick runs to compare them. Of many runs the first are shown, and more on
// demand: a table of a thousand rows takes seconds to lay out. Rows are built when they are first shown, and then moved.
const ROWS = 100;
let rowLimit = ROWS;
const COLUMNS = [
  ["run", (run) => run.name], ["status", (run) => run.status], ["started", (run) => run.begin ?? -Infinity], ["duration", (run) => run.seconds ?? -1],
  ["step", (run) => run.step ?? -1], ["loss", (run) => isNumber(run.loss) ? run.loss : Infinity], ["layout", (run) => run.layout || ""], ["tags", (run) => (run.tags || []).join(" ")],
];
const NAMES = new Intl.Collator("en", { numeric: true });
const rowNodes = new Map(), ticked = new Set();
const wordsOf = (run) => [run.name, run.status, run.layout, ...(run.tags || []), run.notes].join(" ").toLowerCase();

function sparkline(values) {
  if (!values || values.length < 2) return null;
  const low = Math.min(...values), span = Math.max(...values) - low || 1;
  const points = values.map((value, n) => `${(96 * n / (values.length - 1) + 2).toFixed(1)},${(22 - 20 * (value - low) / span).toFixed(1)}`).join(" ");
  return svg("svg", { viewBox: "0 0 100 24", width: "100", height: "24", class: "spark", role: "img", "aria-label": `loss from ${formatNumber(values[0])} to ${formatNumber(values[values.length - 1])}` }, svg("polyline", { points }));
}

function listRow(run) {
  const known = rowNodes.get(run.name), text = JSON.stringify(run);
  if (known && known.text === text) return known.node;
  const share = run.steps ? Math.min(1, run.step / run.steps) : 0;
  const cell = (label, kind, ...children) => {
    const content = el("div", {}, ...children);
    return el("td", { role: "cell", "data-label": label, class: kind }, content.childNodes.length ? content : null);
  };
  const isKnown = ["finished", "stopped", "running", "not finished", "not read yet"].includes(run.status);
  const tick = el("input", { type: "checkbox", "aria-label": `compare ${run.name}`, change: () => { ticked[tick.checked ? "add" : "delete"](run.name); showTicked(); } });
  tick.checked = ticked.has(run.name);
  const node = el("tr", { role: "row" },
    cell("", "tick", tick), cell("", "text name", el("a", { href: `/run/${encodeURIComponent(run.name)}` }, run.name)),
    cell("status", "text status", isKnown ? badge(run.status) : [badge("unreadable", "failed"), " ", el("span", { class: "small" }, run.status)]),
    cell("started", "text date", formatDate(run.begin)), cell("duration", "", formatDuration(run.seconds)),
    cell("step", "", run.steps ? [`${formatNumber(run.step)} of ${formatNumber(run.steps)}`, el("span", { class: "progress" }, el("i", { style: `width:${100 * share}%` }))] : ""),
    cell("loss", "", formatLoss(run.loss)), cell("curve", "", sparkline(run.curve)), cell("layout", "text", run.layout ? el("code", {}, run.layout) : null),
    cell("tags", "text", (run.tags || []).map((tag) => badge(tag, "tag")), run.notes ? el("span", { class: "small note-line", title: run.notes }, run.notes.split("\n")[0].slice(0, 80)) : null));
  rowNodes.set(run.name, { text, node });
  return node;
}

function showTicked() {
  const link = document.getElementById("compare"), names = [...ticked].filter((name) => latest.list.some((run) => run.name === name));
  link.textContent = names.length > 1 ? `Compare ${names.length} runs` : "Tick two runs or more to compare them";
  if (names.length > 1) link.setAttribute("href", `/compare?${new URLSearchParams(names.map((name) => ["run", name]))}`);
  else link.removeAttribute("href");
}

function arrangeRows(runs) {
  const [column, direction] = (view.sort || "started.down").split("."), value = (COLUMNS.find(([name]) => name === column) || COLUMNS[2])[1];
  const words = view.filter.toLowerCase().split(/\s+/).filter(Boolean), sign = direction === "down" ? -1 : 1;
  const found = words.length ? runs.filter((run) => { const text = wordsOf(run); return words.every((word) => text.includes(word)); }) : runs.slice();
  found.sort((a, b) => { const [x, y] = [value(a), value(b)]; return sign * (typeof x === "string" ? NAMES.compare(x, y) : x - y) || NAMES.compare(a.name, b.name); });
  document.querySelector("#runs tbody").replaceChildren(...found.slice(0, rowLimit).map(listRow));
  const more = document.getElementById("more"), rest = found.length - rowLimit;
  more.hidden = rest <= 0;
  more.textContent = `Show ${Math.min(ROWS, rest)} more of ${rest}`;
  for (const head of document.querySelectorAll("#runs th[data-column]")) head.setAttribute("aria-sort", head.dataset.column !== column ? "none" : direction === "down" ? "descending" : "ascending");
  document.getElementById("count").textContent = found.length === runs.length ? `${runs.length} ${runs.length === 1 ? "run" : "runs"}` : `${found.length} of ${runs.length} runs`;
}

function showList(given) {
  document.title = "Runs";
  showHeader("Runs", []);
  if (!document.getElementById("runs")) {
    const sort = (name) => { view.sort = (view.sort || "started.down") === `${name}.down` ? `${name}.up` : view.sort === `${name}.up` ? `${name}.down` : ["started", "step", "duration"].includes(name) ? `${name}.down` : `${name}.up`; rowLimit = ROWS; saveView(); arrangeRows(latest.list); };
    const head = (name) => el("th", { scope: "col", role: "columnheader", "data-column": name, class: ["duration", "step", "loss"].includes(name) ? "" : "text" }, el("button", { type: "button", click: () => sort(name) }, name));
    document.querySelector("main").append(el("section", { id: "runs", class: "wide", "aria-label": "runs" },
      el("p", { class: "bar" }, el("label", {}, "Filter ", el("input", { id: "filter", type: "search", value: view.filter, placeholder: "name, status, layout, tag, note", input: (event) => { view.filter = event.target.value; rowLimit = ROWS; saveView(); arrangeRows(latest.list); } })), el("span", { id: "count", role: "status" }), el("a", { id: "compare", class: "button" })),
      el("div", {}, el("table", { class: "cards list", role: "table" }, el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, el("td", { role: "cell" }), COLUMNS.slice(0, 6).map(([name]) => head(name)), el("th", { scope: "col", role: "columnheader", class: "plain" }, "curve"), COLUMNS.slice(6).map(([name]) => head(name)))), el("tbody", { role: "rowgroup" })), el("button", { id: "more", type: "button", click: () => { rowLimit += ROWS; arrangeRows(latest.list); } }), el("p", { id: "none", class: "dim" }, "No runs yet. They appear here as soon as one has started."))));
  }
  document.getElementById("none").hidden = given.list.length > 0;
  document.querySelector("#runs table").hidden = !given.list.length;
  const names = new Set(given.list.map((run) => run.name));
  for (const name of rowNodes.keys()) if (!names.has(name)) rowNodes.delete(name);
  arrangeRows(given.list);
  showTicked();
}
