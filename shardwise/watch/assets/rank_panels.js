// Panels that show ranks: canvas and SVG.
const ACTION_KINDS = { F: ["forward", "#9ecae9"], B: ["backward", "#ffbf79"], I: ["backward (input)", "#ffbf79"], W: ["backward (weight)", "#a5d69a"] };

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
  if (!h.ranks.length) return parent.append(dim("No rank has reported yet."));
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
  const stages = run.mesh ? Object.fromEntries(run.mesh.axes).pipeline : 1;
  if (!p) return parent.append(dim(stages > 1 ? "The plan of this layout is not in the run folder, so its schedule is not known." : "This layout has no pipeline parallelism: every rank runs all layers."));
  const timelines = [["predicted", p.predicted], ["measured", p.measured]].filter((row) => row[1]);
  const rows = [["predicted by the plan", p.predicted], ["measured", p.measured]].filter((row) => row[1]);
  parent.append(table(["pipeline bubble", "share of pipeline time"], rows.map(([name, timeline]) => [name, formatPercent(timeline.bubble)])));
  if (!p.measured) parent.append(dim("No measured timeline has been recorded."));
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
  const m = run.memory, kinds = ["weights", "gradients", "optimizer"], parts = [...kinds, "activations and other"], peak = m.gib.peak || [];
  const rows = sampleIndices(peak.length, 128).map((rank) => {
    const row = { rank, predicted: m.predicted[Math.floor(rank / m.ranks_per_stage)] };
    for (const kind of kinds) row[kind] = m.gib[kind] ? m.gib[kind][rank] : 0;
    return { ...row, "activations and other": Math.max(0, peak[rank] - kinds.reduce((sum, kind) => sum + row[kind], 0)) };
  });
  if (!rows.length) return parent.append(dim("No rank has reported yet."));
  const sum = (row) => parts.reduce((all, part) => all + (row[part] || 0), 0);
  const most = Math.max(...rows.map((row) => Math.max(sum(row), row.predicted || 0)));
  const bars = el("div", { class: "bars", tabindex: "0", role: "group", "aria-label": "memory per rank" });
  for (const row of rows) {
    const description = `rank ${row.rank}: ${formatNumber(sum(row))} GiB` + (row.predicted ? `, predicted ${formatNumber(row.predicted)}` : "");
    bars.append(el("span", {}, row.rank), el("span", { class: "bar", role: "img", "aria-label": description, title: description },
      parts.map((part) => row[part] ? el("i", { style: `width:${100 * row[part] / most}%;background:${colour(part)}` }) : null),
      row.predicted ? el("u", { style: `left:calc(${100 * row.predicted / most}% - 1px)` }) : null), el("span", {}, `${formatNumber(sum(row))} GiB`));
  }
  parent.append(bars, legend([...parts.map((part) => [part, colour(part)]), ["predicted", css("--mark")]]));
  if (m.limit) parent.append(el("p", { class: "small dim" }, `Device memory assumed by the plan: ${formatNumber(m.limit)} GiB per rank. Bars show peak memory; "activations and other" includes buffers and, on a CPU, the process itself.`));
  const sensors = Object.entries({ gpu_temperature: "GPU \u00b0C", gpu_power: "GPU W", gpu_utilization: "GPU % busy" }).filter(([name]) => m.gib[name]);
  if (sensors.length) parent.append(table(["rank", ...sensors.map((pair) => pair[1])], rows.map((row) => [row.rank, ...sensors.map(([name]) => Math.round(m.gib[name][row.rank]))])));
  parent.append(collapsible("memory-table", "As a table", table(["rank", ...parts, "predicted"], rows.map((row) => [row.rank, ...parts.map((part) => row[part] || 0), row.predicted]))));
}

function drawMesh(parent, run) {
  const m = run.mesh;
  if (!m) return parent.append(dim("The layout of this run is unknown: plan.toml is missing or unreadable."));
  const size = Object.fromEntries(m.axes), inner = size.context * size.tensor, data = size.replicate * size.shard;
  const rows = Math.min(data, 16), columns = Math.min(size.pipeline, 16), side = Math.min(inner, 16), box = 26;
  const wide = side * box + 12, high = box + 12, gap = 26, left = 8, top = 20;
  const width = left + columns * (wide + gap), height = top + rows * (high + 8) + 4;
  const description = `${run.world} ranks: ` + (m.axes.filter((axis) => axis[1] > 1).map(([name, n]) => `${name}=${n}`).join(", ") || "one device") + ".";
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": description });
  const computed = run.ranks.values[run.ranks.names.indexOf("compute")] || [], compute = computed.filter(isNumber).sort((a, b) => a - b), median = compute[Math.floor((compute.length - 1) / 2)];
  for (let stage = 0; stage < columns; stage++) {
    const x = left + stage * (wide + gap);
    if (size.pipeline > 1) drawing.append(svg("text", { x, y: 12 }, `stage ${stage}`));
    for (let row = 0; row < rows; row++) {
      const y = top + row * (high + 8);
      drawing.append(svg("rect", { x, y, width: wide, height: high, rx: 5, fill: "none", stroke: css("--dim") }));
      if (stage + 1 < columns) drawing.append(svg("path", { d: `M${x + wide + 2} ${y + high / 2}h${gap - 6}m-5 -4l5 4l-5 4`, fill: "none", stroke: css("--dim") }));
      if (row) drawing.append(svg("path", { d: `M${x + wide / 2} ${y - 8}v8`, stroke: css("--dim"), "stroke-dasharray": "2 2" }));
      for (let n = 0; n < side; n++) {
        const rank = (stage * data + row) * inner + n, value = computed[rank];
        const shade = value === undefined || value === null || !median ? 0.3 : Math.max(0, 0.3 + value / median - 1);
        drawing.append(svg("rect", { x: x + 7 + n * box, y: y + 7, width: box - 2, height: box - 2, rx: 3, fill: colormap(shade) }));
        drawing.append(svg("text", { x: x + 6 + n * box + box / 2, y: y + 23, "text-anchor": "middle", style: `fill:${shade > 0.6 ? "#111" : "#fff"}` }, rank));
      }
    }
  }
  parent.append(el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "device mesh" }, drawing));
  const communication = { pipeline: "stages, left to right; send/recv of activations and their gradients", replicate: "replicas, top to bottom; all-reduce of gradients", shard: "FSDP/ZeRO shards, top to bottom; reduce-scatter of gradients, all-gather of weights", context: "within a box; exchange of keys and values", tensor: "within a box; all-gather and reduce-scatter of activations", expert: "all-to-all of tokens to and from experts", data: "token counts and compressed gradients", local_sgd: "averaging of replica weights", world: "gradient norm and stop flag" };
  const listed = [...m.axes.filter((axis) => axis[1] > 1), ...["expert", "data", "local_sgd", "world"].filter((name) => m.waits[name]).map((name) => [name, ""])];
  parent.append(table(["axis", "size", "wait, % of step", "communication"], listed.map(([name, n]) => [name, n, formatPercent(m.waits[name] || 0), communication[name]]), { text: 3, cards: true }));
  parent.append(el("p", { class: "small dim" }, "Each square is a rank; a lighter one computes longer."));
}

