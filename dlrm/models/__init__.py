"""The models: DLRM, DCN-v2, DeepFM, factorization machine and logistic regression (`models.build`)."""
