"""Training data: rows in an order determined by a seed, and text as tokens.

`batches.py` determines the rows of a step. They come from `text.py` (windows of one long text), from `packing.py` (documents
packed into rows), from `records.py` (rows read from disk by number) or from a `mixture.py` of them. `corpus.py` gives
documents: examples (`examples.py`, `forms.py`) of files (`readers.py`), as tokens (`tokenizer.py`) that are stored once
(`token_cache.py`).
"""
