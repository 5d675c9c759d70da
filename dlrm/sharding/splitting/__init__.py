"""DES operator splitting: ranks exchange partial results of an operator instead of embeddings.

A head is a collection of tables with an operator over it (`head`). Sharded by `HeadSharder`, every rank
computes the operator's partial result for all samples from the tables, or parts of tables, that it owns, and
the partial results are summed on their way to the samples' ranks (`exchange`). No weight and no gradient of a
weight crosses the network.

Source: Rong et al., DES, arXiv 1909.04823.
"""
