"""How the report looks: the page's HTML and its style; `report_html` escapes what fills the `$places`."""

from string import Template
from typing import Final

STYLE: Final = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5b6670; --paper: #fdfdfb; --line: #dcdfe2;
  --tint: #f1f3f4; --link: #0b5cad; --good: #1a6e37; --bad: #a8281c; --half: #8a5a00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6e8; --soft: #a0a9b1; --paper: #16191c; --line: #343a40; --tint: #20252a;
    --link: #7db8f0; --good: #7fce98; --bad: #f0938a; --half: #e2b866; }
}
body { margin: 0 auto; max-width: 54rem; padding: 2rem 1.25rem 6rem;
  background: var(--paper); color: var(--ink);
  font: 1.0625rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1, h2, h3 { line-height: 1.25; }
h1 { margin-bottom: 0.25rem; }
h2 { margin-top: 3.5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { margin: 1.75rem 0 0.5rem; font-size: 1.0625rem; }
a { color: var(--link); }
code { font: 0.875em ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: break-word; }
details code { overflow-wrap: anywhere; }
.soft, figcaption, small { color: var(--soft); }
nav ol { padding-left: 1.5rem; }
nav li { margin: 0.2rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9375rem; line-height: 1.45;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.75rem 0.4rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
.met { color: var(--good); } .missed { color: var(--bad); font-weight: 600; } .part { color: var(--half); }
figure { margin: 1.5rem 0; }
figure img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
details { margin-top: 1rem; padding: 0.5rem 0.9rem; background: var(--tint); border-radius: 4px; }
summary { cursor: pointer; }
.unfinished { padding: 0.5rem 0.9rem; border-left: 4px solid var(--half); background: var(--tint); }
@media print { details { background: none; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
"""

PAGE: Final = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header>
<h1>$title</h1>
<p class="soft">$introduction</p>
</header>
<nav aria-label="Contents">
<h2 id="contents">Contents</h2>
<ol>
$contents
</ol>
</nav>
<main>
$sections
</main>
</body>
</html>
"""
)

SECTION: Final = Template(
    """<section id="$name">
<h2>$title</h2>
$body
</section>"""
)

TABLE: Final = Template(
    """<div class="scroll"><table>
<thead><tr>$header</tr></thead>
<tbody>
$rows
</tbody>
</table></div>"""
)

PICTURE: Final = Template(
    """<figure>
<img alt="$alt" src="data:image/png;base64,$data">
<figcaption>$caption</figcaption>
</figure>"""
)

DETAILS: Final = Template(
    """<details>
<summary>$summary</summary>
$body
</details>"""
)
