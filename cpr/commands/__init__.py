"""The commands of `cpr`, by what they deal with; `cpr.cli` lists them."""
