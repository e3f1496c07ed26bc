"""One step: from the settings of a run to the gradients of a batch.

`plan.py` decides for params of given shapes which program computes their gradients, and `sharding.py` how they are sharded
meanwhile. `checks.py` refuses params and batches that do not fit. `run.py` runs the plan on each shard of the mesh: a pipeline
(`jaxpar/pipeline/`), or `microbatches.py`, which takes `jax.vjp` of one microbatch after another, with the layers of
`vjp_layers.py` where these exchange params or gradients with other replicas.
"""
