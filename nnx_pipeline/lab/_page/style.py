"""The style sheet of a page: light or dark as the reader chose, from 320 px to paper."""

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1a1f27; --quiet: #566070; --rule: #dfe3e9;
  --a: #b04f0a; --b: #1560b8; --link: #1560b8;
  --good: #17663a; --good-bed: #dff3e6; --bad: #9a3412; --bad-bed: #fdebdc;
  --even: #46505e; --even-bed: #e9ecf1; --failed: #a1121f; --failed-bed: #fde4e6; }
@media (prefers-color-scheme: dark) { :root {
  --page: #11151b; --card: #1a2029; --ink: #e8ecf2; --quiet: #a3aebd; --rule: #303946;
  --a: #f0954e; --b: #6cb2ff; --link: #7dbbff;
  --good: #8fe0ae; --good-bed: #16382a; --bad: #ffc08a; --bad-bed: #45290f;
  --even: #c4cdd9; --even-bed: #2b3440; --failed: #ffb0b6; --failed-bed: #4a1a20; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main, body > header, body > footer { max-width: 68rem; margin: 0 auto; padding: 0 1.25rem; }
body > header { padding-top: 2.25rem; }
body > footer { padding-bottom: 3rem; color: var(--quiet); font-size: .875rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; line-height: 1.25; margin: 0; letter-spacing: -.005em; }
p { margin: .5rem 0; max-width: 62rem; overflow-wrap: anywhere; }
a { color: var(--link); text-underline-offset: .15em; }
code, .code { font: .86em/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono",
  monospace; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); font-size: .875rem; }
.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 1.4rem 1.5rem; margin: 1.25rem 0; }
.card > header { display: flex; flex-wrap: wrap; gap: .4rem .9rem; align-items: center; }
.pill { display: inline-block; border-radius: 99px; padding: .1rem .7rem; font-size: .875rem;
  font-weight: 600; white-space: nowrap; color: var(--even); background: var(--even-bed); }
.pill.holds { color: var(--good); background: var(--good-bed); }
.pill.opposite { color: var(--bad); background: var(--bad-bed); }
.pill.failed { color: var(--failed); background: var(--failed-bed); }
.claim { color: var(--quiet); font-size: .875rem; }
.difference { font-size: 1.0625rem; }
.note, .warning { border-left: 4px solid var(--bad); background: var(--bad-bed); color: var(--ink);
  padding: .5rem .8rem; border-radius: 0 6px 6px 0; font-size: .9375rem; }
.letter { display: inline-block; width: 1.5em; text-align: center; border-radius: 4px;
  color: var(--card); background: var(--even); font-size: .8125rem; line-height: 1.5; }
.letter.a { background: var(--a); } .letter.b { background: var(--b); }
.headline { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr));
  gap: .9rem 1.5rem; margin: 1.1rem 0 .25rem; padding: 0; }
.headline dt { color: var(--quiet); font-size: .875rem; }
.headline dd { margin: 0; font-size: 1.3rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.headline dd small { font-size: .875rem; color: var(--quiet); }
figure { margin: 1.6rem 0 .5rem; }
figcaption { font-weight: 600; margin-bottom: .6rem; }
svg { display: block; width: 100%; }
.bar svg { height: 2.1rem; border-radius: 5px; background: var(--even-bed); }
.bar rect { stroke: var(--card); stroke-width: 2; vector-effect: non-scaling-stroke; }
.bar-label { display: flex; justify-content: space-between; gap: 1rem; margin: .7rem 0 .25rem; }
.plot { display: grid; grid-template-columns: 3.1rem 1fr; gap: .5rem; }
.plot .area, .plot .y-ticks { position: relative; height: 15rem; }
.plot svg { height: 100%; overflow: visible; }
.y-ticks span { position: absolute; right: 0; transform: translateY(-50%); color: var(--quiet);
  font-size: .8125rem; font-variant-numeric: tabular-nums; }
.x-ends { display: flex; justify-content: space-between; margin-left: 3.6rem; color: var(--quiet);
  font-size: .8125rem; padding-top: .3rem; }
.grid { stroke: var(--rule); stroke-width: 1; vector-effect: non-scaling-stroke; }
.line { fill: none; stroke-width: 1.75; vector-effect: non-scaling-stroke; stroke: var(--b); }
.line.a { stroke: var(--a); }
.peak { position: absolute; width: 12px; height: 12px; margin: -6px; border-radius: 50%;
  border: 2px solid var(--card); background: var(--b); }
.peak.a { background: var(--a); }
table { border-collapse: collapse; width: 100%; font-size: .9375rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem .4rem 0;
  border-bottom: 1px solid var(--rule); }
th { font-weight: 600; } thead th { color: var(--quiet); font-size: .8125rem; }
caption { text-align: left; font-weight: 600; padding: 0 0 .4rem; }
td.number, th.number { text-align: right; padding-left: .6rem; }
td.number:last-child, th.number:last-child { padding-right: 0; }
th .code, td .code { display: block; font-weight: 400; }
th .quiet, td .quiet { font-size: .8125rem; font-weight: 400; display: block; }
section > table { margin-top: 1.4rem; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 3px;
  margin-right: .5em; }
.more { color: var(--bad); } .less { color: var(--good); }
details { margin-top: 1.2rem; } summary { cursor: pointer; font-weight: 600; padding: .25rem 0; }
details > *:not(summary) { margin-top: .6rem; }
footer dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; }
footer dt { font-weight: 600; } footer dd { margin: 0; max-width: 50rem; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
@media (max-width: 40rem) {
  main, body > header, body > footer { padding-left: .75rem; padding-right: .75rem; }
  body > header { padding-top: 1.25rem; }
  h1 { font-size: 1.375rem; }
  .card { padding: 1rem .9rem; border-radius: 10px; }
  .plot .area, .plot .y-ticks { height: 11rem; }
  .headline { grid-template-columns: 1fr 1fr; } .headline dd { font-size: 1.1rem; }
  table { font-size: .875rem; }
  .stacks thead { position: absolute; width: 1px; height: 1px; overflow: hidden;
    clip-path: inset(50%); }
  .stacks tr { display: grid; grid-template-columns: 1fr auto; gap: 0 .8rem; padding: .55rem 0;
    border-bottom: 1px solid var(--rule); }
  .stacks th, .stacks td { border: 0; padding: .1rem 0; }
  .stacks .wide { grid-column: 1 / -1; }
  .stacks td.number { grid-column: 1 / -1; display: flex; justify-content: space-between; }
  .stacks td.number::before { content: attr(data-label); color: var(--quiet); }
}
@media print {
  :root { color-scheme: light; --page: #fff; --card: #fff; --ink: #000; --quiet: #444;
    --rule: #ccc; --a: #b04f0a; --b: #1560b8; --link: #000; --good: #17663a; --good-bed: #fff;
    --bad: #9a3412; --bad-bed: #fff; --even: #333; --even-bed: #fff; --failed: #a1121f;
    --failed-bed: #fff; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  body { font-size: 10.5pt; }
  .card { border: 0; border-top: 1px solid var(--rule); border-radius: 0; padding: 1rem 0; }
  figure, tr, .headline, .card > header { break-inside: avoid; }
  h2, figcaption, caption { break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
  .pill { border: 1px solid currentColor; }
}
"""
