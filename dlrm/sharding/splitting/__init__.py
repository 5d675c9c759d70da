"""DES operator splitting: ranks send partial results instead of embeddings, and get the same numbers.

Weights-rich operators are made into heads (`head`): a collection of tables and the operator over it. Sharded
by `HeadSharder`, every rank computes the operator's partial result for all samples from the tables, or the
parts of tables, that it owns; the partial results are summed on their way to the samples' own ranks
(`exchange`). No weight and no gradient of a weight crosses the network.

Source: Rong et al., DES, arXiv 1909.04823.
"""
