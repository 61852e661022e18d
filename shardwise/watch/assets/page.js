// Starts the page: which one it is, keys, colours, size, and the updates of a live one.
let latest = JSON.parse(document.getElementById("state").textContent);
const isList = Array.isArray(latest.list), isComparison = Array.isArray(latest.runs);
const show = isList ? showList : isComparison ? showComparison : showRun;
const redraw = () => {
  for (const id of Object.keys(drawnState)) delete drawnState[id];
  for (const { plot } of plots.values()) plot.destroy();
  plots.clear();
  show(latest);
};

readView();
const axes = isList ? [] : AXES((isComparison ? latest.runs[0].unit : latest.unit) || "tokens");
if (!isList) chooseTimeUnit(isComparison ? latest.runs : [latest.series]);
const controls = isList ? null : toolbar(isComparison ? [...axes.slice(1), axes[0]] : axes, () => show(latest));  // runs may differ in their batch
show(latest);

addEventListener("hashchange", () => { readView(); if (controls) toolbar(controls.axes, () => show(latest)); show(latest); for (const { plot } of plots.values()) showZoom(plot); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let resizeTimer = 0, lastWidth = innerWidth;
addEventListener("resize", () => {
  clearTimeout(resizeTimer);
  resizeTimer = setTimeout(() => { if (innerWidth !== lastWidth) redraw(); lastWidth = innerWidth; }, 150);  // a phone's address bar changes the height only
});
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const act = {
    "?": showHelp, "/": () => document.getElementById("filter") && document.getElementById("filter").focus(),
    b: () => { const back = document.getElementById("back"); if (!back.hidden) back.click(); },
    ...(controls ? {
      x: () => { const n = controls.axes.findIndex(([axis]) => axis === view.x); controls.change("x", controls.axes[(n + 1) % controls.axes.length][0]); },
      l: () => controls.change("log", view.log ? "" : "1"), "+": () => zoomBy(0.7), "=": () => zoomBy(0.7), "-": () => zoomBy(1 / 0.7), 0: () => setZoom(null),
      "[": () => controls.change("smooth", SMOOTHING[Math.max(0, SMOOTHING.indexOf(view.smooth) - 1)]),
      "]": () => controls.change("smooth", SMOOTHING[Math.min(SMOOTHING.length - 1, SMOOTHING.indexOf(view.smooth) + 1)]),
      ...(zoom() && !event.target.closest(".scroll, pre, .bars") ? { ArrowLeft: () => panBy(-0.2), ArrowRight: () => panBy(0.2) } : {}),
    } : {}),
  }[event.key];
  if (act) { event.preventDefault(); act(); }
});

const live = document.documentElement.dataset.live;
if (live) {
  const indicator = document.getElementById("live");
  const pause = () => isList && latest.list.some((run) => run.status === "not read yet") ? 300 : document.hidden ? 10000 : isList ? 5000 : 2000;
  const tell = (text, kind) => { if (indicator.textContent !== text) indicator.replaceChildren(badge(text, kind)); };
  const poll = async () => {
    try {
      const answer = await fetch(`${live}${live.includes("?") ? "&" : "?"}version=${latest.version || ""}`);
      if (answer.status === 200) { latest = await answer.json(); show(latest); }
      tell("live", "live");
    } catch (error) { tell("server unreachable; showing the last data received", "failed"); }
    setTimeout(poll, pause());
  };
  setTimeout(poll, pause());
}
