"""The page's style sheet. No font and no image is loaded: a report must open anywhere, for ever.

Everything is scoped to ``.slipstream``, because Flyte puts the same markup into a page of its own.
"""

from __future__ import annotations

CSS = """
.slipstream {
  --ink: #17202c; --soft: #5a6678; --line: #e1e6ed; --page: #f5f7fa; --card: #ffffff;
  --good: #12805c; --warn: #b45309; --bad: #c2410c; --tint: #eef3fd; --shadow: 0 1px 2px rgb(16 30 54 / 7%);
  --c0: #2457d6; --c1: #e0711a; --c2: #12956b; --c3: #9a4bb0;
  color: var(--ink); background: var(--page); margin: 0; padding: 28px 20px 48px; line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  -webkit-text-size-adjust: 100%; color-scheme: light dark;
}
@media (prefers-color-scheme: dark) {
  .slipstream {
    --ink: #e8ecf2; --soft: #9aa6b8; --line: #2b3442; --page: #10151d; --card: #181f29;
    --good: #4fd1a5; --warn: #f0b04f; --bad: #ff8a5c; --tint: #1c2838; --shadow: none;
    --c0: #7ea6ff; --c1: #ffa65c; --c2: #4fd1a5; --c3: #d895e8;
  }
}
.slipstream * { box-sizing: border-box; }
.slipstream main, .slipstream footer { max-width: 1120px; margin: 0 auto; }
.slipstream h1, .slipstream h2, .slipstream h3, .slipstream p, .slipstream figure, .slipstream dl { margin: 0; }
.slipstream h2 { font-size: 19px; line-height: 1.3; font-weight: 650; margin: 40px 0 4px; letter-spacing: -.01em; }
.slipstream h3 { font-size: 14px; font-weight: 650; margin: 0 0 8px; }
.slipstream .lead { color: var(--soft); margin: 0 0 14px; max-width: 76ch; overflow-wrap: anywhere; }
.slipstream .card {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px;
  box-shadow: var(--shadow); min-width: 0;
}
.slipstream .grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
.slipstream .grid > .column { display: grid; gap: 16px; align-content: start; min-width: 0; }
.slipstream .grid > .wide { grid-column: 1 / -1; }

.slipstream .hero { padding: 26px 28px 24px; }
.slipstream .path { color: var(--soft); font-size: 14px; overflow-wrap: anywhere; }
.slipstream .path b { color: var(--ink); font-weight: 600; }
.slipstream h1 { font-size: 42px; line-height: 1.1; font-weight: 700; letter-spacing: -.025em; margin: 10px 0 8px; }
.slipstream h1 small { font-size: 21px; font-weight: 500; letter-spacing: -.01em; color: var(--soft); }
.slipstream .verdict { font-size: 17px; max-width: 72ch; overflow-wrap: anywhere; }
.slipstream .verdict + .verdict { margin-top: 6px; }
.slipstream .up { color: var(--good); font-weight: 600; } .slipstream .down { color: var(--bad); font-weight: 600; }
.slipstream .tiles {
  display: grid; gap: 1px; margin: 22px -28px -24px; border-top: 1px solid var(--line); background: var(--line);
  grid-template-columns: repeat(4, 1fr); border-radius: 0 0 11px 11px; overflow: hidden;
}
.slipstream .tile { background: var(--card); padding: 14px 20px 16px; min-width: 0; }
.slipstream .tile dt { color: var(--soft); font-size: 13px; }
.slipstream .tile dd { margin: 0; font-size: 22px; font-weight: 650; letter-spacing: -.015em; line-height: 1.3; }
.slipstream .tile dd + dd { font-size: 13px; font-weight: 400; letter-spacing: 0; color: var(--soft);
  overflow-wrap: anywhere; }

.slipstream svg { display: block; width: 100%; height: auto; overflow: visible; }
.slipstream svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
.slipstream text.tick { fill: var(--soft); } .slipstream text.title { fill: var(--soft); }
.slipstream text.middle { text-anchor: middle; } .slipstream text.end { text-anchor: end; }
.slipstream line.grid { stroke: var(--line); stroke-width: 1; }
.slipstream line.axis { stroke: var(--soft); stroke-width: 1; opacity: .6; }
.slipstream .c0 { color: var(--c0); } .slipstream .c1 { color: var(--c1); }
.slipstream .c2 { color: var(--c2); } .slipstream .c3 { color: var(--c3); } .slipstream .c4 { color: var(--soft); }
.slipstream polyline { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.slipstream polyline.dashed { stroke-dasharray: 4 4; stroke-width: 1.4; }
.slipstream polygon.band { fill: currentColor; opacity: .13; }
.slipstream circle.dot { fill: currentColor; opacity: .45; }
.slipstream circle.mark { fill: var(--card); stroke: currentColor; stroke-width: 2; }
.slipstream rect.good { fill: var(--c0); } .slipstream rect.bad { fill: var(--c1); }
.slipstream text.cell { fill: var(--ink); } .slipstream text.over { fill: var(--card); font-weight: 600; }
.slipstream .legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 8px; font-size: 13px;
  color: var(--soft); }
.slipstream .legend span { display: inline-flex; align-items: center; gap: 6px; }
.slipstream .key { width: 16px; height: 0; border-top: 3px solid currentColor; border-radius: 2px; }
.slipstream .key.dashed { border-top: 2px dashed currentColor; }

.slipstream table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
.slipstream th { text-align: left; font-weight: 500; color: var(--soft); font-size: 13px; white-space: nowrap; }
.slipstream th, .slipstream td { padding: 8px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
.slipstream td { overflow-wrap: anywhere; }
.slipstream tr > :first-child { padding-left: 0; } .slipstream tr > :last-child { padding-right: 0; }
.slipstream tbody:last-child > tr:last-child > td { border-bottom: 0; padding-bottom: 0; }
.slipstream .number { text-align: right; white-space: nowrap; }
.slipstream tr.noted > td { border-bottom: 0; padding-bottom: 0; }
.slipstream tr.note > td { color: var(--soft); font-size: 13px; padding-top: 2px; }
.slipstream .name { font-weight: 600; }
.slipstream .tag { display: inline-block; border-radius: 20px; padding: 0 9px; margin-left: 8px; font-size: 12px;
  font-weight: 600; line-height: 20px; color: var(--c0); background: var(--tint); white-space: nowrap; }
.slipstream .tag.plain { color: var(--soft); background: none; border: 1px solid var(--line); line-height: 18px; }

.slipstream .bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 9px 14px;
  align-items: center; font-variant-numeric: tabular-nums; }
.slipstream .bars .track { height: 12px; border-radius: 3px; background: var(--tint); overflow: hidden; }
.slipstream .bars .fill { display: block; height: 100%; background: var(--c0); border-radius: 3px; min-width: 2px; }
.slipstream .bars .value { text-align: right; }
.slipstream .bars .label { max-width: 34vw; overflow-wrap: anywhere; }
.slipstream .bars + .soft, .slipstream .legend + .bars { margin-top: 12px; }
.slipstream .bars .soft, .slipstream .soft { color: var(--soft); }

.slipstream .list { margin: 0; padding: 0; list-style: none; }
.slipstream .list li { padding: 7px 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; font-size: 14px; }
.slipstream .list li:first-child { padding-top: 0; }
.slipstream .list li:last-child { border-bottom: 0; padding-bottom: 0; }
.slipstream .list.warnings li { padding-left: 16px; position: relative; }
.slipstream .list.warnings li::before { content: ""; position: absolute; left: 0; top: 14px; width: 7px; height: 7px;
  border-radius: 50%; background: var(--warn); }
.slipstream .list.warnings li:first-child::before { top: 7px; }
.slipstream .splits { display: flex; gap: 2px; height: 12px; border-radius: 3px; overflow: hidden; margin: 10px 0 8px; }
.slipstream .splits i { background: currentColor; min-width: 2px; }
.slipstream details summary { cursor: pointer; color: var(--c0); font-size: 14px; padding: 12px 0 0; }
.slipstream details[open] summary { padding-bottom: 12px; }
.slipstream .columns td { font-size: 13.5px; }
.slipstream .settings { columns: 3 300px; column-gap: 16px; }
.slipstream .settings .card { break-inside: avoid; margin: 0 0 16px; padding: 14px 18px; }
.slipstream .settings table { table-layout: fixed; }
.slipstream .settings td { padding: 4px 0; font-size: 13px; border: 0; }
.slipstream .settings td:last-child { text-align: right; padding-left: 14px; }
.slipstream code { font: 12.5px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
.slipstream footer { color: var(--soft); font-size: 13px; margin-top: 36px; overflow-wrap: anywhere; }

@media (max-width: 920px) {
  .slipstream table.stack thead { display: none; }
  .slipstream table.stack tr, .slipstream table.stack td { display: block; }
  .slipstream table.stack td { display: flex; justify-content: space-between; gap: 14px; padding: 3px 0; border: 0;
    text-align: right; white-space: normal; }
  .slipstream table.stack td::before { content: attr(data-label); color: var(--soft); font-size: 13px; flex: none; }
  .slipstream table.stack td:first-child { justify-content: flex-start; padding-top: 12px; text-align: left; }
  .slipstream table.stack td:first-child::before, .slipstream table.stack .note td::before { content: none; }
  .slipstream table.stack tbody:first-of-type tr:first-child td:first-child { padding-top: 0; }
  .slipstream table.stack .note td { padding: 3px 0 12px; text-align: left; border-bottom: 1px solid var(--line); }
  .slipstream table.stack tbody:last-child .note:last-child td { border: 0; padding-bottom: 0; }
}
@media (max-width: 720px) {
  .slipstream { padding: 12px 12px 32px; }
  .slipstream .card { padding: 15px 15px; border-radius: 10px; }
  .slipstream .hero { padding: 18px 16px; }
  .slipstream h1 { font-size: 33px; }
  .slipstream h1 small { display: block; font-size: 18px; margin-top: 2px; }
  .slipstream .verdict { font-size: 15.5px; }
  .slipstream .tiles { grid-template-columns: repeat(2, 1fr); margin: 18px -16px -18px; border-radius: 0 0 9px 9px; }
  .slipstream .tile { padding: 11px 16px 12px; }
  .slipstream .tile dd { font-size: 19px; }
  .slipstream h2 { margin-top: 32px; }
  .slipstream svg text { font-size: 13px; }
  .slipstream .columns thead { display: none; }
  .slipstream .columns tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--line); }
  .slipstream .columns tr:first-child { padding-top: 0; }
  .slipstream .columns tr:last-child { padding-bottom: 0; border: 0; }
  .slipstream .columns td { display: inline; padding: 0; border: 0; color: var(--soft); }
  .slipstream .columns td:first-child, .slipstream .columns td:last-child { display: block; color: var(--ink); }
  .slipstream .columns td:nth-child(n + 3):not(:last-child)::before { content: " \\00b7 "; }
  .slipstream .columns td:nth-child(4)::after, .slipstream .columns td:nth-child(5)::after {
    content: "\\00a0" attr(data-label); }
}
@media print {
  .slipstream { padding: 0; background: none; }
  .slipstream .card { break-inside: avoid; box-shadow: none; }
}
"""
