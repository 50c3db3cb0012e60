"""The trainer on Megatron-Core, room by room. This file leaves all of it out, so that names cost no heavy import.

- `trainer`: the trainer itself, what is published and kept
- `learner`: scoring and training of micro-batches
- `holding`: transformers' weights as parts that ranks hold
- `names`: transformers' names and Megatron's, both ways
- `words`: a model's config in Megatron's words
- `place`, `stage`, `layers`, `adam`: a rank's place, its part of a model and of the optimizer; these import Megatron
- `context`, `vocabulary`: sequences and logits that ranks share
"""
