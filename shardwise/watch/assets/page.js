"use strict";
// The page of a run, or of some beside each other. Everything from files becomes text, never markup.
const COLOURS = {
  "compute": "#4e79a7", "optimizer": "#59a14f", "waiting for data": "#e15759", "checkpoint": "#9c755f",
  "validation": "#bab0ac", "pipeline bubble": "#f28e2b", "waiting: tensor": "#76b7b2", "waiting: context": "#b07aa1",
  "waiting: expert": "#e8c547", "waiting: shard": "#ff9da7", "waiting: replicate": "#d37295", "waiting: data": "#a0cbe8",
  "waiting: apart": "#86bcb6", "waiting: world": "#8c8c8c", "other": "#d4a6c8",
  "weights": "#4e79a7", "gradients": "#f28e2b", "the rest": "#bab0ac",
};
const RUNS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#76b7b2", "#e8c547"];
const KINDS = { F: ["forward", "#9ecae9"], B: ["backward", "#ffbf79"], I: ["backward: inputs", "#ffbf79"], W: ["backward: weights", "#a5d69a"] };
const LOUD = ["killed", "halted", "stuck", "failed", "rollback", "spike", "skipped", "stopped", "slow", "damaged checkpoint", "corruption", "lost", "fewer", "no checkpoint"];
const NAMES = {
  loss: "loss", grad_norm: "gradient norm", lr: "learning rate", utilisation: "share of the peak FLOP/s",
  memory_gib: "memory of rank 0, GiB", loss_scale: "loss scale", gradient_ratio: "compression of gradients",
  expert_imbalance: "busiest expert over the mean", expert_dropped: "choices that found no room",
};
const colour = (name, n) => COLOURS[name] || RUNS[n % RUNS.length];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (x) => x === null || x === undefined ? "" : typeof x !== "number" ? String(x)
  : x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6) ? x.toExponential(2) : String(+x.toPrecision(4));
const seconds = (x) => x < 1 ? `${+(1e3 * x).toPrecision(3)} ms` : `${+x.toPrecision(4)} s`;
const percent = (x) => `${(100 * x).toFixed(x < 0.1 ? 1 : 0)}%`;

function el(tag, given, ...inside) {
  const found = document.createElement(tag);
  for (const [key, value] of Object.entries(given || {})) {
    if (key === "class") found.className = value; else if (key === "style") found.style.cssText = value;
    else found.setAttribute(key, value);
  }
  found.append(...inside.flat().filter((one) => one !== null && one !== undefined).map((one) => one instanceof Node ? one : String(one)));
  return found;
}

function table(heads, rows, { slow, text } = {}) {
  // `text`: from which column on there are words.
  const side = (n) => text && n >= text ? { class: "text" } : {};
  return el("table", {}, el("thead", {}, el("tr", {}, heads.map((one, n) => el("th", { scope: "col", ...side(n) }, one)))),
    el("tbody", {}, rows.map((row) => el("tr", slow && slow(row) ? { class: "slow" } : {}, row.map((one, n) => el("td", side(n), short(one)))))));
}

const opened = new Set();  // what the reader has unfolded stays so when a panel is drawn anew

function folded(id, words, inside) {
  return el("details", opened.has(id) ? { id, open: "" } : { id }, el("summary", {}, words), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": words }, inside));
}

function sparse(count, most) {
  return [...new Array(Math.min(count, most)).keys()].map((n) => count <= most ? n : Math.round(n * (count - 1) / (most - 1)));
}

function key(names) {
  return el("ul", { class: "key", "aria-label": "key" }, names.map(([name, shade]) => el("li", {}, el("i", { style: `background:${shade}` }), name)));
}

// Curves

const plots = new Map();

function curve(id, box, data, lines, more) {
  // Keeps a plot whose lines are the same, so that a zoom and the pointer stay where they are.
  const form = JSON.stringify(lines.map((one) => [one.label, one.stroke]));
  const kept = plots.get(id);
  if (kept && kept.form === form) {
    kept.more = more || {};
    kept.plot.setData(data, kept.plot.scales.x.min === kept.low && kept.plot.scales.x.max === kept.high);
    [kept.low, kept.high] = [data[0][0], data[0][data[0].length - 1]];
    box.append(kept.plot.root);
    return;
  }
  if (kept) kept.plot.destroy();
  const told = { form, more: more || {}, low: data[0][0], high: data[0][data[0].length - 1] };
  const axis = { stroke: () => css("--dim"), grid: { stroke: () => css("--edge"), width: 1 }, ticks: { stroke: () => css("--edge"), width: 1 }, font: "11px system-ui" };
  told.plot = new uPlot({
    width: Math.max(240, box.clientWidth), height: (more && more.height) || 240, scales: { x: { time: false }, ...(more && more.zero ? { y: { range: (u, low, high) => [0, high * 1.05] } } : {}) },
    legend: { live: true }, cursor: { drag: { x: true, y: false } }, padding: [8, 16, 0, 0],
    axes: [{ ...axis, values: (u, all) => all.map(short) }, { ...axis, size: 58, values: (u, all) => all.map(short) }],
    bands: (more && more.bands) || [],
    series: [{ label: (more && more.x) || "step", value: (u, v) => short(v) }, ...lines.map((one) => ({
      width: 1.5, points: { show: data[0].length < 3 }, value: (u, v) => short(v), spanGaps: true, ...one }))],
    hooks: { draw: [(u) => told.more.draw && told.more.draw(u)] },
  }, data, box);
  plots.set(id, told);
}

function resize() {
  for (const { plot } of plots.values()) {
    const box = plot.root.parentElement;
    if (box && box.clientWidth) plot.setSize({ width: Math.max(240, box.clientWidth), height: plot.height });
  }
}

function figure(id, heading, words, asTable) {
  const box = el("div", { role: "img", "aria-label": words });
  const whole = el("figure", { id }, heading ? el("h3", {}, heading) : null, box, asTable ? folded(`${id}-table`, "As a table", asTable) : null);
  return [whole, box];
}

function events_on(u, events) {
  // Lines where something happened; the loud ones in colour.
  for (const event of events) {
    if (typeof event.step !== "number") continue;
    const loud = LOUD.includes(event.event);
    if (!loud && event.event !== "resumed") continue;
    const x = u.valToPos(event.step, "x", true);
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
    u.ctx.save();
    u.ctx.strokeStyle = u.ctx.fillStyle = css(loud ? "--mark" : "--dim");
    u.ctx.setLineDash([4, 4]);
    u.ctx.beginPath(); u.ctx.moveTo(x, u.bbox.top); u.ctx.lineTo(x, u.bbox.top + u.bbox.height); u.ctx.stroke();
    u.ctx.font = `${11 * devicePixelRatio}px system-ui`;
    u.ctx.fillText(event.event, x + 3, u.bbox.top + 12 * devicePixelRatio);
    u.ctx.restore();
  }
}

function loss(at, run) {
  const s = run.series;
  if (!s.step.length) return at.append(el("p", { class: "dim" }, "No step has been measured yet."));
  const last = s.loss.filter((x) => x !== null).slice(-1)[0];
  const places = sparse(s.step.length, 40);
  const checks = run.events.filter((one) => one.event === "validation" && typeof one.step === "number");
  const marked = run.events.filter((one) => LOUD.includes(one.event));
  const words = `Loss over ${s.step.length} points, from ${short(s.loss[0])} to ${short(last)}; ${marked.length} marked events.`;
  const [whole, box] = figure("loss-plot", "", words, [
    table(["step", "loss", "least", "most"], places.map((n) => [s.step[n], s.loss[n], s.loss_low[n], s.loss_high[n]])),
    checks.length ? table(["step", "validation loss"], checks.map((one) => [one.step, one.loss])) : null]);
  at.append(whole);
  const held = s.step.map(() => null);
  for (const one of checks) {
    let n = s.step.findIndex((step) => step >= one.step);
    held[n < 0 ? s.step.length - 1 : n] = one.loss;
  }
  curve("loss", box, [s.step, s.loss_high, s.loss_low, s.loss, held], [
    { label: "most", stroke: "#9ecae9", width: 0.5 }, { label: "least", stroke: "#9ecae9", width: 0.5 },
    { label: "loss", stroke: "#4f8fd0" },
    { label: "validation", stroke: "#f28e2b", width: 0, points: { show: true, size: 7, fill: "#f28e2b" }, spanGaps: false },
  ], { bands: [{ series: [1, 2], fill: "#9ecae955" }], height: 280, draw: (u) => events_on(u, run.events) });
  if (s.broken.length) at.append(el("p", { class: "small" }, "Not a number: ", s.broken.map(([step, word]) => `${word} in step ${step}`).join(", "), "."));
}

function band(at, run) {
  const p = run.parts;
  if (!p.step.length) return at.append(el("p", { class: "dim" }, "No rank has told yet."));
  const sums = p.step.map(() => 0);
  const stacked = p.values.map((row) => row.map((value, n) => sums[n] += value || 0));
  const shares = p.values.map((row) => row.reduce((a, b) => a + b, 0)), all = shares.reduce((a, b) => a + b, 0);
  const words = "Seconds of a step, in the mean over ranks: " + p.names.map((name, n) => `${name} ${percent(shares[n] / all)}`).join(", ") + ".";
  const [whole, box] = figure("band-plot", "seconds, in the mean over ranks", words, table(["step", ...p.names], sparse(p.step.length, 40).map((n) => [p.step[n], ...p.values.map((row) => row[n])])));
  at.append(whole);
  const order = p.names.map((_, n) => p.names.length - 1 - n);  // the whole first, so that lower ones lie above it
  curve("band", box, [p.step, ...order.map((n) => stacked[n])], order.map((n) => ({
    label: `${p.names[n]} ${percent(shares[n] / all)}`, stroke: colour(p.names[n], n), fill: colour(p.names[n], n), width: 0,
    points: { show: false }, value: (u, v, s, place) => place === null ? "" : seconds(p.values[n][place] || 0),
  })), { height: 280, zero: true });
}

// What is drawn by hand

function canvas(box, height) {
  const found = el("canvas", { "aria-hidden": "true" });
  box.append(found);
  const scale = devicePixelRatio || 1, width = Math.max(240, box.clientWidth);
  found.width = width * scale; found.height = height * scale; found.style.height = `${height}px`;
  const ctx = found.getContext("2d");
  ctx.scale(scale, scale);
  ctx.font = "11px system-ui"; ctx.textBaseline = "middle"; ctx.fillStyle = css("--text");
  return [ctx, width, found];
}

const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
function ramp(x) {
  const place = Math.min(0.9999, Math.max(0, x)) * 4, n = Math.floor(place), part = place - n;
  return `rgb(${RAMP[n].map((low, i) => Math.round(low + part * (RAMP[n + 1][i] - low))).join(",")})`;
}

function heat(at, run) {
  const h = run.heat, r = run.ranks;
  if (!h.ranks.length) return at.append(el("p", { class: "dim" }, "No rank has told yet."));
  const every = h.values.flat().filter((x) => x !== null).sort((a, b) => a - b);
  const at_share = (share) => every[Math.min(every.length - 1, Math.floor(share * every.length))];
  const low = at_share(0.02), high = Math.max(at_share(0.98), 1.5 * at_share(0.5));  // noise is not to look like a fault
  const words = `Seconds of each rank's own work in a step, ${h.ranks.length} rows over ${h.step.length} columns, from ${seconds(every[0])} to ${seconds(every[every.length - 1])}; the lighter, the longer.`
    + (r.slow.length ? ` Standing out: rank ${r.slow.join(", ")}.` : "");
  const ranks = r.values.length ? r.values[0].map((_, n) => n) : [];
  const [whole, box] = figure("heat-plot", "", words, table(["rank", ...r.names.map((name) => `${name}, s`)], ranks.map((n) => [n, ...r.values.map((row) => row[n])]), { slow: (row) => r.slow.includes(row[0]) }));
  at.append(whole);
  const row = Math.max(3, Math.min(28, 320 / h.ranks.length)), left = 34;
  const [ctx, width, found] = canvas(box, row * h.ranks.length + 20);
  const cell = (width - left - 8) / h.step.length;
  h.values.forEach((line, y) => line.forEach((value, x) => {
    if (value === null) return;
    ctx.fillStyle = ramp((value - low) / ((high - low) || 1));
    ctx.fillRect(left + x * cell, y * row, cell + 0.5, row - (row > 6 ? 1 : 0));
  }));
  ctx.fillStyle = css("--text"); ctx.textAlign = "right";
  h.ranks.forEach((rank, y) => { if (row >= 11 || y % Math.ceil(11 / row) === 0) ctx.fillText(rank, left - 5, y * row + row / 2); });
  ctx.textAlign = "left"; ctx.fillText(`step ${h.step[0]}`, left, row * h.ranks.length + 11);
  ctx.textAlign = "right"; ctx.fillText(`step ${h.step[h.step.length - 1]}`, width - 8, row * h.ranks.length + 11);
  const told = el("p", { class: "small dim" }, words);
  whole.insertBefore(told, whole.querySelector("details"));
  found.onmousemove = (event) => {
    const x = Math.floor((event.offsetX - left) / cell), y = Math.floor(event.offsetY / row);
    if (h.values[y] && h.values[y][x] !== undefined) told.textContent = `Rank ${h.ranks[y]}, step ${h.step[x]}: ${seconds(h.values[y][x])} of own work.`;
  };
}

function timeline(at, run) {
  const p = run.pipeline;
  if (!p) return at.append(el("p", { class: "dim" }, "This layout has no pipeline: every rank runs all layers."));
  const told = [["predicted", p.predicted], ["measured", p.measured]].filter((one) => one[1]);
  const rows = [["predicted by the plan", p.predicted], ["simulated with the times of the stages as measured", p.simulated], ["measured", p.measured]].filter((one) => one[1]);
  at.append(table(["bubble", "share of the time"], rows.map(([name, one]) => [name, percent(one.bubble)])));
  if (!p.measured) at.append(el("p", { class: "dim" }, "No step of the pipeline has been recorded yet."));
  const longest = Math.max(...told.map((one) => one[1].seconds)), least = Math.min(...told.map((one) => one[1].seconds));
  for (const [name, one] of told) {
    const span = longest > 4 * least ? one.seconds : longest;  // on one scale where both can be seen on it
    const words = `${name}: ${p.ranks} ranks, ${p.micro_batches} micro-batches, ${seconds(one.seconds)}, bubble ${percent(one.bubble)}` + (one.step ? `, step ${one.step}` : "");
    const [whole, box] = figure(`${name}-plot`, words, words, table(["rank", "action", "stage", "micro-batch", "from, s", "to, s"], one.actions.slice(0, 400).map(([rank, kind, ...rest]) => [rank, (KINDS[kind] || [kind])[0], ...rest])));
    at.append(whole);
    const row = Math.max(10, Math.min(24, 260 / p.ranks)), left = 34, [ctx, width] = canvas(box, row * p.ranks + 2);
    const scale = (width - left - 8) / span;
    ctx.fillStyle = css("--soft"); ctx.fillRect(left, 0, width - left - 8, row * p.ranks);
    for (const [rank, kind, stage, number, begin, end] of one.actions) {
      const x = left + begin * scale, wide = Math.max(0.5, (end - begin) * scale - 0.5);
      ctx.fillStyle = (KINDS[kind] || ["", "#bab0ac"])[1]; ctx.fillRect(x, rank * row, wide, row - 2);
      if (stage >= p.ranks) { ctx.fillStyle = "#1f293373"; ctx.fillRect(x, rank * row, wide, 3); }
      if (wide > 14) { ctx.fillStyle = "#1f2933"; ctx.textAlign = "center"; ctx.fillText(number, x + wide / 2, rank * row + row / 2); }
    }
    ctx.fillStyle = css("--text"); ctx.textAlign = "right";
    for (let rank = 0; rank < p.ranks; rank++) ctx.fillText(rank, left - 5, rank * row + row / 2);
  }
  const kinds = [...new Set(told.flatMap((one) => one[1].actions.map((action) => action[1])))];
  at.append(key(kinds.filter((kind) => KINDS[kind]).map((kind) => KINDS[kind])), el("p", { class: "small dim" }, "Numbers are micro-batches; gaps are the bubble; a dark upper edge marks a rank's later stages."));
}

function memory(at, run) {
  const m = run.memory, parts = ["weights", "gradients", "optimizer", "the rest"];
  if (!m.rows.length) return at.append(el("p", { class: "dim" }, "No rank has told yet."));
  const sum = (row) => parts.reduce((all, part) => all + (row[part] || 0), 0);
  const most = Math.max(...m.rows.map((row) => Math.max(sum(row), row.planned || 0)));
  const bars = el("div", { class: "bars", tabindex: "0", role: "group", "aria-label": "memory of each rank" });
  for (const row of m.rows) {
    const words = `rank ${row.rank}: ${short(sum(row))} GiB` + (row.planned ? `, planned ${short(row.planned)}` : "");
    bars.append(el("span", {}, row.rank), el("span", { class: "bar", role: "img", "aria-label": words, title: words },
      parts.map((part) => row[part] ? el("i", { style: `width:${100 * row[part] / most}%;background:${colour(part)}` }) : null),
      row.planned ? el("u", { style: `left:calc(${100 * row.planned / most}% - 1px)` }) : null), el("span", {}, `${short(sum(row))} GiB`));
  }
  at.append(bars, key([...parts.map((part) => [part, colour(part)]), ["planned", css("--mark")]]));
  if (m.limit) at.append(el("p", { class: "small dim" }, `The plan takes a rank to have ${short(m.limit)} GiB. The most that was held; "the rest" is activations, buffers, and on a CPU the process itself.`));
  at.append(folded("memory-table", "As a table", table(["rank", ...parts, "planned"], m.rows.map((row) => [row.rank, ...parts.map((part) => row[part] || 0), row.planned]))));
}

function mesh(at, run) {
  const m = run.mesh;
  if (!m) return at.append(el("p", { class: "dim" }, "The layout of this run is not known."));
  const size = Object.fromEntries(m.axes), inner = size.context * size.tensor, data = size.replicate * size.shard;
  const rows = Math.min(data, 16), columns = Math.min(size.pipeline, 16), side = Math.min(inner, 16), box = 26;
  const wide = side * box + 12, high = box + 12, gap = 26, left = 8, top = 20;
  const ns = "http://www.w3.org/2000/svg", make = (tag, given, words) => {
    const one = document.createElementNS(ns, tag);
    for (const [name, value] of Object.entries(given)) one.setAttribute(name, value);
    if (words !== undefined) one.textContent = words;
    return one;
  };
  const width = left + columns * (wide + gap), height = top + rows * (high + 8) + 4;
  const words = `${run.world} ranks: ` + (m.axes.filter((one) => one[1] > 1).map(([name, n]) => `${name}=${n}`).join(", ") || "one device") + ".";
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": words });
  const work = m.work.filter((x) => x !== null).sort((a, b) => a - b), middle = work[Math.floor((work.length - 1) / 2)];
  for (let stage = 0; stage < columns; stage++) {
    const x = left + stage * (wide + gap);
    if (size.pipeline > 1) svg.append(make("text", { x, y: 12 }, `stage ${stage}`));
    for (let row = 0; row < rows; row++) {
      const y = top + row * (high + 8);
      svg.append(make("rect", { x, y, width: wide, height: high, rx: 5, fill: "none", stroke: css("--dim") }));
      if (stage + 1 < columns) svg.append(make("path", { d: `M${x + wide + 2} ${y + high / 2}h${gap - 6}m-5 -4l5 4l-5 4`, fill: "none", stroke: css("--dim") }));
      if (row) svg.append(make("path", { d: `M${x + wide / 2} ${y - 8}v8`, stroke: css("--dim"), "stroke-dasharray": "2 2" }));
      for (let n = 0; n < side; n++) {
        const rank = (stage * data + row) * inner + n, value = m.work[rank];
        const shade = value === undefined || value === null || !middle ? 0.3 : Math.max(0, 0.3 + value / middle - 1);
        svg.append(make("rect", { x: x + 7 + n * box, y: y + 7, width: box - 2, height: box - 2, rx: 3, fill: ramp(shade) }));
        svg.append(make("text", { x: x + 6 + n * box + box / 2, y: y + 23, "text-anchor": "middle", style: `fill:${shade > 0.6 ? "#111" : "#fff"}` }, rank));
      }
    }
  }
  at.append(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "the mesh" }, svg));
  const about = { pipeline: "stages, left to right; activations and their gradients", replicate: "copies, top to bottom; sums of gradients", shard: "top to bottom; sums of gradients, gathers of weights", context: "within a box; keys and values", tensor: "within a box; sums and gathers of activations", expert: "tokens to their experts", data: "counts and compressed sums", apart: "meetings of replicas", world: "norm and signals" };
  const listed = [...m.axes.filter((one) => one[1] > 1), ...["expert", "data", "apart", "world"].filter((name) => m.waits[name]).map((name) => [name, ""])];
  at.append(table(["axis", "ranks", "waits of a step", "what travels"], listed.map(([name, n]) => [name, n, percent(m.waits[name] || 0), about[name]]), { text: 3 }));
  at.append(el("p", { class: "small dim" }, "Squares are ranks; the lighter, the longer they compute."));
}

function plan(at, run) {
  if (run.plan.reason) at.append(el("p", { class: "small" }, run.plan.reason));
  at.append(table(["", "predicted", "measured", "off by"], run.plan.rows));
  if (!run.plan.rows.length) at.append(el("p", { class: "dim" }, "Nothing to compare yet."));
  if (run.plan.rejected.length) at.append(folded("rejected", "What lost, and why", el("ul", {}, run.plan.rejected.map((one) => el("li", {}, el("code", {}, one.layout || one.choice || ""), `: ${one.reason || ""}`)))));
}

function curves(at, run) {
  const s = run.series, outer = at;
  outer.append(at = el("div", { class: "pair" }));
  for (const name of Object.keys(s).filter((one) => one in NAMES || one === "tokens_per_s").filter((one) => one !== "loss")) {
    const heading = NAMES[name] || `${run.unit}/s`, there = s[name].filter((x) => x !== null);
    const words = `${heading}: last ${short(there[there.length - 1])}, least ${short(Math.min(...there))}, most ${short(Math.max(...there))}.`;
    const [whole, box] = figure(`${name}-curve`, heading, words, table(["step", heading], sparse(s.step.length, 30).map((n) => [s.step[n], s[name][n]])));
    at.append(whole);
    curve(name, box, [s.step, s[name]], [{ label: heading, stroke: "#4f8fd0" }], { height: 150 });
  }
  if (run.experts.length) {
    const most = Math.max(...run.experts);
    outer.append(el("h3", {}, "share of each expert"), el("div", { class: "bars", tabindex: "0", role: "group", "aria-label": "experts" }, run.experts.flatMap((share, n) => [
      el("span", {}, n), el("span", { class: "bar" }, el("i", { style: `width:${100 * share / most}%;background:#4e79a7` })), el("span", {}, percent(share))])));
  }
}

function good(at, run) {
  const g = run.goodput, rows = [["steps that counted", g.share * g.wall], ...Object.entries(g.losses).sort((a, b) => b[1] - a[1])];
  if (!g.wall) return at.append(el("p", { class: "dim" }, "No step has been measured yet."));
  at.append(table(["", "time", "share"], rows.map(([name, time]) => [name, seconds(time), percent(time / g.wall)])));
}

function events(at, run) {
  const rows = run.events.slice().reverse();
  if (!rows.length) return at.append(el("p", { class: "dim" }, "Nothing has happened yet."));
  at.append(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "events" }, el("table", {}, el("thead", {}, el("tr", {}, ["time", "step", "event", "what happened"].map((one, n) => el("th", { scope: "col", class: n > 1 ? "text" : "" }, one)))),
    el("tbody", {}, rows.map((one) => el("tr", LOUD.includes(one.event) ? { class: "slow" } : {}, el("td", {}, new Date(1e3 * one.time).toLocaleTimeString("en-GB")), el("td", {}, short(one.step)), el("td", { class: "text" }, one.event), el("td", { class: "text" }, String(one.message || ""))))))));
}

const PANELS = [
  ["loss", "Loss", loss, true], ["time", "Where a step's time goes", band, true], ["heat", "Ranks over time", heat, true],
  ["pipeline", "Pipeline, predicted and measured", timeline, true], ["memory", "Memory of each rank", memory], ["mesh", "Layout", mesh],
  ["plan", "Plan and how far off it was", plan], ["goodput", "Goodput", good], ["curves", "Other curves", curves, true],
  ["events", "Events", events, true], ["job", "Job", (at, run) => at.append(el("pre", { tabindex: "0" }, run.job)), true],
];

const shown = {};
function show(run) {
  document.title = `${run.name}: ${run.status}`;
  document.getElementById("name").textContent = run.name;
  document.getElementById("status").textContent = `${run.status}, layout ${run.layout}`;
  document.getElementById("words").replaceChildren(...run.words.map((one) => el("li", {}, one)));
  document.getElementById("tiles").replaceChildren(...run.tiles.map(([name, value]) => el("li", {}, el("b", {}, value), el("span", {}, name))));
  const main = document.querySelector("main");
  for (const [id, title, draw, wide] of PANELS) {
    const text = JSON.stringify([run[{ time: "parts", curves: "series" }[id] || id], id === "loss" ? [run.series, run.events] : id === "heat" ? run.ranks : 0]);
    if (shown[id] === text) continue;
    shown[id] = text;
    let panel = document.getElementById(id);
    if (!panel) {
      panel = el("section", { id, "aria-labelledby": `${id}-title`, class: wide ? "wide" : "" });
      main.append(panel);
    }
    const body = el("div"), focus = panel.contains(document.activeElement) && document.activeElement.closest("details");
    for (const one of panel.querySelectorAll("details")) opened[one.open ? "add" : "delete"](one.id);
    panel.style.minHeight = `${panel.offsetHeight}px`;  // so that nothing below jumps
    panel.replaceChildren(el("h2", { id: `${id}-title` }, title), body);
    draw(body, run);
    panel.style.minHeight = "";
    if (focus && document.getElementById(focus.id)) document.getElementById(focus.id).querySelector("summary").focus();
  }
}

// Runs beside each other

function compare(all) {
  document.title = "Runs compared";
  document.getElementById("name").textContent = all.runs.map((one) => one.name).join(", ");
  const main = document.querySelector("main");
  const panel = (id, title) => {
    const body = el("div");
    main.append(el("section", { id, class: "wide", "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), body));
    return body;
  };
  panel("table", "Side by side").append(table(all.heads, all.rows));
  panel("jobs", "What the jobs differ in").append(all.differences.length ? table(["key", ...all.runs.map((one) => one.name)], all.differences) : el("p", {}, "Nothing."));
  for (const [id, title, x, y, label] of [["samples", "Loss over samples", "samples", "loss", "samples"], ["hours", "Loss over time", "hours", "loss", "hours"], ["speed", "Throughput", "samples", "tokens_per_s", "samples"]]) {
    const places = [...new Set(all.runs.flatMap((one) => one[x]))].sort((a, b) => a - b);
    const data = all.runs.map((one) => { const at = new Map(one[x].map((place, n) => [place, one[y][n]])); return places.map((place) => at.has(place) ? at.get(place) : null); });
    const [whole, box] = figure(`${id}-plot`, "", `${title} of ${all.runs.length} runs`, table([label, ...all.runs.map((one) => one.name)], sparse(places.length, 40).map((n) => [places[n], ...data.map((row) => row[n])])));
    panel(id, title).append(whole);
    if (places.length) curve(id, box, [places, ...data], all.runs.map((one, n) => ({ label: one.name, stroke: RUNS[n % RUNS.length] })), { height: 300, x: label });
  }
}

const given = JSON.parse(document.getElementById("state").textContent);
const again = () => { for (const id of Object.keys(shown)) delete shown[id]; for (const { plot } of plots.values()) plot.destroy(); plots.clear(); show(latest); };
let latest = given;
if (given.runs) compare(given); else show(given);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => given.runs ? location.reload() : again());
let waiting = 0;
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => given.runs ? resize() : again(), 150); });
const live = document.documentElement.dataset.live;
if (live) {
  const told = document.getElementById("live");
  const ask = async () => {
    try {
      const answer = await fetch(`${live}?have=${latest.version || ""}`);
      if (answer.status === 200) { latest = await answer.json(); show(latest); }
      told.textContent = "live";
    } catch (error) { told.textContent = "the server has gone; this is what was last seen"; }
    setTimeout(ask, document.hidden ? 10000 : 2000);
  };
  setTimeout(ask, 2000);
}
