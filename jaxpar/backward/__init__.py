"""The backward pass of a layer: what it stores, and how it is split into B and W.

`graph.py` turns a traced function into a graph of operations, and removes transposes of matrix products. `split.py` traces a
layer and its vjp into one graph, and splits it into functions: the forward pass, B and W. `min_cut.py` finds which values to
store between them. `order.py` finds an order for GPUs in which collectives over ``tensor`` have products beside them, and
`passes.py` runs the functions in it. `remat.py` combines them to a layer with the same derivatives that stores fewer bytes, and
names the policies of rematerialisation. `add_grads.py` adds the gradients of a lookup to its rows alone. `padded_dims.py` with
`padded_values.py` keeps a padded vocabulary in place from the head to the gradients, while the loss sees its words.
`partition.py` finds how a sharding over ``tensor`` divides the values of a graph, by the rules of `cut_rules.py` and, in loops
and branches, of `bodies.py`, for the bytes that `min_cut.py` counts, and the collectives that it needs, for the planner.
`products.py` counts the operations of matrix products and convolutions.
"""
