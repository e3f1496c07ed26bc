// Shows the values under the pointer and handles the buttons. Where the page is served live, it asks for new charts and tables.
"use strict";
const page = JSON.parse(document.getElementById("page").textContent);
const tip = document.body.appendChild(Object.assign(document.createElement("div"), { id: "tip" }));

function show(event) {
  const bar = event.target.closest("[data-tip]");
  const plot = event.target.closest("[data-curves]");
  tip.textContent = bar ? [bar.parentNode.dataset.about, bar.dataset.tip].filter(Boolean).join("\n") : plot ? values(plot, event) : "";
  const left = Math.min(event.pageX + 14, scrollX + document.documentElement.clientWidth - tip.offsetWidth - 4);
  tip.style.left = Math.max(0, left) + "px";
  tip.style.top = event.pageY + 14 + "px";
}

function values(plot, event) {
  plot.curves ??= JSON.parse(plot.dataset.curves);
  const box = plot.getBoundingClientRect();
  const all = plot.curves.flatMap((curve) => curve.x);
  const [low, high] = [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))];
  const at = low + ((event.clientX - box.left) / box.width) * (high - low);
  const nearest = all.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
  const found = plot.curves.filter((curve) => curve.x.includes(nearest));
  const text = (curve) => curve.y[curve.x.indexOf(nearest)]?.toPrecision(5) ?? "not finite";
  return [nearest, ...found.map((curve) => curve.name + ": " + text(curve))].join("\n");
}

function press(event) {
  const chart = event.target.closest(".chart");
  const { zoom, scale } = event.target.dataset;
  if (scale) chart.dataset.scale = scale;
  if (zoom) chart.style.setProperty("--zoom", Math.min(64, Math.max(1, zoom * (chart.style.getPropertyValue("--zoom") || 1))));
  show(event);
}

function replace(place, html) {
  const scrolled = [...place.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  place.innerHTML = html;
  place.querySelectorAll(".scroll").forEach((each, at) => (each.scrollLeft = scrolled[at] ?? 0));
}

async function update() {
  const state = document.getElementById("state");
  try {
    const answer = await fetch("live.json", { cache: "no-store" });
    const live = await answer.json();
    if (!answer.ok) throw new Error(live.error);
    if (live.version !== page.version) return location.reload();
    for (const [name, html] of Object.entries(live.charts)) replace(document.getElementById("chart-" + name), html);
    for (const [name, html] of Object.entries(live.tables)) replace(document.getElementById("table-" + name), html);
    state.textContent = live.state + ", " + new Date().toLocaleTimeString();
  } catch (error) {
    state.textContent = "no new data since then: " + error.message;
  }
  setTimeout(update, 1000 * page.seconds);
}

document.addEventListener("pointermove", show);
document.addEventListener("click", press);
if (page.seconds) setTimeout(update, 1000 * page.seconds);
