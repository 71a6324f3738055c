// Plotly.react draws and redraws. A click on a method in any legend hides or shows it in all figures; a double click shows
// it alone, and then all again.
"use strict";
(() => {
  const { figures, config, light, dark, darkColours, narrow } = JSON.parse(document.getElementById("figure-data").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();
  let printing = false;

  const isNarrow = (plot) => !printing && plot.clientWidth < narrow;

  function draw(plot) {
    const isDark = scheme.matches && !printing;
    const recolour = (key, value) => (isDark && /color$/.test(key) && darkColours[value]) || value;
    const figure = JSON.parse(JSON.stringify(figures[plot.dataset.figure]), recolour);
    for (const trace of figure.data) if (hidden.has(trace.legendgroup)) trace.visible = "legendonly";
    const layout = { ...figure.layout, ...(isNarrow(plot) ? figure.narrow : {}) };
    layout.template = isDark ? dark : light;
    if (printing) Object.assign(layout, { width: 660, autosize: false });
    plot.dataset.narrow = isNarrow(plot);
    const image = { format: "svg", filename: "equipoise-" + plot.dataset.figure };
    return Plotly.react(plot, figure.data, layout, { ...config, toImageButtonOptions: image });
  }

  const drawAll = () => Promise.all(plots.map(draw));

  function listen(plot) {
    const groups = [...new Set(figures[plot.dataset.figure].data.map((trace) => trace.legendgroup).filter(Boolean))];
    plot.on("plotly_legendclick", (event) => {
      const group = event.data[event.curveNumber].legendgroup;
      if (!group) return false;
      if (!hidden.delete(group)) hidden.add(group);
      drawAll();
      return false;
    });
    plot.on("plotly_legenddoubleclick", (event) => {
      const group = event.data[event.curveNumber].legendgroup;
      if (!group) return false;
      const alone = groups.every((other) => other === group ? !hidden.has(other) : hidden.has(other));
      hidden.clear();
      if (!alone) groups.filter((other) => other !== group).forEach((other) => hidden.add(other));
      drawAll();
      return false;
    });
  }

  drawAll().then(() => {
    plots.forEach(listen);
    document.documentElement.dataset.figures = "drawn";
  });
  scheme.addEventListener("change", drawAll);
  addEventListener("resize", () => plots.filter((plot) => String(isNarrow(plot)) !== plot.dataset.narrow).forEach(draw));
  addEventListener("beforeprint", () => { printing = true; drawAll(); });
  addEventListener("afterprint", () => { printing = false; drawAll(); });
})();
