"use strict";
async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const program = document.createElement("script");
  program.textContent = await new Response(stream).text();
  document.head.append(program);
}
function draw() {
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
}
unpack(document.getElementById("plotly").textContent).then(draw);
