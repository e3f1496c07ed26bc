"""Training data: rows in an order determined by a seed, and text as tokens.

`batches.py` determines the rows of a step, also of a mixture of sources. They come from `text.py` (windows of one long text;
tokenizers), from `packing.py` (documents packed into rows), from `records.py` (rows read from disk by number) or from
`recall.py` (rows made for a test of the far past). `corpus.py` gives documents: examples (`examples.py`) of files
(`readers.py`; lists of `json_text.py`, a value at a time), of several forms (`forms.py`), as tokens that are stored once;
`left_out.py` finds messages that a chat template does not write, `unused_fields.py` fields of them, and `tool_arguments.py`
reads the arguments of calls in them.

`checksums.py` and `same_batch.py` let the processes of a run compare what they read. `csv_columns.py` reads columns of numbers,
`digits.py` the handwritten digits of scikit-learn.
"""
