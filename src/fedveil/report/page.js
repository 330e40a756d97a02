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
      Plotly.relayout(plot, { "xaxis.type": log ? "log" : "linear", "xaxis.autorange": true });
    });
  }
}
