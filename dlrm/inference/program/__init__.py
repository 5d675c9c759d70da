"""Exports a trained model as a program that torch alone can run, with whole tables inside.

`saved` puts a saved state together as a model that is not sharded, `tables` holds the rows of its tables,
`tracing` makes the program, `metadata` says what its inputs are, and `exporting` writes all of it.
"""
