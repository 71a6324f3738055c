// The list of runs: their states move on; runs that come or go load the page again.
"use strict";
(() => {
  const rows = new Map([...document.querySelectorAll("tr[data-run]")].map((row) => [row.dataset.run, row]));
  const time = (seconds) => seconds === null ? "–" : seconds < 90 ? `${Math.round(seconds)} s`
    : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h ${Math.round(seconds % 3600 / 60)} min`;

  async function look() {
    if (document.hidden) return;
    const answer = await fetch("/api/runs", { headers: { accept: "application/json" } });
    if (!answer.ok) return;
    const { runs } = await answer.json();
    if (runs.length !== rows.size || runs.some((run) => !rows.has(run.id))) { location.reload(); return; }
    for (const run of runs) {
      const row = rows.get(run.id), badge = row.querySelector(".badge");
      if (badge.textContent !== run.status) { badge.textContent = run.status; badge.className = `badge ${run.status}`; }
      row.querySelector(".rounds").textContent = `${run.rounds_done} of ${run.rounds}`;
      row.querySelector(".left").textContent = run.status === "running" ? time(run.seconds_left) : "–";
    }
  }

  const again = () => setTimeout(() => look().catch(() => null).then(again), 4000);
  again();
  document.documentElement.dataset.list = "ready";
})();
