// Curves: one view (x axis, y axis, smoothing, zoom) for all of a page, kept in the address, so that a link shows the same.
const VIEW = { x: "", log: "", smooth: "0", from: "", to: "", segment: "", sort: "", filter: "" };
const view = { ...VIEW };
const plots = new Map();

function readView() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const key of Object.keys(VIEW)) view[key] = given.get(key) ?? VIEW[key];
}

function saveView() {
  const text = new URLSearchParams(Object.entries(view).filter(([key, value]) => value !== VIEW[key])).toString();
  history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
}

const zoom = () => view.from !== "" && view.to !== "" && isNumber(+view.from) && +view.to > +view.from ? [+view.from, +view.to] : null;
const curveView = () => [view.x, view.log, view.smooth];  // what a panel of curves depends on; plots follow the zoom by themselves

let timeUnit = ["hours", 1];  // and how many of them an hour has

function chooseTimeUnit(all) {
  const most = Math.max(0, ...all.flatMap((series) => series.hours ? series.hours.slice(-1) : []).filter(isNumber));
  timeUnit = most < 0.1 ? ["seconds", 3600] : most < 3 ? ["minutes", 60] : ["hours", 1];
}

function axisLabel(unit) { return view.x === "tokens" ? unit : view.x === "time" ? timeUnit[0] : view.x === "samples" ? "samples" : "step"; }

function axisOf(series) {
  // The x values of a run's curves. They only grow, although a clock may have been set back.
  const values = view.x === "tokens" ? series.samples.map((n) => n * (series.per_sample || 1)) : view.x === "time" ? (series.hours || []).map((x) => isNumber(x) ? x * timeUnit[1] : x) : view.x === "samples" ? series.samples : series.step;
  let last = -Infinity;
  return values && values.length === series.loss.length ? values.map((x) => last = Math.max(last, isNumber(x) ? x : last === -Infinity ? 0 : last)) : series.step;
}

function axisAt(series, steps) {
  // The x values of other steps than those of the curves, in between.
  const axis = axisOf(series), known = series.step;
  if (axis === known || known.length < 2) return steps;
  let n = 1;
  return steps.map((step) => {
    while (n < known.length - 1 && known[n] < step) n++;
    return axis[n - 1] + (axis[n] - axis[n - 1]) * (step - known[n - 1]) / (known[n] - known[n - 1]);
  });
}

function smoothed(values) {
  // Exponential moving average, with the bias of its beginning taken out.
  const weight = +view.smooth;
  if (!(weight > 0)) return values;
  let sum = 0, share = 1;
  return values.map((x) => {
    if (!isNumber(x)) return null;
    sum = weight * sum + (1 - weight) * x;
    share *= weight;
    return sum / (1 - share);
  });
}

const formatTick = (x) => x === null ? "" : Math.abs(x) >= 1e4 ? formatCount(x) : x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(1).replace(".0e", "e") : String(+x.toPrecision(4));

const smoothing = () => +view.smooth > 0;
const faint = (shade) => `${shade}55`;

const WHOLE_STEPS = [...new Array(14).keys()].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));  // there is no step 2.5

function logTicks(u, axis, low, high) {
  // uPlot's own ticks are for whole decades; these are round numbers between any two.
  const ticks = [], decades = Math.log10(high / low);
  if (decades < 1) {
    const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find((n) => n * power >= rough) * power;
    for (let n = Math.ceil(low / step); n * step <= high && ticks.length < 20; n++) ticks.push(+(n * step).toPrecision(6));
    return ticks;
  }
  const every = Math.ceil(decades / 8);
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) for (const n of decades < 4 ? [1, 2, 5] : [1]) ticks.push(+`${n}e${power}`);
  return ticks.filter((x) => x >= low && x <= high);
}

function linePlot(id, box, data, lines, options = {}) {
  // Reuses a plot with the same lines, so that the cursor survives an update.
  const log = options.log !== false && view.log === "1" && data.slice(1).some((row) => row.some((x) => x > 0));
  if (log) data = [data[0], ...data.slice(1).map((row) => row.map((x) => x > 0 ? x : null))];
  const signature = JSON.stringify([log, options.x, options.height, lines.map((line) => [line.label, line.stroke])]);
  const existing = plots.get(id);
  if (existing && existing.signature === signature) {
    existing.options = options;
    existing.plot.setData(data, false);
    showZoom(existing.plot);
    box.append(existing.plot.root);
    return;
  }
  if (existing) existing.plot.destroy();
  const entry = { signature, options }, width = Math.max(240, box.clientWidth), narrow = width < 420;
  const axis = { stroke: () => css("--dim"), grid: { stroke: () => css("--edge"), width: 1 }, ticks: { stroke: () => css("--edge"), width: 1 }, font: "11px system-ui" };
  const formatX = options.x === "tokens" || options.x === "samples" || options.x === "images" ? formatCount : formatNumber;
  const range = log ? (u, low, high) => low > 0 ? [low / 1.03, high * 1.03] : [0.1, 1] : options.zero ? (u, low, high) => [0, high * 1.05 || 1] : undefined;
  const last = (row) => { for (let n = row.length - 1; n >= 0; n--) if (row[n] !== null && row[n] !== undefined) return row[n]; return null; };
  entry.plot = new uPlot({
    width, height: options.height || 240, scales: { x: { time: false }, y: { distr: log ? 3 : 1, ...(range ? { range } : {}) } },
    legend: { live: true }, padding: [8, 16, 0, 0],
    cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "page" }, bind: { mousedown: (u, target, begin) => (event) => event.shiftKey ? startPan(u, event) : begin(event), dblclick: () => () => setZoom(null) } },
    axes: [{ ...axis, space: narrow ? 70 : 60, values: (u, all) => all.map(formatX), ...(view.x === "time" ? {} : { incrs: WHOLE_STEPS }) }, { ...axis, size: narrow ? 50 : 58, values: (u, all) => all.map(formatTick), ...(log ? { splits: logTicks, filter: (u, all) => all } : {}) }],
    bands: options.bands || [],
    series: [{ label: options.x || "step", value: (u, x, n, index) => formatX(index === null ? last(u.data[0]) : x) }, ...lines.map((line) => ({
      width: 1.5, points: { show: data[0].length < 3 }, value: (u, x, n, index) => formatNumber(index === null ? last(u.data[n]) : x), spanGaps: true, ...line }))],
    hooks: {
      draw: [(u) => entry.options.draw && entry.options.draw(u)],
      setSelect: [(u) => {
        if (u.select.width < 4) return;
        const [low, high] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        setZoom([low, high]);
      }],
    },
  }, data, box);
  entry.plot.over.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey) return;  // a plain wheel scrolls the page
    event.preventDefault();
    zoomBy(event.deltaY < 0 ? 0.8 : 1.25, entry.plot.posToVal(event.offsetX, "x"));
  }, { passive: false });
  plots.set(id, entry);
  showZoom(entry.plot);
}

function fullRange() {
  const all = [...plots.values()].map(({ plot }) => plot.data[0]).filter((row) => row.length);
  return all.length ? [Math.min(...all.map((row) => row[0])), Math.max(...all.map((row) => row[row.length - 1]))] : [0, 1];
}

function showZoom(plot) {
  const row = plot.data[0], [low, high] = zoom() || [row[0], row[row.length - 1]];
  if (row.length) plot.setScale("x", { min: low, max: high > low ? high : low + 1 });
}

let zoomFrame = 0;
function setZoom(range) {
  const [low, high] = fullRange(), inside = range && [Math.max(low, range[0]), Math.min(high, range[1])];
  const whole = !inside || inside[1] - inside[0] >= 0.999 * (high - low) || inside[1] <= inside[0];
  [view.from, view.to] = whole ? ["", ""] : inside.map((x) => String(+x.toPrecision(6)));
  cancelAnimationFrame(zoomFrame);  // one drawing for many moves of a mouse
  zoomFrame = requestAnimationFrame(() => {
    for (const { plot } of plots.values()) showZoom(plot);
    saveView();
    for (const reset of document.querySelectorAll(".reset-zoom")) reset.disabled = !zoom();
  });
}

function zoomBy(factor, centre) {
  const [low, high] = zoom() || fullRange(), middle = centre ?? (low + high) / 2;
  setZoom([middle - (middle - low) * factor, middle + (high - middle) * factor]);
}

function panBy(share) {
  const current = zoom();
  if (!current) return;
  const [low, high] = fullRange(), wide = current[1] - current[0];
  const begin = Math.min(high - wide, Math.max(low, current[0] + share * wide));
  setZoom([begin, begin + wide]);
}

function startPan(u, event) {
  let x = event.clientX;
  const move = (next) => { panBy((x - next.clientX) / u.over.clientWidth); x = next.clientX; };
  addEventListener("mousemove", move);
  addEventListener("mouseup", () => removeEventListener("mousemove", move), { once: true });
}

function resize() {
  for (const { plot } of plots.values()) {
    const box = plot.root.parentElement;
    if (box && box.clientWidth) plot.setSize({ width: Math.max(240, box.clientWidth), height: plot.height });
  }
}

function figure(id, heading, description, asTable) {
  const box = el("div", { role: "img", "aria-label": description });
  const node = el("figure", { id }, heading ? el("h3", {}, heading) : null, box, asTable ? collapsible(`${id}-table`, "As a table", asTable) : null);
  return [node, box];
}

function drawMarks(u, marks) {
  // Vertical lines: [x, text, is an alert]. Texts that would overlap are left out; the table of events has them all.
  let free = -Infinity;
  u.ctx.save();
  u.ctx.font = `${11 * devicePixelRatio}px system-ui`;
  u.ctx.textAlign = "left"; u.ctx.textBaseline = "alphabetic";
  for (let [at, text, isAlert] of marks) {
    const x = u.valToPos(at, "x", true);
    if (x < u.bbox.left - 1 || x > u.bbox.left + u.bbox.width + 1) continue;
    u.ctx.strokeStyle = u.ctx.fillStyle = css(isAlert ? "--mark" : "--dim");
    u.ctx.setLineDash([4, 4]);
    u.ctx.beginPath(); u.ctx.moveTo(x, u.bbox.top); u.ctx.lineTo(x, u.bbox.top + u.bbox.height); u.ctx.stroke();
    if (u.ctx.measureText(text).width > 0.7 * u.bbox.width) text = text.slice(0, Math.floor(text.length * 0.7 * u.bbox.width / u.ctx.measureText(text).width)) + "\u2026";
    const wide = u.ctx.measureText(text).width, left = Math.min(x + 3, u.bbox.left + u.bbox.width - wide);
    if (left > free) { u.ctx.fillText(text, left, u.bbox.top + 12 * devicePixelRatio); free = left + wide; }
  }
  u.ctx.restore();
}

// Controls

const SMOOTHING = ["0", "0.3", "0.6", "0.8", "0.9", "0.95", "0.98", "0.99"];
const KEYS = [["x", "next x axis: step, tokens, time"], ["l", "logarithmic or linear y axis"], ["[  ]", "less or more smoothing"], ["+  -", "zoom in or out"], ["\u2190  \u2192", "move when zoomed in"], ["0", "show everything"], ["/", "filter the list of runs"], ["b", "back to the list of runs"], ["?", "this help"]];

function toolbar(axes, redraw) {
  // Choices for all curves of the page. `axes` are the possible x axes, as [value, name]; the first is the default.
  const bar = document.getElementById("controls");
  const change = (key, value) => { view[key] = value; if (key === "x") view.from = view.to = ""; saveView(); fill(); redraw(); };
  const fill = () => {
    const known = axes.some(([value]) => value === view.x) ? view.x : axes[0][0];
    bar.hidden = false;
    bar.querySelector("#x-axis").value = known;
    bar.querySelector("#log").checked = view.log === "1";
    bar.querySelector("#smooth").value = Math.max(0, SMOOTHING.indexOf(view.smooth));
    bar.querySelector("#smooth-value").textContent = smoothing() ? view.smooth : "off";
    bar.querySelector(".reset-zoom").disabled = !zoom();
  };
  if (!axes.some(([value]) => value === view.x)) view.x = "";
  if (!view.x) VIEW.x = view.x = axes[0][0];
  bar.replaceChildren(
    el("label", {}, "x axis ", el("select", { id: "x-axis", change: (event) => change("x", event.target.value) }, axes.map(([value, name]) => el("option", { value }, name)))),
    el("label", {}, el("input", { type: "checkbox", id: "log", change: (event) => change("log", event.target.checked ? "1" : "") }), " log y axis"),
    el("label", {}, "smoothing ", el("input", { type: "range", id: "smooth", min: "0", max: String(SMOOTHING.length - 1), step: "1", input: (event) => change("smooth", SMOOTHING[event.target.value]) }), el("output", { id: "smooth-value", for: "smooth" })),
    el("button", { type: "button", class: "reset-zoom", click: () => setZoom(null) }, "Reset zoom"),
    el("button", { type: "button", class: "help", click: showHelp }, "Keys"),
  );
  fill();
  return { change, axes };
}

function showHelp() {
  let dialog = document.getElementById("help");
  if (!dialog) {
    dialog = el("dialog", { id: "help", "aria-labelledby": "help-title" }, el("h2", { id: "help-title" }, "Keys and mouse"),
      el("dl", { class: "keys" }, KEYS.flatMap(([key, meaning]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, meaning)])),
      el("p", { class: "small" }, "Drag over a curve to zoom in, drag with Shift to move, double-click to show everything; the wheel with Ctrl zooms. A click on a name in a legend hides its curve. The address of the page holds the view: a link to it shows the same."),
      el("form", { method: "dialog" }, el("button", {}, "Close")));
    document.body.append(dialog);
  }
  if (!dialog.open) dialog.showModal();
}
