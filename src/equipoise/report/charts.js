// Small charts as SVG, drawn at the width that they have, so that text stays readable on a telephone.
"use strict";
const EquipoiseCharts = (() => {
  const node = (name, attributes, text) => {
    const made = document.createElementNS("http:" + "//www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const nbsp = "\u00a0";
  const short = (value) => Math.abs(value) >= 1e4 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
  const write = (value, percent) => value === null || value === undefined || !Number.isFinite(value) ? "–"
    : percent ? (100 * value).toFixed(1) + nbsp + "%" : short(value);
  const tick = (value, percent) => percent ? +(100 * value).toPrecision(3) + nbsp + "%" : short(value);

  function steps(low, high, most) {
    const rough = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough || 1));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough - 1e-12) || power;
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(+at.toPrecision(12));
    return found;
  }

  // The frame of a chart: axes with numbers and names; gives the functions that place a value.
  function frame(svg, { x, y, xName, yName, xPercent, yPercent, height = 240, whole = false }) {
    const width = Math.max(240, svg.clientWidth || 480), left = 58, right = 24, top = 14, bottom = 44;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.replaceChildren();
    const spread = (range) => range[1] > range[0] ? range : [range[0] - 0.5, range[0] + 0.5];
    const [x0, x1] = spread(x), [y0, y1] = spread(y);
    const atX = (value) => left + (value - x0) / (x1 - x0) * (width - left - right);
    const atY = (value) => height - bottom - (value - y0) / (y1 - y0) * (height - top - bottom);
    for (const value of steps(y0, y1, 4)) {
      svg.append(node("line", { class: "grid", x1: left, x2: width - right, y1: atY(value), y2: atY(value) }));
      svg.append(node("text", { class: "tick", x: left - 6, y: atY(value) + 4, "text-anchor": "end" }, tick(value, yPercent)));
    }
    for (const value of steps(x0, x1, Math.max(2, Math.floor(width / 90)))) {
      if (whole && value !== Math.round(value)) continue;
      svg.append(node("text", { class: "tick", x: atX(value), y: height - bottom + 18, "text-anchor": "middle" }, tick(value, xPercent)));
    }
    svg.append(node("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    svg.append(node("text", { class: "name", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xName));
    svg.append(node("text", { class: "name", x: 13, y: (top + height - bottom) / 2, "text-anchor": "middle",
      transform: `rotate(-90 13 ${(top + height - bottom) / 2})` }, yName));
    return { atX, atY, left, right, top, bottom, width, height };
  }

  function histogram(svg, { edges, counts, outline, marks, percent, noun, height }) {
    const total = counts.reduce((sum, each) => sum + each, 0) || 1;
    const base = (outline || []).reduce((sum, each) => sum + each, 0) || 1;
    const most = Math.max(...counts.map((each) => each / total), ...(outline || [0]).map((each) => each / base)) * 1.08;
    const at = frame(svg, { x: [edges[0], edges[edges.length - 1]], y: [0, most || 1], xName: `${noun} of a client`,
      yName: "share of clients", xPercent: percent, yPercent: true, height });
    counts.forEach((count, k) => {
      const x = at.atX(edges[k]), wide = at.atX(edges[k + 1]) - x, y = at.atY(count / total);
      svg.append(node("rect", { class: "bar", x: x + 0.5, y, width: Math.max(0, wide - 1), height: Math.max(0, at.atY(0) - y) }));
    });
    if (outline) {
      let path = `M${at.atX(edges[0])} ${at.atY(0)}`;
      outline.forEach((count, k) => { path += `L${at.atX(edges[k])} ${at.atY(count / base)}L${at.atX(edges[k + 1])} ${at.atY(count / base)}`; });
      svg.append(node("path", { class: "outline", d: `${path}L${at.atX(edges[edges.length - 1])} ${at.atY(0)}` }));
    }
    for (const [value, kind] of marks || []) {
      if (value === null || value < edges[0] || value > edges[edges.length - 1]) continue;
      svg.append(node("line", { class: `mark ${kind}`, x1: at.atX(value), x2: at.atX(value), y1: at.top, y2: at.atY(0) }));
    }
  }

  function tradeoff(svg, { points, chosen, percent, noun, height, onPick }) {
    const known = points.filter((point) => point.x !== null && point.y !== null);
    if (!known.length) return svg.replaceChildren();
    const span = (values) => {
      const low = Math.min(...values), high = Math.max(...values), pad = (high - low || Math.abs(high) || 1) * 0.22;
      return [low - pad, high + pad];
    };
    const at = frame(svg, { x: span(known.map((p) => p.x)), y: span(known.map((p) => p.y)), xName: `mean ${noun}`,
      yName: "90th percentile", xPercent: percent, yPercent: percent, height });
    svg.append(node("path", { class: "line", d: known.map((p, k) => `${k ? "L" : "M"}${at.atX(p.x)} ${at.atY(p.y)}`).join("") }));
    const taken = [];
    points.forEach((point, k) => {
      if (point.x === null || point.y === null) return;
      const x = at.atX(point.x), y = at.atY(point.y), here = k === chosen;
      const dot = node("circle", { class: here ? "dot here" : "dot", cx: x, cy: y, r: here ? 8 : 5 });
      if (onPick) dot.addEventListener("click", () => onPick(k));
      svg.append(dot);
      let place = y - 13;  // names of points that lie close to each other go below and above
      if (taken.some(([a, b]) => Math.abs(a - x) < 44 && Math.abs(b - place) < 14)) place = y + 23;
      taken.push([x, place]);
      const end = x > at.width - 60;
      svg.append(node("text", { class: here ? "label here" : "label", x: end ? x + 4 : x, y: place, "text-anchor": end ? "end" : "middle" }, point.label));
    });
  }

  // Curves by name; each point is [x, y], and a y that does not exist breaks the line.
  function curves(svg, { series, xName, yName, percent, height, from }) {
    const all = series.flatMap((each) => each.points.filter((p) => p[1] !== null && p[1] !== undefined));
    if (!all.length) return svg.replaceChildren();
    const ys = all.map((p) => p[1]), low = from === undefined ? Math.min(...ys) : Math.min(from, ...ys), high = Math.max(...ys);
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    const at = frame(svg, { x: [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))],
      y: [from === undefined ? low - pad : low, high + pad], xName, yName, yPercent: percent, height, whole: true });
    for (const each of series) {
      let path = "", pen = false;
      for (const [x, y] of each.points) {
        if (y === null || y === undefined) { pen = false; continue; }
        path += `${pen ? "L" : "M"}${at.atX(x).toFixed(1)} ${at.atY(y).toFixed(1)}`;
        pen = true;
      }
      svg.append(node("path", { class: `curve method-${each.colour % 7}${each.dashed ? " dashed" : ""}${each.faint ? " faint" : ""}`, d: path }));
      const last = each.points.filter((p) => p[1] !== null && p[1] !== undefined).at(-1);
      if (last && !each.faint) svg.append(node("circle", { class: `end method-${each.colour % 7}`, cx: at.atX(last[0]), cy: at.atY(last[1]), r: 3.5 }));
    }
  }

  // Draw now, and again when the width changes.
  function keep(svg, draw) {
    let width = -1;
    const again = () => { if (svg.clientWidth && svg.clientWidth !== width) { width = svg.clientWidth; draw(); } };
    new ResizeObserver(again).observe(svg);
    draw();
  }

  return { node, write, histogram, tradeoff, curves, keep };
})();
