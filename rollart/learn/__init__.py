"""The maths of learning: advantages (pure Python), batching and losses (torch).

Importing this package imports no torch; only `batching` and `loss` do. What it leaves out: the model and the
optimizer (`data/trainers`).
"""
