"""RollArt: disaggregated multi-task agentic reinforcement learning."""

__version__ = "0.1.0"
