"""The data plane: work on tensors and in processes, behind the handles that the control plane calls."""
