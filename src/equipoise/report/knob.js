// The knob of a family: a slider over the values that models were trained for.
"use strict";
(() => {
  const holder = document.getElementById("knob-data");
  if (!holder) return;
  const { write, histogram, tradeoff, keep } = EquipoiseCharts;
  const data = JSON.parse(holder.textContent), { members, percent, noun } = data;
  const slider = document.getElementById("knob-slider"), find = (id) => document.getElementById(id);
  const first = members[0];
  let place = 0;

  function change(now, before) {
    if (now === null || before === null) return ["", ""];
    const moved = now - before;
    const shown = percent ? (100 * moved).toFixed(1) : String(+moved.toPrecision(3));
    if (+shown === 0) return ["as at the start of the knob", ""];
    return [`${moved > 0 ? "▲ +" : "▼ −"}${shown.replace("-", "")}${percent ? " points" : ""}`, moved > 0 ? "up" : "down"];
  }

  function draw() {
    const member = members[place];
    if (find("knob-histogram")) {
      histogram(find("knob-histogram"), { edges: data.edges, counts: member.counts, outline: place ? first.counts : null,
        marks: [[member.mean, "mean"], [member.percentile_90, "tail"]], percent, noun });
    }
    tradeoff(find("knob-tradeoff"), { points: members.map((each) => ({ x: each.mean, y: each.percentile_90, label: String(each.value) })),
      chosen: place, percent, noun, onPick: turn });
  }

  function list(holder, rows, empty) {
    const made = rows.map((row) => {
      const item = document.createElement("li"), name = document.createElement("b"), span = document.createElement("span");
      name.textContent = row.client;
      span.textContent = `${write(row.before, percent)} → ${write(row.after, percent)}`;
      item.append(name, " ", span);
      return item;
    });
    if (!made.length) {
      const item = document.createElement("li");
      item.className = "none";
      item.textContent = empty;
      made.push(item);
    }
    holder.replaceChildren(...made);
  }

  function show() {
    const member = members[place];
    slider.value = place;
    slider.setAttribute("aria-valuetext", `${data.knob} ${member.value}, ${member.words}`);
    find("knob-value").textContent = `${data.knob} ${member.value}`;
    for (const key of ["mean", "percentile_90", "worst_10"]) {
      const cell = find(`knob-${key}`), [text, kind] = change(member[key], first[key]);
      cell.textContent = write(member[key], percent);
      cell.dataset.value = member[key];
      const small = find(`knob-${key}-change`);
      small.textContent = place ? text : "";
      small.className = kind;
    }
    find("knob-words").textContent = `${member.words[0].toUpperCase()}${member.words.slice(1)}. Mean ${noun} `
      + `${write(member.mean, percent)}, 90th percentile ${write(member.percentile_90, percent)}, worst tenth ${write(member.worst_10, percent)}.`;
    if (find("knob-gain")) {
      const start = `${data.knob} ${first.value}`;
      find("knob-gains").textContent = place ? `${member.gains} of ${data.clients} clients gain` : "Clients that gain";
      find("knob-loses").textContent = place ? `${member.loses} lose` : "Clients that lose";
      const none = place ? "None." : `Turn the knob: gains and losses are beside ${start}.`;
      list(find("knob-gain"), place ? member.gain : [], none);
      list(find("knob-lose"), place ? member.lose : [], none);
    }
    document.querySelectorAll("#knob-table tbody tr").forEach((row, k) => row.classList.toggle("here", k === place));
    document.querySelectorAll("#knob-ticks button").forEach((tick, k) => tick.setAttribute("aria-pressed", String(k === place)));
    draw();
    document.dispatchEvent(new CustomEvent("equipoise-knob", { detail: { place, member } }));
  }

  function turn(to) {
    place = Math.max(0, Math.min(members.length - 1, to));
    show();
  }

  find("knob-live").hidden = false;
  slider.addEventListener("input", () => turn(Number(slider.value)));
  document.querySelectorAll("#knob-ticks button").forEach((tick, k) => tick.addEventListener("click", () => turn(k)));
  document.addEventListener("equipoise-turn", (event) => turn(event.detail));
  turn(0);
  keep(find("knob-tradeoff"), draw);
  document.documentElement.dataset.knob = "ready";
})();
