// The table of a study fills in as its runs end.
"use strict";
(() => {
  const holder = document.getElementById("study-data");
  if (!holder) return;
  const { address } = JSON.parse(holder.textContent);
  const cell = (text, kind) => { const made = document.createElement(kind || "td"); made.textContent = text; return made; };

  async function look() {
    if (document.hidden) return true;
    const answer = await fetch(address, { headers: { accept: "application/json" } });
    if (!answer.ok) return answer.status !== 404;
    const study = await answer.json();
    document.getElementById("study-status").textContent = `${study.ended} of ${study.runs.length} runs have ended.`;
    document.getElementById("study-rows").replaceChildren(...study.runs.map((row) => {
      const line = document.createElement("tr"), head = document.createElement("th"), link = document.createElement("a");
      head.scope = "row";
      link.href = `/run/${encodeURIComponent(row.id)}`;
      link.textContent = row.name;
      head.append(link);
      const badge = cell(row.status, "span"), held = document.createElement("td");
      badge.className = `badge ${row.status}`;
      held.append(badge);
      line.append(head, cell(row.seed));
      for (const key of ["mean", "percentile_90", "worst_10"]) line.append(cell(row.shown[key] || "–"));
      line.append(held, cell(`${row.rounds_done} of ${row.rounds}`));
      return line;
    }));
    return study.ended < study.runs.length;
  }

  const again = () => look().catch(() => true).then((more) => { if (more) setTimeout(again, 3000); });
  again();
})();
