"""`python -m cpr.cli`: the `cpr` command without its entry point."""

import sys

from cpr.cli.main import entry

sys.exit(entry())
