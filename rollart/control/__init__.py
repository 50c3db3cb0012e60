"""The control plane: decisions about integers and token lists. It awaits the data plane through handles only."""
