"use strict";
// Draws the page of a run, or the comparison of several runs. Data from files is inserted as text, never as markup.
const COLOURS = {
  "compute": "#4e79a7", "optimizer": "#59a14f", "data loading": "#e15759", "checkpoint": "#9c755f",
  "validation": "#bab0ac", "pipeline bubble": "#f28e2b", "collective wait (tensor)": "#76b7b2", "collective wait (context)": "#b07aa1",
  "all-to-all wait (expert)": "#e8c547", "collective wait (shard)": "#ff9da7", "all-reduce wait (replicate)": "#d37295", "collective wait (data)": "#a0cbe8",
  "collective wait (local_sgd)": "#86bcb6", "all-reduce wait (world)": "#8c8c8c", "other": "#d4a6c8",
  "weights": "#4e79a7", "gradients": "#f28e2b", "activations and other": "#bab0ac",
};
const RUN_COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#76b7b2", "#e8c547"];
const ACTION_KINDS = { F: ["forward", "#9ecae9"], B: ["backward", "#ffbf79"], I: ["backward (input)", "#ffbf79"], W: ["backward (weight)", "#a5d69a"] };
const ALERT_EVENTS = ["killed", "suspended", "hung", "failed", "rollback", "loss_spike", "step_skipped", "stopped", "straggler", "checkpoint_corrupt", "corruption", "node_lost", "scaled_down", "checkpoint_failed", "warning", "data_changed"];
const METRIC_LABELS = {
  loss: "loss", grad_norm: "gradient norm", lr: "learning rate", mfu: "MFU (model FLOPs utilization)",
  memory_gib: "peak memory of rank 0 (GiB)", loss_scale: "loss scale", gradient_compression_ratio: "gradient compression ratio",
  expert_imbalance: "expert load imbalance (max / mean)", expert_drop_fraction: "dropped token fraction",
};
const colour = (name, n) => COLOURS[name] || RUN_COLOURS[n % RUN_COLOURS.length];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const formatNumber = (x) => x === null || x === undefined ? "" : typeof x !== "number" ? String(x)
  : x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6) ? x.toExponential(2) : String(+x.toPrecision(4));
const formatSeconds = (x) => x < 1 ? `${+(1e3 * x).toPrecision(3)} ms` : `${+x.toPrecision(4)} s`;
const formatPercent = (x) => `${(100 * x).toFixed(x < 0.1 ? 1 : 0)}%`;

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "class") node.className = value; else if (key === "style") node.style.cssText = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) => child instanceof Node ? child : String(child)));
  return node;
}

function table(heads, rows, { slow, text } = {}) {
  // Columns from `text` on hold words and are left-aligned; rows for which `slow` is true are highlighted.
  const align = (n) => text && n >= text ? { class: "text" } : {};
  return el("table", {}, el("thead", {}, el("tr", {}, heads.map((head, n) => el("th", { scope: "col", ...align(n) }, head)))),
    el("tbody", {}, rows.map((row) => el("tr", slow && slow(row) ? { class: "slow" } : {}, row.map((cell, n) => el("td", align(n), formatNumber(cell)))))));
}

const openDetails = new Set();  // ids of <details> that stay open when their panel is redrawn

function collapsible(id, title, children) {
  return el("details", openDetails.has(id) ? { id, open: "" } : { id }, el("summary", {}, title), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, children));
}

function sampleIndices(count, limit) {
  return [...new Array(Math.min(count, limit)).keys()].map((n) => count <= limit ? n : Math.round(n * (count - 1) / (limit - 1)));
}

function legend(names) {
  return el("ul", { class: "key", "aria-label": "legend" }, names.map(([name, shade]) => el("li", {}, el("i", { style: `background:${shade}` }), name)));
}

// Curves

const plots = new Map();

function linePlot(id, box, data, lines, options) {
  // Reuses a plot with the same lines, so that zoom and cursor survive an update.
  const signature = JSON.stringify(lines.map((line) => [line.label, line.stroke]));
  const existing = plots.get(id);
  if (existing && existing.signature === signature) {
    existing.options = options || {};
    existing.plot.setData(data, existing.plot.scales.x.min === existing.low && existing.plot.scales.x.max === existing.high);
    [existing.low, existing.high] = [data[0][0], data[0][data[0].length - 1]];
    box.append(existing.plot.root);
    return;
  }
  if (existing) existing.plot.destroy();
  const entry = { signature, options: options || {}, low: data[0][0], high: data[0][data[0].length - 1] };
  const axis = { stroke: () => css("--dim"), grid: { stroke: () => css("--edge"), width: 1 }, ticks: { stroke: () => css("--edge"), width: 1 }, font: "11px system-ui" };
  entry.plot = new uPlot({
    width: Math.max(240, box.clientWidth), height: (options && options.height) || 240, scales: { x: { time: false }, ...(options && options.zero ? { y: { range: (u, low, high) => [0, high * 1.05] } } : {}) },
    legend: { live: true }, cursor: { drag: { x: true, y: false } }, padding: [8, 16, 0, 0],
    axes: [{ ...axis, values: (u, all) => all.map(formatNumber) }, { ...axis, size: 58, values: (u, all) => all.map(formatNumber) }],
    bands: (options && options.bands) || [],
    series: [{ label: (options && options.x) || "step", value: (u, v) => formatNumber(v) }, ...lines.map((line) => ({
      width: 1.5, points: { show: data[0].length < 3 }, value: (u, v) => formatNumber(v), spanGaps: true, ...line }))],
    hooks: { draw: [(u) => entry.options.draw && entry.options.draw(u)] },
  }, data, box);
  plots.set(id, entry);
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

function drawEventMarkers(u, events) {
  // Vertical lines at alerts (coloured) and resumes.
  for (const event of events) {
    if (typeof event.step !== "number") continue;
    const isAlert = ALERT_EVENTS.includes(event.event);
    if (!isAlert && event.event !== "resumed") continue;
    const x = u.valToPos(event.step, "x", true);
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
    u.ctx.save();
    u.ctx.strokeStyle = u.ctx.fillStyle = css(isAlert ? "--mark" : "--dim");
    u.ctx.setLineDash([4, 4]);
    u.ctx.beginPath(); u.ctx.moveTo(x, u.bbox.top); u.ctx.lineTo(x, u.bbox.top + u.bbox.height); u.ctx.stroke();
    u.ctx.font = `${11 * devicePixelRatio}px system-ui`;
    u.ctx.fillText(event.event, x + 3, u.bbox.top + 12 * devicePixelRatio);
    u.ctx.restore();
  }
}

function drawLoss(parent, run) {
  const s = run.series;
  if (!s.step.length) return parent.append(el("p", { class: "dim" }, "No steps have been measured yet."));
  const last = s.loss.filter((x) => x !== null).slice(-1)[0];
  const indices = sampleIndices(s.step.length, 40);
  const validations = run.events.filter((event) => event.event === "validation" && typeof event.step === "number");
  const alerts = run.events.filter((event) => ALERT_EVENTS.includes(event.event));
  const description = `Loss over ${s.step.length} points, from ${formatNumber(s.loss[0])} to ${formatNumber(last)}; ${alerts.length} alert events.`;
  const [node, box] = figure("loss-plot", "", description, [
    table(["step", "loss", "min", "max"], indices.map((n) => [s.step[n], s.loss[n], s.loss_low[n], s.loss_high[n]])),
    validations.length ? table(["step", "validation loss"], validations.map((event) => [event.step, event.loss])) : null]);
  parent.append(node);
  const validation = s.step.map(() => null);
  for (const event of validations) {
    const n = s.step.findIndex((step) => step >= event.step);
    validation[n < 0 ? s.step.length - 1 : n] = event.loss;
  }
  linePlot("loss", box, [s.step, s.loss_high, s.loss_low, s.loss, validation], [
    { label: "max", stroke: "#9ecae9", width: 0.5 }, { label: "min", stroke: "#9ecae9", width: 0.5 },
    { label: "loss", stroke: "#4f8fd0" },
    { label: "validation", stroke: "#f28e2b", width: 0, points: { show: true, size: 7, fill: "#f28e2b" }, spanGaps: false },
  ], { bands: [{ series: [1, 2], fill: "#9ecae955" }], height: 280, draw: (u) => drawEventMarkers(u, run.events) });
  if (s.non_finite_losses.length) parent.append(el("p", { class: "small" }, "Non-finite loss: ", s.non_finite_losses.map(([step, value]) => `${value} at step ${step}`).join(", "), "."));
}

function drawTimeBreakdown(parent, run) {
  const p = run.time_breakdown;
  if (!p.step.length) return parent.append(el("p", { class: "dim" }, "No rank has reported yet."));
  const sums = p.step.map(() => 0);
  const stacked = p.values.map((row) => row.map((value, n) => sums[n] += value || 0));
  const shares = p.values.map((row) => row.reduce((a, b) => a + b, 0)), all = shares.reduce((a, b) => a + b, 0);
  const description = "Step time breakdown, mean over ranks: " + p.names.map((name, n) => `${name} ${formatPercent(shares[n] / all)}`).join(", ") + ".";
  const [node, box] = figure("band-plot", "seconds per step, mean over ranks", description, table(["step", ...p.names], sampleIndices(p.step.length, 40).map((n) => [p.step[n], ...p.values.map((row) => row[n])])));
  parent.append(node);
  const order = p.names.map((_, n) => p.names.length - 1 - n);  // the tallest area first, so that the others are drawn over it
  linePlot("band", box, [p.step, ...order.map((n) => stacked[n])], order.map((n) => ({
    label: `${p.names[n]} ${formatPercent(shares[n] / all)}`, stroke: colour(p.names[n], n), fill: colour(p.names[n], n), width: 0,
    points: { show: false }, value: (u, v, s, index) => index === null ? "" : formatSeconds(p.values[n][index] || 0),
  })), { height: 280, zero: true });
}

// Canvas and SVG panels

function canvas(box, height) {
  const node = el("canvas", { "aria-hidden": "true" });
  box.append(node);
  const scale = devicePixelRatio || 1, width = Math.max(240, box.clientWidth);
  node.width = width * scale; node.height = height * scale; node.style.height = `${height}px`;
  const ctx = node.getContext("2d");
  ctx.scale(scale, scale);
  ctx.font = "11px system-ui"; ctx.textBaseline = "middle"; ctx.fillStyle = css("--text");
  return [ctx, width, node];
}

const COLORMAP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
function colormap(x) {
  const position = Math.min(0.9999, Math.max(0, x)) * 4, n = Math.floor(position), part = position - n;
  return `rgb(${COLORMAP[n].map((low, i) => Math.round(low + part * (COLORMAP[n + 1][i] - low))).join(",")})`;
}

function drawHeatmap(parent, run) {
  const h = run.heatmap, r = run.ranks;
  if (!h.ranks.length) return parent.append(el("p", { class: "dim" }, "No rank has reported yet."));
  const sorted = h.values.flat().filter((x) => x !== null).sort((a, b) => a - b);
  const quantile = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  const low = quantile(0.02), high = Math.max(quantile(0.98), 1.5 * quantile(0.5));  // so that noise does not look like a straggler
  const description = `Busy seconds per step (compute, optimizer, data loading) by rank and step, from ${formatSeconds(sorted[0])} to ${formatSeconds(sorted[sorted.length - 1])}; lighter is slower.`
    + (r.stragglers.length ? ` Stragglers: rank ${r.stragglers.join(", ")}.` : "");
  const ranks = r.values.length ? r.values[0].map((_, n) => n) : [];
  const [node, box] = figure("heat-plot", "", description, table(["rank", ...r.names.map((name) => `${name}, s`)], ranks.map((n) => [n, ...r.values.map((row) => row[n])]), { slow: (row) => r.stragglers.includes(row[0]) }));
  parent.append(node);
  const row = Math.max(3, Math.min(28, 320 / h.ranks.length)), left = 34;
  const [ctx, width, surface] = canvas(box, row * h.ranks.length + 20);
  const cell = (width - left - 8) / h.step.length;
  h.values.forEach((line, y) => line.forEach((value, x) => {
    if (value === null) return;
    ctx.fillStyle = colormap((value - low) / ((high - low) || 1));
    ctx.fillRect(left + x * cell, y * row, cell + 0.5, row - (row > 6 ? 1 : 0));
  }));
  ctx.fillStyle = css("--text"); ctx.textAlign = "right";
  h.ranks.forEach((rank, y) => { if (row >= 11 || y % Math.ceil(11 / row) === 0) ctx.fillText(rank, left - 5, y * row + row / 2); });
  ctx.textAlign = "left"; ctx.fillText(`step ${h.step[0]}`, left, row * h.ranks.length + 11);
  ctx.textAlign = "right"; ctx.fillText(`step ${h.step[h.step.length - 1]}`, width - 8, row * h.ranks.length + 11);
  const caption = el("p", { class: "small dim" }, description);
  node.insertBefore(caption, node.querySelector("details"));
  surface.onmousemove = (event) => {
    const x = Math.floor((event.offsetX - left) / cell), y = Math.floor(event.offsetY / row);
    if (h.values[y] && h.values[y][x] !== undefined) caption.textContent = `Rank ${h.ranks[y]}, step ${h.step[x]}: ${formatSeconds(h.values[y][x])} busy.`;
  };
}

function drawTimeline(parent, run) {
  const p = run.pipeline;
  if (!p) return parent.append(el("p", { class: "dim" }, "This layout has no pipeline parallelism: every rank runs all layers."));
  const timelines = [["predicted", p.predicted], ["measured", p.measured]].filter((row) => row[1]);
  const rows = [["predicted by the plan", p.predicted], ["measured", p.measured]].filter((row) => row[1]);
  parent.append(table(["pipeline bubble", "share of pipeline time"], rows.map(([name, timeline]) => [name, formatPercent(timeline.bubble)])));
  if (!p.measured) parent.append(el("p", { class: "dim" }, "No measured timeline has been recorded yet."));
  const lengths = timelines.map((row) => row[1].seconds), maxSeconds = Math.max(...lengths), minSeconds = Math.min(...lengths);
  for (const [name, timeline] of timelines) {
    const span = maxSeconds > 4 * minSeconds ? timeline.seconds : maxSeconds;  // one scale for both, unless one would be too short to read
    const description = `${name}: ${p.ranks} ranks, ${p.micro_batches} micro-batches, ${formatSeconds(timeline.seconds)}, bubble ${formatPercent(timeline.bubble)}` + (timeline.step ? `, step ${timeline.step}` : "");
    const [node, box] = figure(`${name}-plot`, description, description, table(["rank", "action", "stage", "micro-batch", "from, s", "to, s"], timeline.actions.slice(0, 400).map(([rank, kind, ...rest]) => [rank, (ACTION_KINDS[kind] || [kind])[0], ...rest])));
    parent.append(node);
    const row = Math.max(10, Math.min(24, 260 / p.ranks)), left = 34, [ctx, width] = canvas(box, row * p.ranks + 2);
    const scale = (width - left - 8) / span;
    ctx.fillStyle = css("--soft"); ctx.fillRect(left, 0, width - left - 8, row * p.ranks);
    for (const [rank, kind, stage, number, begin, end] of timeline.actions) {
      const x = left + begin * scale, wide = Math.max(0.5, (end - begin) * scale - 0.5);
      ctx.fillStyle = (ACTION_KINDS[kind] || ["", "#bab0ac"])[1]; ctx.fillRect(x, rank * row, wide, row - 2);
      if (stage >= p.ranks) { ctx.fillStyle = "#1f293373"; ctx.fillRect(x, rank * row, wide, 3); }
      if (wide > 14) { ctx.fillStyle = "#1f2933"; ctx.textAlign = "center"; ctx.fillText(number, x + wide / 2, rank * row + row / 2); }
    }
    ctx.fillStyle = css("--text"); ctx.textAlign = "right";
    for (let rank = 0; rank < p.ranks; rank++) ctx.fillText(rank, left - 5, rank * row + row / 2);
  }
  const kinds = [...new Set(timelines.flatMap((row) => row[1].actions.map((action) => action[1])))];
  parent.append(legend(kinds.filter((kind) => ACTION_KINDS[kind]).map((kind) => ACTION_KINDS[kind])), el("p", { class: "small dim" }, "Numbers are micro-batches, gaps are bubbles; a dark top edge marks the later model chunks of an interleaved schedule."));
}

function drawMemory(parent, run) {
  const m = run.memory, parts = ["weights", "gradients", "optimizer", "activations and other"];
  if (!m.rows.length) return parent.append(el("p", { class: "dim" }, "No rank has reported yet."));
  const sum = (row) => parts.reduce((all, part) => all + (row[part] || 0), 0);
  const most = Math.max(...m.rows.map((row) => Math.max(sum(row), row.predicted || 0)));
  const bars = el("div", { class: "bars", tabindex: "0", role: "group", "aria-label": "memory per rank" });
  for (const row of m.rows) {
    const description = `rank ${row.rank}: ${formatNumber(sum(row))} GiB` + (row.predicted ? `, predicted ${formatNumber(row.predicted)}` : "");
    bars.append(el("span", {}, row.rank), el("span", { class: "bar", role: "img", "aria-label": description, title: description },
      parts.map((part) => row[part] ? el("i", { style: `width:${100 * row[part] / most}%;background:${colour(part)}` }) : null),
      row.predicted ? el("u", { style: `left:calc(${100 * row.predicted / most}% - 1px)` }) : null), el("span", {}, `${formatNumber(sum(row))} GiB`));
  }
  parent.append(bars, legend([...parts.map((part) => [part, colour(part)]), ["predicted", css("--mark")]]));
  if (m.limit) parent.append(el("p", { class: "small dim" }, `Device memory assumed by the plan: ${formatNumber(m.limit)} GiB per rank. Bars show peak memory; "activations and other" includes buffers and, on a CPU, the process itself.`));
  parent.append(collapsible("memory-table", "As a table", table(["rank", ...parts, "predicted"], m.rows.map((row) => [row.rank, ...parts.map((part) => row[part] || 0), row.predicted]))));
}

function drawMesh(parent, run) {
  const m = run.mesh;
  if (!m) return parent.append(el("p", { class: "dim" }, "The layout of this run is unknown: plan.toml is missing or unreadable."));
  const size = Object.fromEntries(m.axes), inner = size.context * size.tensor, data = size.replicate * size.shard;
  const rows = Math.min(data, 16), columns = Math.min(size.pipeline, 16), side = Math.min(inner, 16), box = 26;
  const wide = side * box + 12, high = box + 12, gap = 26, left = 8, top = 20;
  const ns = "http://www.w3.org/2000/svg", make = (tag, attributes, text) => {
    const node = document.createElementNS(ns, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const width = left + columns * (wide + gap), height = top + rows * (high + 8) + 4;
  const description = `${run.world} ranks: ` + (m.axes.filter((axis) => axis[1] > 1).map(([name, n]) => `${name}=${n}`).join(", ") || "one device") + ".";
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": description });
  const compute = m.compute.filter((x) => x !== null).sort((a, b) => a - b), median = compute[Math.floor((compute.length - 1) / 2)];
  for (let stage = 0; stage < columns; stage++) {
    const x = left + stage * (wide + gap);
    if (size.pipeline > 1) svg.append(make("text", { x, y: 12 }, `stage ${stage}`));
    for (let row = 0; row < rows; row++) {
      const y = top + row * (high + 8);
      svg.append(make("rect", { x, y, width: wide, height: high, rx: 5, fill: "none", stroke: css("--dim") }));
      if (stage + 1 < columns) svg.append(make("path", { d: `M${x + wide + 2} ${y + high / 2}h${gap - 6}m-5 -4l5 4l-5 4`, fill: "none", stroke: css("--dim") }));
      if (row) svg.append(make("path", { d: `M${x + wide / 2} ${y - 8}v8`, stroke: css("--dim"), "stroke-dasharray": "2 2" }));
      for (let n = 0; n < side; n++) {
        const rank = (stage * data + row) * inner + n, value = m.compute[rank];
        const shade = value === undefined || value === null || !median ? 0.3 : Math.max(0, 0.3 + value / median - 1);
        svg.append(make("rect", { x: x + 7 + n * box, y: y + 7, width: box - 2, height: box - 2, rx: 3, fill: colormap(shade) }));
        svg.append(make("text", { x: x + 6 + n * box + box / 2, y: y + 23, "text-anchor": "middle", style: `fill:${shade > 0.6 ? "#111" : "#fff"}` }, rank));
      }
    }
  }
  parent.append(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "device mesh" }, svg));
  const communication = { pipeline: "stages, left to right; send/recv of activations and their gradients", replicate: "replicas, top to bottom; all-reduce of gradients", shard: "FSDP/ZeRO shards, top to bottom; reduce-scatter of gradients, all-gather of weights", context: "within a box; exchange of keys and values", tensor: "within a box; all-gather and reduce-scatter of activations", expert: "all-to-all of tokens to and from experts", data: "token counts and compressed gradients", local_sgd: "averaging of replica weights", world: "gradient norm and stop flag" };
  const listed = [...m.axes.filter((axis) => axis[1] > 1), ...["expert", "data", "local_sgd", "world"].filter((name) => m.waits[name]).map((name) => [name, ""])];
  parent.append(table(["axis", "size", "wait, % of step", "communication"], listed.map(([name, n]) => [name, n, formatPercent(m.waits[name] || 0), communication[name]]), { text: 3 }));
  parent.append(el("p", { class: "small dim" }, "Each square is a rank; a lighter one computes longer."));
}

function drawPlan(parent, run) {
  if (run.plan.reason) parent.append(el("p", { class: "small" }, run.plan.reason));
  parent.append(table(["", "predicted", "measured", "error"], run.plan.rows));
  if (!run.plan.rows.length) parent.append(el("p", { class: "dim" }, "No prediction, or no measured step to compare it with yet."));
  if (run.plan.rejected.length) parent.append(collapsible("rejected", "Rejected layouts and why", el("ul", {}, run.plan.rejected.map((layout) => el("li", {}, el("code", {}, layout.layout || layout.choice || ""), `: ${layout.reason || ""}`)))));
}

function drawCurves(parent, run) {
  const s = run.series, outer = parent;
  outer.append(parent = el("div", { class: "pair" }));
  for (const name of Object.keys(s).filter((key) => key !== "loss" && (key in METRIC_LABELS || key === "tokens_per_s"))) {
    const heading = METRIC_LABELS[name] || `${run.unit}/s`, values = s[name].filter((x) => x !== null);
    const description = `${heading}: last ${formatNumber(values[values.length - 1])}, min ${formatNumber(Math.min(...values))}, max ${formatNumber(Math.max(...values))}.`;
    const [node, box] = figure(`${name}-curve`, heading, description, table(["step", heading], sampleIndices(s.step.length, 30).map((n) => [s.step[n], s[name][n]])));
    parent.append(node);
    linePlot(name, box, [s.step, s[name]], [{ label: heading, stroke: "#4f8fd0" }], { height: 150 });
  }
  if (run.experts.length) {
    const most = Math.max(...run.experts);
    outer.append(el("h3", {}, "share of tokens routed to each expert"), el("div", { class: "bars", tabindex: "0", role: "group", "aria-label": "experts" }, run.experts.flatMap((share, n) => [
      el("span", {}, n), el("span", { class: "bar" }, el("i", { style: `width:${100 * share / most}%;background:#4e79a7` })), el("span", {}, formatPercent(share))])));
  }
}

function drawGoodput(parent, run) {
  const g = run.goodput, rows = [["productive steps", g.share * g.wall_seconds], ...Object.entries(g.lost_seconds).sort((a, b) => b[1] - a[1])];
  if (!g.wall_seconds) return parent.append(el("p", { class: "dim" }, "No steps have been measured yet."));
  parent.append(table(["", "time", "share"], rows.map(([name, time]) => [name, formatSeconds(time), formatPercent(time / g.wall_seconds)])));
}

function drawEvents(parent, run) {
  const rows = run.events.slice().reverse();
  if (!rows.length) return parent.append(el("p", { class: "dim" }, "No events yet."));
  parent.append(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "events" }, el("table", {}, el("thead", {}, el("tr", {}, ["time", "step", "event", "message"].map((head, n) => el("th", { scope: "col", class: n > 1 ? "text" : "" }, head)))),
    el("tbody", {}, rows.map((event) => el("tr", ALERT_EVENTS.includes(event.event) ? { class: "slow" } : {}, el("td", {}, new Date(1e3 * event.time).toLocaleTimeString("en-GB")), el("td", {}, formatNumber(event.step)), el("td", { class: "text" }, event.event), el("td", { class: "text" }, String(event.message || ""))))))));
}

const PANELS = [
  ["loss", "Loss", drawLoss, true], ["time", "Step time breakdown", drawTimeBreakdown, true], ["heat", "Busy time per rank", drawHeatmap, true],
  ["pipeline", "Pipeline timeline: predicted and measured", drawTimeline, true], ["memory", "Memory per rank", drawMemory], ["mesh", "Device mesh", drawMesh],
  ["plan", "Plan: predicted and measured", drawPlan], ["goodput", "Goodput", drawGoodput], ["curves", "Other metrics", drawCurves, true],
  ["events", "Events", drawEvents, true], ["job", "Job", (parent, run) => parent.append(el("pre", { tabindex: "0" }, run.job)), true],
];

const drawnState = {};
function showRun(run) {
  document.title = `${run.name}: ${run.status}`;
  document.getElementById("name").textContent = run.name;
  document.getElementById("status").textContent = `${run.status}, layout ${run.layout}`;
  document.getElementById("summary").replaceChildren(...run.summary.map((sentence) => el("li", {}, sentence)));
  document.getElementById("tiles").replaceChildren(...run.tiles.map(([name, value]) => el("li", {}, el("b", {}, value), el("span", {}, name))));
  const main = document.querySelector("main");
  for (const [id, title, draw, wide] of PANELS) {
    const text = JSON.stringify([run[{ time: "time_breakdown", heat: "heatmap", curves: "series" }[id] || id], id === "loss" ? [run.series, run.events] : id === "heat" ? run.ranks : 0]);
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
    draw(body, run);
    panel.style.minHeight = "";
    if (focus && document.getElementById(focus.id)) document.getElementById(focus.id).querySelector("summary").focus();
  }
}

// Comparison of runs

function showComparison(all) {
  document.title = "Runs compared";
  document.getElementById("name").textContent = all.runs.map((run) => run.name).join(", ");
  const main = document.querySelector("main");
  const panel = (id, title) => {
    const body = el("div");
    main.append(el("section", { id, class: "wide", "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), body));
    return body;
  };
  panel("table", "Overview").append(table(all.headers, all.rows));
  panel("jobs", "Job differences").append(all.differences.length ? table(["key", ...all.runs.map((run) => run.name)], all.differences) : el("p", {}, "None."));
  for (const [id, title, x, y, label] of [["samples", "Loss over samples", "samples", "loss", "samples"], ["hours", "Loss over time", "hours", "loss", "hours"], ["speed", "Throughput", "samples", "tokens_per_s", "samples"]]) {
    const xs = [...new Set(all.runs.flatMap((run) => run[x]))].sort((a, b) => a - b);
    const data = all.runs.map((run) => { const at = new Map(run[x].map((key, n) => [key, run[y][n]])); return xs.map((key) => at.has(key) ? at.get(key) : null); });
    const [node, box] = figure(`${id}-plot`, "", `${title} of ${all.runs.length} runs`, table([label, ...all.runs.map((run) => run.name)], sampleIndices(xs.length, 40).map((n) => [xs[n], ...data.map((row) => row[n])])));
    panel(id, title).append(node);
    if (xs.length) linePlot(id, box, [xs, ...data], all.runs.map((run, n) => ({ label: run.name, stroke: RUN_COLOURS[n % RUN_COLOURS.length] })), { height: 300, x: label });
  }
}

const initial = JSON.parse(document.getElementById("state").textContent);
const redraw = () => { for (const id of Object.keys(drawnState)) delete drawnState[id]; for (const { plot } of plots.values()) plot.destroy(); plots.clear(); showRun(latest); };
let latest = initial;
if (initial.runs) showComparison(initial); else showRun(initial);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => initial.runs ? location.reload() : redraw());
let resizeTimer = 0;
addEventListener("resize", () => { clearTimeout(resizeTimer); resizeTimer = setTimeout(() => initial.runs ? resize() : redraw(), 150); });
const live = document.documentElement.dataset.live;
if (live) {
  const indicator = document.getElementById("live");
  const poll = async () => {
    try {
      const answer = await fetch(`${live}?version=${latest.version || ""}`);
      if (answer.status === 200) { latest = await answer.json(); showRun(latest); }
      indicator.textContent = "live";
    } catch (error) { indicator.textContent = "server unreachable; showing the last data received"; }
    setTimeout(poll, document.hidden ? 10000 : 2000);
  };
  setTimeout(poll, 2000);
}
