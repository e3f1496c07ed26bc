"""The backward pass of a layer: what it costs in memory, and how it is cut.

`split.py` traces a layer and its vjp, and gives its forward pass, B and W as functions; `cut.py` finds what must be stored
between them; `storing.py` makes of them a layer that can be differentiated as any other, and stores as little.
"""
