"use strict";
for (const figure of document.querySelectorAll("figure")) {
  const plot = figure.querySelector(".plot");
  const { data, layout } = JSON.parse(figure.querySelector("script").textContent);
  Plotly.newPlot(plot, data, layout, {
    responsive: true,
    displaylogo: false,
    modeBarButtons: [["toImage", "resetScale2d"]],
  });
  const button = figure.querySelector("button.log-x");
  if (button) {
    button.addEventListener("click", () => {
      const log = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(log));
      const axis = { "xaxis.type": log ? "log" : "linear", "xaxis.dtick": log ? "D2" : null };
      Plotly.relayout(plot, { ...axis, "xaxis.autorange": true });
    });
  }
}
