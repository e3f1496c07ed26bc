"""The backward pass of a layer: what it stores, and how it is split into B and W.

`graph.py` turns a traced function into a graph of operations. `split.py` traces a layer and its vjp into one graph, and splits
it into functions: the forward pass, B and W. `min_cut.py` finds which values to store between them. `min_cut_remat.py` combines
them to a layer with the same derivatives that stores fewer bytes. `remat.py` names the policies of rematerialisation.
`fold_transposes.py` removes transposes of matrix products, and `add_grads.py` adds the gradients of a lookup to its rows alone.
`partition.py` finds the collectives that sharding adds to a graph, for the planner, by `partition_rules.py`.
"""
