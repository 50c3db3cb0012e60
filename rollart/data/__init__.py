"""The data plane: workers that generate, act, score and train, and the runtimes that host them."""
