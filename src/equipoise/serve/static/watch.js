// Curves of a run that grow while it runs, from server-sent events.
"use strict";
(() => {
  const holder = document.getElementById("run-data");
  if (!holder) return;
  const { curves, histogram, keep, write } = EquipoiseCharts;
  const given = JSON.parse(holder.textContent), find = (id) => document.getElementById(id);
  const series = new Map();
  let evaluations = [], state = given.update.state, drawn = false, cohort = 0, follow = true;

  const label = (name) => name || given.name;
  const minutes = (seconds) => seconds < 90 ? `${Math.round(seconds)} s`
    : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h ${Math.round(seconds % 3600 / 60)} min`;

  function take(update) {
    if (update.reset) { series.clear(); evaluations = []; }
    for (const [name, rows] of Object.entries(update.curves)) {
      let points = series.get(name) || [];
      const first = rows[0][0];
      if (points.length && points.at(-1)[0] >= first) points = points.filter((row) => row[0] < first);
      points = points.concat(rows);
      if (points.length > 4000) points = points.filter((row, k) => k % 2 === 0 || k === points.length - 1);
      series.set(name, points);
    }
    evaluations = evaluations.concat(update.evaluations);
    if (evaluations.length > 4000) evaluations = evaluations.filter((each, k) => k % 2 === 0);
    cohort = update.cohort || cohort;
    state = update.state;
  }

  function legend(name, entries) {
    find(`legend-${name}`).replaceChildren(...entries.map(([text, colour, dashed]) => {
      const item = document.createElement("li"), line = document.createElement("i");
      line.className = `${colour === "none" ? "plain" : `method-${colour % 7}`}${dashed ? " dashed" : ""}`;
      item.append(line, text);
      return item;
    }));
  }

  const column = (place) => [...series].map(([name, rows], k) => ({ name, colour: k, points: rows.map((row) => [row[0], row[place]]) }));

  function figure(name, lines, options, entries) {
    const box = find(`figure-${name}`);
    if (!box) return;
    const any = lines.some((line) => line.points.some((point) => point[1] !== null && point[1] !== undefined));
    box.hidden = !any;
    if (!any) return;
    legend(name, entries);
    curves(find(`live-${name}`), { series: lines, xName: "round", ...options });
  }

  function drawSpread() {
    const box = find("figure-spread");
    if (!box) return;
    const known = evaluations.filter((each) => each.histogram);
    box.hidden = !known.length;
    if (!known.length) return;
    const scrub = find("scrub");
    scrub.max = known.length - 1;
    if (follow) scrub.value = known.length - 1;
    const one = known[Math.min(known.length - 1, Number(scrub.value))], { low, high, counts } = one.histogram;
    const edges = counts.map((count, k) => low + (high - low) * k / counts.length).concat([high]);
    const words = `after round ${one.round}${series.size > 1 ? `, ${label(one.run)}` : ""}`;
    find("scrub-words").textContent = words;
    scrub.setAttribute("aria-valuetext", words);
    histogram(find("live-spread"), { edges, counts, percent: low === 0 && high === 1, noun: "error" });
  }

  function draw() {
    if (!find("live-figures")) return;
    find("live-figures").hidden = !series.size;
    const several = series.size > 1, faint = series.size > 2;  // many members: their tails step back
    const loss = column(1), tail = column(2).map((line) => ({ ...line, dashed: true, faint }));
    const owners = several ? loss.map((line) => [label(line.name), line.colour]) : [];
    const styles = (second) => [...owners, ["mean", several ? "none" : 0], [second, several ? "none" : 0, true]];
    figure("loss", [...loss, ...tail], { yName: "loss" }, styles("worst tenth"));
    figure("trained", column(3), { yName: "clients", from: 0 },
      loss.map((line) => [`${label(line.name)}${cohort && !several ? `, of ${cohort} drawn` : ""}`, line.colour]));
    figure("epsilon", column(4), { yName: "ε", from: 0 }, loss.map((line) => [label(line.name), line.colour]));
    const split = ["test", "validation", "train"].find((name) => evaluations.some((each) => each.splits[name]));
    const names = [...series.keys()];
    const of = (key) => names.map((name, k) => ({ name, colour: k, dashed: key === "error_90", faint: faint && key === "error_90",
      points: evaluations.filter((each) => (each.run || names[0]) === name && each.splits[split]).map((each) => [each.round, each.splits[split][key]]) }));
    if (split) {
      const mean = of("error"), ninety = of("error_90");
      const all = [...mean, ...ninety].flatMap((line) => line.points.map((point) => point[1])).filter((value) => value !== null);
      figure("error", [...mean, ...ninety], { yName: "error", percent: all.every((value) => value >= 0 && value <= 1) },
        styles("90th percentile"));
      if (new Set(evaluations.map((each) => each.round)).size < 2) find("figure-error").hidden = true;
    }
    drawSpread();
    if (!drawn) {
      drawn = true;
      document.querySelectorAll(".live svg").forEach((svg) => keep(svg, () => {}));
      let width = 0;
      new ResizeObserver(() => { const now = find("live-figures").clientWidth; if (now !== width) { width = now; draw(); } }).observe(find("live-figures"));
    }
  }

  function table() {
    document.querySelector("#newest tbody").replaceChildren(...[...series].map(([name, rows]) => {
      const line = document.createElement("tr"), last = rows.at(-1), head = document.createElement("th");
      head.scope = "row";
      head.textContent = label(name);
      line.append(head);
      for (const text of [last[0], write(last[1]), write(last[2]), last[3], write(last[4])]) {
        const cell = document.createElement("td");
        cell.textContent = text;
        line.append(cell);
      }
      return line;
    }));
  }

  function standing() {
    const badge = document.querySelector("#badge .badge");
    if (badge.textContent !== state.status) { badge.textContent = state.status; badge.className = `badge ${state.status}`; }
    find("state").hidden = state.status === "finished";
    find("rounds").textContent = `${state.rounds_done} of ${state.rounds} rounds`;
    find("left").textContent = state.status === "running" && state.seconds_left !== null ? `· about ${minutes(state.seconds_left)} left` : "";
    find("progress").max = Math.max(1, state.rounds);
    find("progress").value = state.rounds_done;
    find("stopped").hidden = !["stopped", "waiting"].includes(state.status);
    find("why").textContent = state.why || (state.status === "waiting" ? "It has not begun." : "");
    find("resume").textContent = state.resume;
    find("resume").hidden = find("how").hidden = !state.resume;
    find("how").textContent = state.status === "waiting" ? " To start it:" : " To go on with it:";
  }

  function show() { draw(); table(); standing(); }

  find("scrub")?.addEventListener("input", () => { follow = Number(find("scrub").value) === Number(find("scrub").max); drawSpread(); });
  const ended = state.status === "finished";
  take(given.update);
  show();
  if (!ended) {
    const source = new EventSource(given.events);
    source.addEventListener("update", (event) => {
      take(JSON.parse(event.data));
      if (!document.hidden) show();  // a page that nobody sees is not drawn
      if (state.status === "finished") {  // models and the knob are there now
        source.close();
        setTimeout(() => location.reload(), 1500);
      }
    });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) show(); });
    source.addEventListener("gone", (event) => {
      source.close();
      state = { ...state, status: "stopped", why: JSON.parse(event.data).why, resume: "" };
      standing();
    });
  }
  document.documentElement.dataset.live = "ready";
})();
