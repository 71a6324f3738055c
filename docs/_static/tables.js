/* Tables of the reference: a heading sorts, a field filters; the matrix shows the kinds that are chosen. */
"use strict";

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      const key = (row) => row.cells[column].textContent.trim();
      rows.sort((a, b) => (up ? 1 : -1) * key(a).localeCompare(key(b), "en", { numeric: true }));
      table.tBodies[0].append(...rows);
    });
  });
  if (!table.dataset.filter) return;
  const label = document.createElement("label");
  const field = document.createElement("input");
  const count = document.createElement("span");
  label.className = "table-filter";
  count.className = "table-count";
  count.setAttribute("role", "status");
  field.type = "search";
  field.placeholder = table.dataset.filter;
  field.setAttribute("aria-label", table.dataset.filter);
  label.append(field, count);
  table.closest(".wide-table").before(label);
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      left += row.hidden ? 0 : 1;
    }
    count.textContent = `${left} of ${table.tBodies[0].rows.length} rows`;
  };
  field.addEventListener("input", show);
  show();
}

function matrix(table, place) {
  const kinds = [...new Set([...table.tBodies[0].rows].map((row) => row.dataset.kind))];
  const heads = [...table.tHead.rows[0].cells].slice(1);
  const chosen = { rows: new Set(kinds.slice(0, 1)), columns: new Set(kinds.slice(1)) };
  const show = () => {
    for (const row of table.tBodies[0].rows) {
      row.hidden = !chosen.rows.has(row.dataset.kind);
      heads.forEach((head, j) => { row.cells[j + 1].hidden = !chosen.columns.has(head.dataset.kind); });
    }
    heads.forEach((head) => { head.hidden = !chosen.columns.has(head.dataset.kind); });
  };
  for (const side of ["rows", "columns"]) {
    const set = document.createElement("fieldset");
    const legend = document.createElement("legend");
    legend.textContent = side === "rows" ? "Rows" : "Columns";
    set.append(legend);
    for (const kind of kinds) {
      const label = document.createElement("label");
      const box = document.createElement("input");
      box.type = "checkbox";
      box.checked = chosen[side].has(kind);
      box.addEventListener("change", () => { chosen[side][box.checked ? "add" : "delete"](kind); show(); });
      label.append(box, ` ${kind}`);
      set.append(label);
    }
    place.append(set);
  }
  show();
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("table.sortable").forEach(sortable);
  const found = document.getElementById("pairs");
  const place = document.getElementById("matrix-kinds");
  if (found && place) matrix(found, place);
  // Code that scrolls sideways must be reachable by keyboard.
  document.querySelectorAll("div.highlight pre").forEach((block) => { if (block.scrollWidth > block.clientWidth) block.tabIndex = 0; });
  document.querySelectorAll(".table-wrapper").forEach((box) => { box.tabIndex = 0; });
});
