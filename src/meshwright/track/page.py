"""The report's page: style and script in it, nothing fetched. `string.Template` fills the names after a dollar sign."""

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1c1f23; --soft: #5c636b; --line: #e3e3df; --rule: #ecece9;
  --train: #2b62c4; --faint: #a9c1ec; --validation: #b8500f; --code: #f3f3f0;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "Liberation Mono", monospace;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #131518; --card: #1b1e22; --ink: #e8e9ea; --soft: #9ba3ac; --line: #2d3137; --rule: #2b3036;
    --train: #7fabf5; --faint: #42609a; --validation: #f0965a; --code: #22262b;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 var(--sans); }
main { max-width: 1080px; margin: 0 auto; padding: 48px 24px 32px; }
header { margin-bottom: 28px; }
header p { margin: 0; color: var(--soft); font-size: 13px; font-weight: 600; letter-spacing: .02em; }
h1 { margin: 2px 0 8px; font-size: 32px; line-height: 1.2; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { margin: 40px 0 14px; font-size: 19px; letter-spacing: -.01em; }
h3 { margin: 0 0 6px; font-size: 13px; font-weight: 600; color: var(--soft); }
header ul { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 0; padding: 0; list-style: none;
  color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(186px, 1fr)); gap: 14px 28px; margin: 0 0 28px;
  padding: 20px 24px; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 0; font-size: 25px; line-height: 1.25; font-weight: 600; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.tiles div:first-child dd { color: var(--validation); }
dd small { display: block; color: var(--soft); font-size: 12.5px; font-weight: 400; letter-spacing: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(290px, 1fr)); gap: 16px; }
figure { position: relative; margin: 0; padding: 16px 20px 12px 16px; background: var(--card);
  border: 1px solid var(--line); border-radius: 10px; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 20px; justify-content: space-between; margin: 0 0 14px 4px;
  font-weight: 600; font-size: 14px; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 0 16px; color: var(--soft); font-weight: 400; font-size: 13px; }
.legend span::before { content: ""; display: inline-block; width: 16px; margin-right: 6px; vertical-align: middle;
  border-top: 2.5px solid var(--tone); }
.train { --tone: var(--train); } .validation { --tone: var(--validation); } .faint { --tone: var(--faint); }
.plot { display: flex; height: 150px; margin-bottom: 26px; }
.wide .plot { height: 330px; }
.y, .x { color: var(--soft); font-size: 11.5px; line-height: 1; font-variant-numeric: tabular-nums; }
.y { position: relative; flex: none; width: 50px; }
.y span { position: absolute; right: 9px; transform: translateY(-50%); white-space: nowrap; }
.area { position: relative; flex: 1; min-width: 0; }
.area svg { display: block; width: 100%; height: 100%; overflow: hidden; }
.x { position: absolute; left: 0; right: 0; top: 100%; }
.x span { position: absolute; top: 8px; transform: translateX(-50%); white-space: nowrap; }
path { fill: none; stroke: var(--tone); vector-effect: non-scaling-stroke; stroke-linejoin: round;
  stroke-linecap: round; }
path.rule { stroke: var(--rule); stroke-width: 1; }
path.faint { stroke-width: 1; } path.line { stroke-width: 1.4; } .wide path.line { stroke-width: 2; }
path.dots { stroke-width: 7; }
.note { margin: 4px; color: var(--soft); font-size: 12.5px; }
.cross { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); pointer-events: none; }
.tip { position: absolute; top: 6px; z-index: 1; padding: 6px 10px; background: var(--card); color: var(--ink);
  border: 1px solid var(--line); border-radius: 6px; box-shadow: 0 2px 10px rgb(0 0 0 / .14); font-size: 12.5px;
  white-space: nowrap; pointer-events: none; font-variant-numeric: tabular-nums; }
.tip b { display: block; font-weight: 600; }
.tip span::before { content: ""; display: inline-block; width: 8px; height: 8px; margin-right: 6px; border-radius: 4px;
  background: var(--tone); }
.tip span { display: block; }
pre { margin: 0; padding: 14px 16px; background: var(--code); border-radius: 8px; font: 13px/1.5 var(--mono);
  white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4; }
pre i { font-style: normal; color: var(--train); }
.sample { margin-bottom: 16px; }
details { margin-top: 16px; }
summary { cursor: pointer; color: var(--train); font-weight: 600; font-size: 14px; margin-bottom: 12px; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 0 5px 28px; text-align: right; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { padding-left: 0; }
footer { margin-top: 40px; color: var(--soft); font-size: 13px; }
@media (max-width: 560px) {
  main { padding: 28px 14px 24px; } h1 { font-size: 26px; }
  .tiles { grid-template-columns: repeat(2, 1fr); gap: 14px 16px; padding: 16px; } dd { font-size: 21px; }
  figure { padding: 14px 14px 10px 8px; } .wide .plot { height: 240px; } .y { width: 44px; }
  th, td { padding-left: 14px; }
}
@media print {
  body { background: none; } main { max-width: none; padding: 0; }
  figure, .sample, .tiles { break-inside: avoid; } h2 { break-after: avoid; }
}
"""

_SCRIPT = """
for (const figure of document.querySelectorAll("figure")) {
  const json = figure.querySelector("script"), area = figure.querySelector(".area");
  if (!json) continue;
  const data = JSON.parse(json.textContent), make = (kind, name, text) => {
    const one = document.createElement(kind);
    one.className = name;
    one.textContent = text;
    return one;
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return x - xs[low] < xs[high] - x ? low : high;
  };
  const cross = make("div", "cross", ""), tip = make("div", "tip", "");
  const hide = () => { cross.remove(); tip.remove(); };
  area.addEventListener("pointerleave", hide);
  area.addEventListener("pointermove", event => {
    const box = area.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    const first = data.series[0], x = first.xs[nearest(first.xs, share * data.x_end)], at = x / data.x_end;
    const lines = data.series.map(one => {
      const point = nearest(one.xs, x), y = one.ys[point];
      const where = one.xs[point] === x ? "" : " (step " + one.xs[point].toLocaleString("en") + ")";
      const value = y === null ? "not finite" : y.toLocaleString("en", {maximumSignificantDigits: 5});
      return make("span", one.css, (data.series.length > 1 ? one.name + " " : "") + value + where);
    });
    tip.replaceChildren(make("b", "", "step " + x.toLocaleString("en")), ...lines);
    cross.style.left = 100 * at + "%";
    tip.style.left = at < .5 ? "calc(" + 100 * at + "% + 12px)" : "auto";
    tip.style.right = at < .5 ? "auto" : "calc(" + 100 * (1 - at) + "% + 12px)";
    area.append(cross, tip);
  });
}
"""

PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>$name · Meshwright</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<header><p>Meshwright run</p><h1>$name</h1><ul>$facts</ul></header>
<dl class="tiles">$tiles</dl>
<section class="charts" aria-label="Charts">$charts</section>
$evaluations
$samples
<section><h2>Run file</h2><pre>$run_file</pre></section>
<footer>Steps count from the start of training. Losses are $losses.</footer>
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""
