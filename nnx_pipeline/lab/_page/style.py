"""The style sheet of a page: light or dark as the reader chose, from 320 px to paper."""

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1a1f27; --quiet: #566070; --rule: #dfe3e9;
  --a: #b04f0a; --b: #1560b8; --link: #1560b8;
  --good: #17663a; --good-bed: #dff3e6; --bad: #9a3412; --bad-bed: #fdebdc;
  --even: #46505e; --even-bed: #e9ecf1; --failed: #a1121f; --failed-bed: #fde4e6;
  --frame: #e4e9f1; --bad-stripe: #f4cfae; }
@media (prefers-color-scheme: dark) { :root {
  --page: #11151b; --card: #1a2029; --ink: #e8ecf2; --quiet: #a3aebd; --rule: #303946;
  --a: #f0954e; --b: #6cb2ff; --link: #7dbbff;
  --good: #8fe0ae; --good-bed: #16382a; --bad: #ffc08a; --bad-bed: #45290f;
  --even: #c4cdd9; --even-bed: #2b3440; --failed: #ffb0b6; --failed-bed: #4a1a20;
  --frame: #2c3648; --bad-stripe: #6b431b; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main, body > header, body > footer { max-width: 68rem; margin: 0 auto; padding: 0 1.25rem; }
body > header { padding-top: 2.25rem; }
body > footer { padding-bottom: 3rem; color: var(--quiet); font-size: .875rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em;
  overflow-wrap: anywhere; }
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
.note, .warning { border-left: 4px solid var(--even); background: var(--even-bed);
  color: var(--ink); padding: .5rem .8rem; border-radius: 0 6px 6px 0; font-size: .9375rem; }
.warning { border-color: var(--bad); background: var(--bad-bed); }
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
.timeline path { stroke: var(--card); stroke-width: .5; vector-effect: non-scaling-stroke; }
.timeline .other { fill: none; stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 5 3; }
.limit { stroke: var(--failed); stroke-width: 2; stroke-dasharray: 9 4;
  vector-effect: non-scaling-stroke; }
.panel { margin: 1rem 0 .4rem; font-size: .9375rem; }
.timeline .area { touch-action: pan-y; cursor: crosshair; }
.here { position: absolute; top: 0; bottom: 0; width: 0; border-left: 2px solid var(--ink);
  pointer-events: none; }
.cursor { display: block; margin: .6rem 0 0 3.6rem; color: var(--quiet); font-size: .875rem; }
.cursor[hidden] { display: none; }
.cursor input { display: block; width: 100%; margin: .3rem 0; accent-color: var(--link); }
.readout { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
  gap: .4rem 2rem; margin-left: 3.6rem; font-size: .875rem; min-height: 11rem; }
.roles { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .875rem; }
.timeline > .roles { margin-left: 3.6rem; }
.readout ol { list-style: none; margin: 0; padding: 0; }
.readout li { display: grid; grid-template-columns: 5rem 11.5rem 1fr; gap: 0 .7rem;
  padding: .25rem 0; border-top: 1px solid var(--rule); }
.readout li .number { text-align: right; } .readout li .quiet { grid-column: 2 / -1; }
.frames { position: relative; height: calc(var(--d) * 1.6rem); overflow: hidden; }
.frames > div { position: absolute; height: 1.5rem; top: calc(var(--y) * 1.6rem);
  left: calc((var(--x) - var(--zx, 0)) / var(--zw, 100) * 100%);
  width: max(2px, calc(var(--w) / var(--zw, 100) * 100% - 1px)); padding: 0 .3rem;
  overflow: hidden; white-space: nowrap; text-overflow: ellipsis; font-size: .8125rem;
  line-height: 1.5rem; cursor: pointer; border-radius: 3px; color: var(--ink);
  background: var(--frame); }
.frames > div[hidden] { display: none; } .frames small { opacity: .85; }
.frames > .above { left: 0; width: 100%; border-left: 4px solid var(--even); }
.frames > .grows { background: repeating-linear-gradient(135deg, var(--bad-bed) 0 7px,
  var(--bad-stripe) 7px 9px); color: var(--bad); }
.frames > .shrinks { background: var(--good-bed); color: var(--good); }
.frames > div:focus-visible { outline-offset: -3px; }
.said { min-height: 3em; font-size: .875rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr));
  gap: 0 2rem; }
.fitted { stroke: var(--b); stroke-width: 1.5; stroke-dasharray: 6 4;
  vector-effect: non-scaling-stroke; } .fitted.a { stroke: var(--a); }
.x-values { position: relative; height: 1.4rem; margin-left: 3.6rem; color: var(--quiet);
  font-size: .8125rem; }
.x-values span { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.peak { position: absolute; width: 12px; height: 12px; margin: -6px; border-radius: 50%;
  border: 2px solid var(--card); background: var(--b); }
.peak.a { background: var(--a); border-radius: 2px; }
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
  .cursor, .readout, .timeline > .roles { margin-left: 0; }
  .readout li { grid-template-columns: 5rem 1fr; }
  .readout li > .code:not(.quiet) { grid-column: 2; }
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
    --failed-bed: #fff; --frame: #eee; --bad-stripe: #e5b48a; }
  .cursor, .here { display: none; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  body { font-size: 10.5pt; }
  .card { border: 0; border-top: 1px solid var(--rule); border-radius: 0; padding: 1rem 0; }
  figure, tr, .headline, .card > header { break-inside: avoid; }
  h2, figcaption, caption { break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
  .pill { border: 1px solid currentColor; }
}
"""
