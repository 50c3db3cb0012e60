"""The resource plane: where things run."""
