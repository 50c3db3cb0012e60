"""The data plane: workers that hold models, environments, rewards and weights. Knows nothing of control."""
