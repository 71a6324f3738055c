"""The page's style sheet: one column on a telephone, two columns of figures on a desk, light or dark as the reader likes."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --paper: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #5a6473; --line: #dde1e7;
  --accent: #0072b2; --good: #00694d; --bad: #a84300; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #14181f; --card: #1d232c; --ink: #e8ebf0; --soft: #a3adbb; --line: #333c48; --accent: #6fb8e8;
    --good: #4fc3a1; --bad: #f0904d; }
}
* { box-sizing: border-box; }
body { margin: 0; overflow-wrap: anywhere; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 24px 64px; }
.eyebrow { margin: 0; color: var(--soft); font-size: 14px; letter-spacing: .04em; text-transform: uppercase; }
h1 { margin: 0 0 12px; font-size: 30px; line-height: 1.2; }
#headline { max-width: 50em; margin: 0 0 22px; padding: 2px 0 2px 18px; border-left: 4px solid var(--accent);
  font-size: 19px; line-height: 1.45; }
h2 { margin: 44px 0 12px; font-size: 21px; }
h3 { margin: 0 0 10px; font-size: 16px; line-height: 1.35; }
.card { min-width: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.scroll { overflow-x: auto; }
.caption { margin: 0; padding: 12px 14px 4px; color: var(--soft); font-size: 14.5px; line-height: 1.4; }
table { width: 100%; border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; }
th, td { padding: 8px 14px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { max-width: 17em; white-space: normal; overflow-wrap: break-word; }
th:first-child { position: sticky; left: 0; background: var(--card); text-align: left; }
th.short { white-space: nowrap; }
.card:has(.alone) { max-width: 660px; }
thead th { min-width: 5.5em; max-width: 12em; color: var(--soft); font-size: 14px; font-weight: 600; line-height: 1.3;
  vertical-align: bottom; }
tbody tr:last-child > * { border-bottom: 0; }
tbody th { font-weight: 600; }
td.best { font-weight: 700; }
.rejected :is(th, td):nth-last-child(-n+2) { text-align: left; white-space: normal; min-width: 13em; }
tr.below > * { color: var(--soft); font-weight: 400; }
tr.below th { padding-left: 33px; }
td small { display: inline-block; min-width: 3.6em; color: var(--soft); font-size: 13px; }
td small.down { color: var(--good); }
td small.up { color: var(--bad); }
.pair, .figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 20px; }
.stack { display: grid; grid-template-columns: minmax(0, 1fr); gap: 20px; }
.swatch { display: inline-block; flex: none; width: 11px; height: 11px; margin-right: 8px; border-radius: 3px; }
.note, figcaption { color: var(--soft); font-size: 14.5px; }
.note { max-width: 56em; }
header .note { max-width: 65em; margin: -10px 0 22px; padding-left: 22px; }
figure { min-width: 0; margin: 0; padding: 16px 18px; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
figure.wide { grid-column: 1 / -1; }
.plot { min-height: 340px; }
.plot[data-figure=privacy] { min-height: 260px; }
figcaption { margin-top: 6px; line-height: 1.45; }
dl { margin: 0; display: grid; grid-template-columns: minmax(8em, max-content) 1fr; gap: 10px 24px; }
dt { font-weight: 600; overflow-wrap: anywhere; max-width: 16em; }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
code { font: 13.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
@media (max-width: 820px) {
  main { padding: 20px 14px 48px; }
  h1 { font-size: 25px; }
  #headline { font-size: 17px; padding-left: 14px; }
  .pair, .figures { grid-template-columns: minmax(0, 1fr); }
  figure { padding: 12px 8px; }
  figure h3, figcaption { padding: 0 4px; }
  dl { grid-template-columns: 1fr; gap: 2px; }
  dd { margin-bottom: 12px; }
  th, td { padding: 8px 9px; }
  td small { min-width: 2.6em; }
  tr.below th { padding-left: 28px; }
  th { max-width: 9em; }
  table.numbers thead th:not(:first-child) { min-width: 8em; }
}
@media print {
  :root { color-scheme: light; --paper: #fff; }
  main { padding: 0; }
  .figures, .pair { display: block; }
  figure, .card { margin-bottom: 16px; break-inside: avoid; }
  .scroll { overflow: visible; }
  th, td { padding: 5px 8px; font-size: 14px; }
  .note:has(+ .figures) { display: none; }
}
"""
