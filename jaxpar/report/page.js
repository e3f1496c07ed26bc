// Draws the charts of a report. Where the page is served live, it asks for new data and keeps the reader's zoom.
"use strict";
const page = JSON.parse(document.getElementById("page").textContent);
const options = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

function draw(charts) {
  for (const [name, chart] of Object.entries(charts)) {
    const place = document.getElementById("chart-" + name);
    if (place && window.Plotly) {
      place.hidden = false;
      window.Plotly.react(place, chart.data, chart.layout, options);
    }
  }
}

async function update() {
  const state = document.getElementById("state");
  try {
    const answer = await fetch("live.json", { cache: "no-store" });
    const live = await answer.json();
    if (!answer.ok) throw new Error(live.error);
    if (live.version !== page.version) return location.reload();
    draw(live.charts);
    for (const [name, html] of Object.entries(live.tables)) document.getElementById("table-" + name).innerHTML = html;
    state.textContent = "live, " + new Date().toLocaleTimeString();
  } catch (error) {
    state.textContent = "no new data since then: " + error.message;
  }
  setTimeout(update, 1000 * page.seconds);
}

draw(page.charts);
if (page.seconds) setTimeout(update, 1000 * page.seconds);
