"""Reads the rows of CSV, TSV, JSON lines and Parquet files in blocks of bounded size."""
