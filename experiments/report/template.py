"""The HTML and the style of the report's page; `html` escapes what fills the `$places`."""

from string import Template
from typing import Final

STYLE: Final = """
:root { color-scheme: light dark; --soft: #5b6670; --line: #dcdfe2; --tint: #f1f3f4; }
@media (prefers-color-scheme: dark) { :root { --soft: #a0a9b1; --line: #343a40; --tint: #20252a; } }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 6rem; font: 1rem/1.6 system-ui, sans-serif; }
h2 { margin-top: 3.5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
code { font: 0.875em ui-monospace, monospace; overflow-wrap: anywhere; }
.soft, figcaption, small, th { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9375rem; line-height: 1.45; }
th, td { padding: 0.4rem 0.75rem 0.4rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
figure { margin: 1.5rem 0; }
figure img { display: block; max-width: 100%; height: auto; background: #fff; }
details { margin-top: 1rem; padding: 0.5rem 0.9rem; background: var(--tint); }
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
