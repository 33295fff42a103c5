(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)").matches;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const config = { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false };
  const logs = new Set();

  function shape(mark) {
    const save = mark.kind === "save";
    return {
      type: "line", x0: mark.step, x1: mark.step, yref: "paper", y0: 0, y1: save ? 0.035 : 1,
      line: {
        color: colour(data.colours[mark.kind]), width: save ? 2 : 1.5, dash: mark.kind === "resume" ? "dash" : "solid",
      },
    };
  }

  function trace(source) {
    return {
      type: "scatter", x: source.x, y: source.y, name: source.name, mode: source.mode,
      line: { color: colour(source.colour), width: source.faint ? 1 : 2 }, marker: { size: 6 },
      opacity: source.faint ? 0.35 : 1, hovertemplate: "%{y:.5~g}",
    };
  }

  function layout(figure) {
    const axis = { gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, automargin: true };
    return {
      margin: { l: 8, r: 12, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("soft"), family: "inherit", size: 12 }, hovermode: "x unified",
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
      dragmode: touch ? false : "zoom", shapes: data.marks.map(shape),
      showlegend: figure.traces.length > 1,
      legend: { orientation: "h", x: 1, xanchor: "right", y: 1, yanchor: "bottom" },
      xaxis: { ...axis, title: { text: "step", standoff: 6 }, range: data.range, rangemode: "nonnegative" },
      yaxis: { ...axis, type: logs.has(figure.name) ? "log" : "linear", tickformat: figure.percent ? ".1%" : "" },
    };
  }

  function draw() {
    for (const figure of data.figures) {
      Plotly.react("plot-" + figure.name, figure.traces.map(trace), layout(figure), config);
    }
  }

  for (const button of document.querySelectorAll("button[data-log]")) {
    button.addEventListener("click", () => {
      const name = button.dataset.log;
      if (!logs.delete(name)) logs.add(name);
      button.setAttribute("aria-pressed", String(logs.has(name)));
      draw();
    });
  }
  dark.addEventListener("change", draw);
  draw();
})();
