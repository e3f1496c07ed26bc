"""The backward pass of a layer: what it costs in memory, and how it is cut.

`graph.py` makes a traced function a graph of operations; `split.py` traces a layer and its vjp so, and gives its forward pass,
B and W as functions; `min_cut.py` finds what must be stored between them; `min_cut_remat.py` makes of them a layer that can be
differentiated as any other, and stores as little. `remat.py` names the policies of recomputation. `partition.py` tells which
collectives a cut over devices adds to a graph, for the planner.
"""
