"""The page `report.html` of a run: what it has recorded of its progress, its saves and its failures."""
