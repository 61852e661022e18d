// The page of a run, and of runs compared.
const AXES = (unit) => [["step", "step"], [unit === "samples" ? "samples" : "tokens", unit], ["time", "time"]];
const segmentKey = (run) => [run.segmentIndex, curveView()];

const PANELS = [
  ["loss", "Loss", drawLoss, true, (run) => [run.series, run.events, run.allSegments.length, curveView()]],
  ["time", "Step time breakdown", drawTimeBreakdown, true, (run) => [run.time_breakdown, segmentKey(run)]],
  ["heat", "Busy time per rank", drawHeatmap, true, (run) => [run.heatmap, run.ranks]],
  ["pipeline", "Pipeline timeline: predicted and measured", drawTimeline, true, (run) => [run.pipeline, run.mesh && run.mesh.axes]],
  ["memory", "Memory per rank", drawMemory, false, (run) => run.memory],
  ["mesh", "Device mesh", drawMesh, false, (run) => [run.mesh, run.ranks]],
  ["plan", "Plan: predicted and measured", drawPlan, false, (run) => [run.plan, planRows(run)]],
  ["goodput", "Goodput", drawGoodput, false, (run) => run.goodput],
  ["curves", "Other metrics", drawCurves, true, (run) => [run.series, curveView()]],
  ["events", "Events", drawEvents, true, (run) => run.events],
  ["job", "Job", (parent, run) => parent.append(el("pre", { tabindex: "0" }, run.job)), true, (run) => run.job],
];

function tilesOf(run) {
  const f = run.figures, last = run.series.loss[run.series.step.findLastIndex((step) => step <= f.done)], speed = f.units / f.step_seconds;
  if (!f.done) return [["steps", "none yet"]];
  const shown = isNumber(last) ? last.toFixed(4) : run.series.non_finite_losses.length ? run.series.non_finite_losses.slice(-1)[0][1] : "unknown";
  return [
    ["step", `${f.done.toLocaleString("en")} of ${run.steps.toLocaleString("en")}`], ["loss", shown], ["mean step time", formatSeconds(f.step_seconds)],
    isNumber(speed) ? [`${run.unit}/s`, Math.round(speed).toLocaleString("en")] : null, isNumber(f.busy) ? ["device busy", formatPercent(f.busy)] : null,
    isNumber(f.mfu) ? ["MFU", formatPercent(f.mfu)] : null, ["goodput", formatPercent(run.goodput.productive_seconds / (run.goodput.wall_seconds || 1))],
    isNumber(f.peak_gib) ? ["peak memory", `${+f.peak_gib.toPrecision(3)} GiB`] : null,
    run.status === "running" && f.done < run.steps && isNumber(f.step_seconds) ? ["time left", formatDuration((run.steps - f.done) * f.step_seconds)] : null,
  ].filter(Boolean);
}

function showHeader(title, parts) {
  document.getElementById("name").textContent = title;
  document.getElementById("status").replaceChildren(...parts);
  const back = document.getElementById("back");
  back.hidden = !/^\/(run|compare)\b/.test(location.pathname) || !document.documentElement.dataset.live;
  if (!back.hidden) back.setAttribute("href", "/");
}

function showSegments(run) {
  // After a resume in another layout: which of them the figures of ranks, waits and plan are of.
  const box = document.getElementById("segments"), all = run.allSegments;
  box.hidden = all.length < 2;
  if (box.hidden) return;
  const name = (segment, n) => `${segment.layout} (steps ${segment.before + 1} to ${n + 1 < all.length ? all[n + 1].before : run.allDone})`;
  const choice = el("select", { id: "segment", change: (event) => { view.segment = +event.target.value === all.length - 1 ? "" : event.target.value; saveView(); showRun(latest); } },
    all.map((segment, n) => el("option", { value: String(n), selected: n === run.segmentIndex }, name(segment, n))));
  if (box.contains(document.activeElement)) return;
  box.replaceChildren(el("label", {}, "The layout of this run has changed. Time, ranks, memory, waits and plan of ", choice));
}

function showRun(given) {
  const all = [...given.segments, given], index = view.segment !== "" && all[+view.segment] ? +view.segment : all.length - 1;
  const run = { ...given, ...(index < all.length - 1 ? all[index] : {}), allSegments: all, segmentIndex: index, allDone: given.figures.done };
  document.title = `${run.name}: ${run.status}`;
  showHeader(run.name, [badge(run.status), el("code", {}, run.layout), el("span", {}, `${run.world} ${run.world === 1 ? "rank" : "ranks"}`)]);
  document.getElementById("summary").replaceChildren(...run.summary.map((sentence) => el("li", {}, sentence)));
  document.getElementById("tiles").replaceChildren(...tilesOf(run).map(([name, value]) => el("li", {}, el("b", {}, value), el("span", {}, name))));
  showNotes(run);
  showSegments(run);
  showPanels(PANELS, run);
}

// Comparison of runs

function comparedCurve(name, unit) {
  return (parent, all) => {
    const runs = all.runs.filter((run) => run[name] && run[name].length), axes = runs.map(axisOf);
    const xs = [...new Set(axes.flat())].sort((a, b) => a - b);
    const along = (values, n) => { const at = new Map(axes[n].map((x, index) => [x, values[index]])); return xs.map((x) => at.get(x) ?? null); };
    const data = runs.map((run, n) => along(smoothed(run[name]), n));
    const label = axisLabel(unit), heading = metricLabel(name, unit);
    const [node, box] = figure(`${name}-plot`, "", `${heading} of ${runs.length} runs over ${label}`, table([label, ...runs.map((run) => run.name)], sampleIndices(xs.length, 40).map((n) => [xs[n], ...data.map((row) => row[n])])));
    parent.append(node);
    if (xs.length) linePlot(name, box, [xs, ...data], runs.map((run) => ({ label: run.name, stroke: RUN_COLOURS[all.runs.indexOf(run) % RUN_COLOURS.length] })), { height: name === "loss" ? 320 : 220, x: label });
  };
}

function showComparison(all) {
  document.title = "Runs compared";
  const unit = all.runs[0].unit || "tokens", names = [...new Set(all.runs.flatMap(metricNames))];
  showHeader(all.runs.length > 4 ? `${all.runs.length} runs compared` : all.runs.map((run) => run.name).join(", "), []);
  const curve = (name, title) => [name, title, comparedCurve(name, unit), name === "loss" || name === "tokens_per_s", (given) => [given.runs.map((run) => [run.name, run[name]]), curveView()]];
  showPanels([
    curve("loss", "Loss"),
    ["table", "Overview", (parent, given) => parent.append(scrolled("overview", table(given.headers, given.rows.map((row) => row.map((cell) => cell ?? "unknown")), { cards: true }))), true, (given) => given.rows],
    ["jobs", "Job differences", (parent, given) => parent.append(given.differences.length ? scrolled("job differences", table(["key", ...given.runs.map((run) => run.name)], given.differences, { cards: true })) : dim("None.")), true, (given) => given.differences],
    ...names.map((name) => curve(name, name === "tokens_per_s" ? "Throughput" : metricLabel(name, unit).replace(/^./, (first) => first.toUpperCase()))),
  ], all);
}
