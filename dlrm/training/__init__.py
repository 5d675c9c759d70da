"""The training run: from a configuration to a built model, the training loop and the evaluation."""
