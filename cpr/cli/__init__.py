"""The `cpr` command and its subcommands, which `main` lists."""

from cpr.cli.main import entry

__all__ = ["entry"]
