"""The `cpr` command, and its subcommands by what they deal with; `main` lists them."""

from cpr.cli.main import entry

__all__ = ["entry"]
