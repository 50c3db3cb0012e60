"""What a weight store is made of: buckets as bytes, checksums, differences between versions, and where bytes lie.

`data/weights.py` puts these together; a new place for weights is one file here that follows `shelf.Shelf`.
"""
