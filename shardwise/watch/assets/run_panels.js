// Panels of a run that show curves, tables and texts.
const ALERT_EVENTS = ["killed", "suspended", "hung", "failed", "rollback", "loss_spike", "step_skipped", "straggler", "checkpoint_corrupt", "corruption", "node_lost", "scaled_down", "checkpoint_failed", "warning", "data_changed"];
const METRIC_LABELS = {
  loss: "loss", grad_norm: "gradient norm", lr: "learning rate", mfu: "MFU (model FLOPs utilization)",
  memory_gib: "peak memory of rank 0 (GiB)", loss_scale: "loss scale", gradient_compression_ratio: "gradient compression ratio",
  gpu_temperature: "GPU temperature of rank 0 (\u00b0C)", gpu_power: "GPU power of rank 0 (W)", gpu_utilization: "GPU utilization of rank 0 (%)",
  expert_imbalance: "expert load imbalance (max / mean)", expert_drop_fraction: "dropped token fraction",
};
const metricLabel = (name, unit) => METRIC_LABELS[name] || `${unit}/s`;
const metricNames = (series) => Object.keys(series).filter((name) => name !== "loss" && (name in METRIC_LABELS || name === "tokens_per_s"));
const LINE = "#4f8fd0";

function marksOf(run) {
  // Alerts, resumes, and where the layout changed.
  const changes = run.allSegments.slice(1).map((segment) => [segment.before, `layout: ${segment.layout}`, false]);
  const events = run.events.filter((event) => isNumber(event.step) && (ALERT_EVENTS.includes(event.event) || event.event === "resumed"))
    .filter((event) => event.event !== "resumed" || !changes.some(([step]) => step === event.step))
    .map((event) => [event.step, event.event, ALERT_EVENTS.includes(event.event)]);
  const all = [...changes, ...events].sort((a, b) => a[0] - b[0]), at = axisAt(run.series, all.map((mark) => mark[0]));
  return all.map(([, ...rest], n) => [at[n], ...rest]);
}

function drawLoss(parent, run) {
  const s = run.series;
  if (!s.step.length) return parent.append(dim("No steps have been measured yet."));
  const indices = sampleIndices(s.step.length, 40), known = s.loss.filter(isNumber);
  const validations = run.events.filter((event) => event.event === "validation" && isNumber(event.step));
  const alerts = run.events.filter((event) => ALERT_EVENTS.includes(event.event));
  const description = `Loss over ${s.step.length} points, from ${formatNumber(known[0])} to ${formatNumber(known[known.length - 1])}; ${alerts.length} alert events.`;
  const [node, box] = figure("loss-plot", "", description, [
    table(["step", "loss", "min", "max"], indices.map((n) => [s.step[n], s.loss[n], s.loss_low[n], s.loss_high[n]])),
    validations.length ? table(["step", "validation loss"], validations.map((event) => [event.step, event.loss])) : null]);
  parent.append(node);
  const validation = s.step.map(() => null);
  for (const event of validations) {
    const n = s.step.findIndex((step) => step >= event.step);
    validation[n < 0 ? s.step.length - 1 : n] = isNumber(event.loss) ? event.loss : null;
  }
  const isBinned = s.loss.some((x, n) => x !== s.loss_low[n]);
  const lines = [
    ...(isBinned ? [{ label: "max", stroke: "#9ecae9", width: 0.5, data: s.loss_high }, { label: "min", stroke: "#9ecae9", width: 0.5, data: s.loss_low }] : []),
    { label: "loss", stroke: smoothing() ? faint(LINE) : LINE, data: s.loss },
    ...(smoothing() ? [{ label: `loss, smoothed ${view.smooth}`, stroke: LINE, width: 2, data: smoothed(s.loss) }] : []),
    ...(validations.length ? [{ label: "validation", stroke: "#f28e2b", width: 0, points: { show: true, size: 7, fill: "#f28e2b" }, spanGaps: false, data: validation }] : []),
  ];
  linePlot("loss", box, [axisOf(s), ...lines.map((line) => line.data)], lines.map(({ data, ...line }) => line),
    { bands: isBinned ? [{ series: [1, 2], fill: "#9ecae955" }] : [], height: 280, x: axisLabel(run.unit), draw: (u) => drawMarks(u, marksOf(run)) });
  if (s.non_finite_losses.length) parent.append(el("p", { class: "small" }, "Non-finite loss: ", s.non_finite_losses.map(([step, value]) => `${value} at step ${step}`).join(", "), "."));
}

function drawTimeBreakdown(parent, run) {
  const p = run.time_breakdown;
  if (!p.step.length) return parent.append(dim("No rank has reported yet."));
  const sums = p.step.map(() => 0);
  const stacked = p.values.map((row) => row.map((value, n) => sums[n] += value || 0));
  const shares = p.values.map((row) => row.reduce((a, b) => a + b, 0)), all = shares.reduce((a, b) => a + b, 0);
  const description = "Step time breakdown, mean over ranks: " + p.names.map((name, n) => `${name} ${formatPercent(shares[n] / all)}`).join(", ") + ".";
  const [node, box] = figure("band-plot", "seconds per step, mean over ranks", description, table(["step", ...p.names], sampleIndices(p.step.length, 40).map((n) => [p.step[n], ...p.values.map((row) => row[n])])));
  parent.append(node);
  const order = p.names.map((_, n) => p.names.length - 1 - n);  // the tallest area first, so that the others are drawn over it
  linePlot("band", box, [axisAt(run.series, p.step), ...order.map((n) => stacked[n])], order.map((n) => ({
    label: `${p.names[n]} ${formatPercent(shares[n] / all)}`, stroke: colour(p.names[n], n), fill: colour(p.names[n], n), width: 0,
    points: { show: false }, value: (u, v, s, index) => formatSeconds(p.values[n][index === null ? p.step.length - 1 : index] || 0),
  })), { height: 280, zero: true, log: false, x: axisLabel(run.unit) });
}

function drawCurves(parent, run) {
  const s = run.series, grid = el("div", { class: "pair" });
  parent.append(grid);
  for (const name of metricNames(s)) {
    const heading = metricLabel(name, run.unit), values = s[name].filter(isNumber);
    const description = `${heading}: last ${formatNumber(values[values.length - 1])}, min ${formatNumber(Math.min(...values))}, max ${formatNumber(Math.max(...values))}.`;
    const [node, box] = figure(`${name}-curve`, heading, description, table(["step", heading], sampleIndices(s.step.length, 30).map((n) => [s.step[n], s[name][n]])));
    grid.append(node);
    const lines = smoothing() ? [[s[name], { label: "measured", stroke: faint(LINE) }], [smoothed(s[name]), { label: `smoothed ${view.smooth}`, stroke: LINE, width: 2 }]] : [[s[name], { label: heading, stroke: LINE }]];
    linePlot(name, box, [axisOf(s), ...lines.map((line) => line[0])], lines.map((line) => line[1]), { height: 150, x: axisLabel(run.unit) });
  }
  if (run.experts.length) {
    const most = Math.max(...run.experts);
    parent.append(el("h3", {}, "share of tokens routed to each expert"), el("div", { class: "bars", tabindex: "0", role: "group", "aria-label": "experts" }, run.experts.flatMap((share, n) => [
      el("span", {}, n), el("span", { class: "bar" }, el("i", { style: `width:${100 * share / most}%;background:#4e79a7` })), el("span", {}, formatPercent(share))])));
  }
}

function planRows(run) {
  // What the plan predicted beside what was measured; without what no plan counts: checkpoints and validation.
  const p = run.plan.predicted, rows = [], step = run.figures.step_seconds, waits = run.mesh ? run.mesh.waits : {};
  const add = (label, predicted, measured, format) => {
    if (isNumber(predicted) && isNumber(measured)) rows.push([label, format(predicted), format(measured), measured ? `${predicted >= measured ? "+" : "\u2212"}${Math.abs(100 * (predicted / measured - 1)).toFixed(0)}%` : ""]);
  };
  const meanOf = (name) => { const row = run.ranks.values[run.ranks.names.indexOf(name)] || []; return row.length ? row.reduce((a, b) => a + b, 0) / row.length : 0; };
  const planned = isNumber(step) ? step - meanOf("checkpoint") - meanOf("validation") : null;
  add("step time without checkpoints and validation", p.step_seconds, planned, formatSeconds);
  add(`${run.unit}/s without them`, p.tokens_per_s, run.figures.units / planned, (x) => x >= 100 ? Math.round(x).toLocaleString("en") : formatNumber(x));
  add("peak memory per rank", p.peak_memory_gib, run.figures.peak_gib, (x) => `${+x.toPrecision(3)} GiB`);
  for (const [axis, seconds] of Object.entries(p.exposed_seconds && typeof p.exposed_seconds === "object" ? p.exposed_seconds : {})) {
    if (axis === "pipeline") continue;
    const axes = axis === "data" ? ["shard", "replicate", "data"] : [axis];
    add(`exposed communication (${axis === "data" ? "data parallel" : axis})`, seconds, step * axes.reduce((sum, name) => sum + (waits[name] || 0), 0), formatSeconds);
  }
  if (run.pipeline && run.pipeline.measured && run.pipeline.predicted) add("pipeline bubble", run.pipeline.predicted.bubble, run.pipeline.measured.bubble, formatPercent);
  return rows;
}

function drawPlan(parent, run) {
  const rows = planRows(run);
  if (run.plan.reason) parent.append(el("p", { class: "small" }, run.plan.reason));
  if (rows.length) parent.append(table(["", "predicted", "measured", "error"], rows));
  else parent.append(dim("No prediction, or no measured step to compare it with."));
  if (run.plan.rejected.length) parent.append(collapsible("rejected", "Rejected layouts and why", el("ul", {}, run.plan.rejected.map((layout) => el("li", {}, el("code", {}, layout.layout || layout.choice || ""), `: ${layout.reason || ""}`)))));
}

function drawGoodput(parent, run) {
  const g = run.goodput, rows = [["productive steps", g.productive_seconds], ...Object.entries(g.lost_seconds).sort((a, b) => b[1] - a[1])];
  if (!g.wall_seconds) return parent.append(dim("No steps have been measured yet."));
  parent.append(table(["", "time", "share"], [...rows, ["wall time", g.wall_seconds]].map(([name, time]) => [name, formatSeconds(time), formatPercent(time / g.wall_seconds)])));
}

function drawEvents(parent, run) {
  const rows = run.events.slice().reverse();
  if (!rows.length) return parent.append(dim("No events yet."));
  parent.append(scrolled("events", table(["time", "step", "event", "message"], rows.map((event) => [el("span", { title: formatDate(event.time) }, new Date(1e3 * event.time).toLocaleTimeString("en-GB")), event.step, event.event, String(event.message || "")]),
    { text: 2, cards: true, slow: (row) => ALERT_EVENTS.includes(row[2]) })));
}

function showNotes(run) {
  // Tags and notes: shown on every page, edited on the page that `shardwise watch` serves on this machine.
  const box = document.getElementById("notes"), { tags, notes } = run.notes;
  if (box.contains(document.activeElement) || box.dataset.shown === JSON.stringify(run.notes)) return;
  box.dataset.shown = JSON.stringify(run.notes);
  const shown = [tags.length ? el("p", { class: "tags" }, tags.map((tag) => badge(tag, "tag"))) : null, notes ? el("p", { class: "note" }, notes) : null];
  if (!document.documentElement.dataset.live || !["127.0.0.1", "localhost", "[::1]"].includes(location.hostname)) return box.replaceChildren(...shown.filter(Boolean));
  const tagBox = el("input", { id: "tags", value: tags.join(", "), autocomplete: "off" }), noteBox = el("textarea", { id: "note", rows: "3" }, notes), told = el("span", { role: "status" });
  const save = async (event) => {
    event.preventDefault();
    const given = { tags: tagBox.value.split(",").map((tag) => tag.trim()).filter(Boolean), notes: noteBox.value };
    const base = location.pathname.startsWith("/run/") ? location.pathname.replace(/\/$/, "") : `/run/${encodeURIComponent(run.name)}`;
    const answer = await fetch(`${base}/notes`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(given) }).catch(() => null);
    told.textContent = answer && answer.ok ? "Saved." : answer ? await answer.text() : "The server cannot be reached.";
  };
  box.replaceChildren(...shown.filter(Boolean), el("details", {}, el("summary", {}, "Edit tags and notes"), el("form", { submit: save },
    el("label", {}, "Tags, separated by commas", tagBox), el("label", {}, "Notes", noteBox), el("button", {}, "Save"), " ", told)));
}
