"""The data plane: worker processes and what runs inside them."""
