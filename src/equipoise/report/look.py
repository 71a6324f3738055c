"""The page's style sheet: one column on a telephone, two columns of figures on a desk, light or dark as the reader likes."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --paper: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #5a6473; --line: #dde1e7;
  --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181f; --card: #1d232c; --ink: #e8ebf0; --soft: #a3adbb; --line: #333c48; --accent: #6fb8e8; }
}
* { box-sizing: border-box; }
body { margin: 0; overflow-wrap: anywhere; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1160px; margin: 0 auto; padding: 40px 24px 64px; }
.eyebrow { margin: 0; color: var(--soft); font-size: 14px; letter-spacing: .04em; text-transform: uppercase; }
h1 { margin: 4px 0 16px; font-size: 32px; line-height: 1.2; }
#headline { max-width: 46em; margin: 0; padding: 2px 0 2px 18px; border-left: 4px solid var(--accent); font-size: 20px;
  line-height: 1.5; }
h2 { margin: 44px 0 12px; font-size: 21px; }
h3 { margin: 0 0 8px; font-size: 16px; }
table { width: 100%; border-collapse: collapse; background: var(--card); border: 1px solid var(--line);
  font-variant-numeric: tabular-nums; }
table.worst { width: auto; min-width: 26em; }
caption { caption-side: top; padding: 0 0 10px; color: var(--soft); font-size: 15px; text-align: left; }
th, td { padding: 9px 14px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; }
thead th { color: var(--soft); font-size: 14px; font-weight: 600; white-space: normal; vertical-align: bottom;
  line-height: 1.3; }
tbody tr:last-child > * { border-bottom: 0; }
tbody th { font-weight: 600; }
td.best { font-weight: 700; }
.swatch { display: inline-block; width: 11px; height: 11px; margin-right: 9px; border-radius: 3px; }
.note, figcaption { color: var(--soft); font-size: 14.5px; }
.figures { columns: 2; column-gap: 20px; }
figure { display: inline-block; width: 100%; margin: 0 0 20px; padding: 18px; background: #fff;
  border: 1px solid var(--line); border-radius: 8px; break-inside: avoid; color: #1c2430; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { margin-top: 8px; color: #5a6473; }
dl { margin: 0; display: grid; grid-template-columns: minmax(8em, max-content) 1fr; gap: 10px 24px; }
dt { font-weight: 600; overflow-wrap: anywhere; max-width: 16em; }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
code { font: 13.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
@media (max-width: 760px) {
  main { padding: 24px 16px 48px; }
  h1 { font-size: 26px; }
  #headline { font-size: 18px; padding-left: 14px; }
  .figures { columns: 1; }
  figure { padding: 12px 10px; }
  dl { grid-template-columns: 1fr; gap: 2px; }
  dd { margin-bottom: 12px; }
  table.worst { min-width: 0; width: 100%; }
  th, td { padding: 8px 10px; }
  table.numbers, table.numbers tbody, table.numbers tr, table.numbers caption { display: block; }
  table.numbers { border: 0; background: none; }
  table.numbers thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table.numbers tr { margin-bottom: 14px; padding: 6px 0; background: var(--card); border: 1px solid var(--line);
    border-radius: 8px; }
  table.numbers th, table.numbers td { display: flex; justify-content: space-between; gap: 16px; padding: 5px 14px; border: 0; }
  table.numbers th { justify-content: flex-start; align-items: center; gap: 0; }
  table.numbers td::before { content: attr(data-label); color: var(--soft); font-weight: 400; }
}
@media print { body { background: #fff; } figure, tr { break-inside: avoid; } }
"""
