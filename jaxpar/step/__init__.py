"""One step: from the settings of a run to the gradients of a batch, and the state of the optimizer.

`settings.py` has the settings of a run: where its arrays live, and its pipeline. `plan.py` decides for params of given shapes
which program computes their gradients, and `sharding.py` how they are sharded meanwhile. `run.py` runs the plan on each shard
of the mesh: a pipeline (`jaxpar/pipeline/`), or `microbatches.py`, which takes `jax.vjp` of one microbatch after another, with
the layers of `vjp_layers.py` where these exchange params or gradients with other replicas. `optimizer_state.py` has the
shardings of the optimizer's state and the calls of the optimizer; `state_checks.py` checks that a state has those of its step,
and `packed_optimizers.py` that an optimizer makes the same of layers which a pipeline has in another order.

`checks.py` refuses params and batches that do not fit before anything is compiled. `traced_loss.py` traces model and loss, for
operations that cannot run on the mesh and for the weight of a batch, and `unread.py` finds the params that outputs do not
depend on. `loss_checks.py` checks what a loss returns, `row_checks.py` that no row depends on others and that the loss is a sum
over them, `position_checks.py` the same of positions over `context`, `purity.py` that model and loss have the same numbers in
each trace. `split_check.py` measures on a device what these prove from traces.
"""
