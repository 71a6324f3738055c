// The table of all clients: sorted by a click on a column, searched, saved as CSV. Rows beyond the first are added on request.
"use strict";
(() => {
  const holder = document.getElementById("clients-data");
  if (!holder) return;
  const { write } = EquipoiseCharts;
  const { columns, percent } = JSON.parse(holder.textContent);
  const names = Object.keys(columns), count = columns[names[0]].length, PART = 20;
  const body = document.querySelector("#clients-table tbody"), search = document.getElementById("clients-search");
  const more = document.getElementById("clients-more"), status = document.getElementById("clients-status");
  const headers = [...document.querySelectorAll("#clients-table thead th")];
  let order = [...Array(count).keys()], shown = PART, sorted = null, descending = false;

  const isChange = (name) => name.startsWith("change");
  const isError = (name) => name.startsWith("error") || name.startsWith("loss") || name.startsWith("trivial") || isChange(name);
  const text = (name, row) => {
    const value = columns[name][row];
    if (isChange(name) && value !== null) return (value < 0 ? "\u2212" : "+") + write(Math.abs(value), percent).replace("\u00a0%", "");
    return isError(name) ? write(value, percent) : String(value);
  };

  function matching() {
    const wanted = search.value.trim().toLowerCase();
    if (!wanted) return order;
    return order.filter((row) => names.some((name) => !isError(name) && String(columns[name][row]).toLowerCase().includes(wanted)));
  }

  function show() {
    const rows = matching();
    body.replaceChildren(...rows.slice(0, shown).map((row) => {
      const line = document.createElement("tr");
      names.forEach((name, k) => {
        const cell = document.createElement(k ? "td" : "th");
        if (!k) cell.scope = "row";
        cell.textContent = text(name, row);
        line.append(cell);
      });
      return line;
    }));
    status.textContent = rows.length === count ? `${count} rows` : `${rows.length} of ${count} rows`;
    more.hidden = rows.length <= shown;
  }

  function sort(name) {
    descending = sorted === name ? !descending : isError(name);
    sorted = name;
    const values = columns[name], sign = descending ? -1 : 1;
    const rank = (value) => value === null ? Number.POSITIVE_INFINITY : value;
    order = [...Array(count).keys()].sort((a, b) => {
      const one = rank(values[a]), two = rank(values[b]);
      if (typeof one === "string") return sign * one.localeCompare(two, undefined, { numeric: true }) || a - b;
      return sign * (one - two) || a - b;
    });
    headers.forEach((header, k) => {
      header.setAttribute("aria-sort", names[k] === name ? (descending ? "descending" : "ascending") : "none");
    });
    shown = PART;
    show();
  }

  function save() {
    const quoted = (value) => /[",\r\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? "");
    const lines = [names, ...matching().map((row) => names.map((name) => columns[name][row]))];
    const file = new Blob(["\ufeff", lines.map((line) => line.map(quoted).join(",")).join("\r\n"), "\r\n"], { type: "text/csv" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(file);
    link.download = "clients.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  headers.forEach((header, k) => header.querySelector("button").addEventListener("click", () => sort(names[k])));
  search.addEventListener("input", () => { shown = PART; show(); });
  more.addEventListener("click", () => { shown += 25 * PART; show(); });
  document.getElementById("clients-save").addEventListener("click", save);
  document.getElementById("clients-tools").hidden = false;
  show();
  document.documentElement.dataset.clients = "ready";
})();
