"""Blocks of the fuzz test that an idle stage must skip: those that call the host, and a loop that never ends on zeros.

They read ``alive``, a 1 for each row, which nothing changes: another value is one that no microbatch has.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.fuzz.block import block

FLAG = jax.ShapeDtypeStruct(
    (), np.int32
)  # the threads that call the host do not see that float64 is enabled
MOST_TRIPS = 1000
ASKING = frozenset({"asks_host", "asks_host_back"})

of_no_microbatch = []


def on_host(alive):
    """Returns 1, and notes a value that no microbatch has. Were it to raise, the other devices would wait for this one."""
    alive = np.asarray(alive)
    if not (alive == 1).all():
        of_no_microbatch.append(alive)
    return np.int32(1)


def ask_host(alive):
    return jax.pure_callback(on_host, FLAG, alive, vmap_method="sequential")


@block(exact=True, needs=["alive"])
def asks_host(p, x):
    return x | {"h": x["h"] * ask_host(x["alive"]).astype(x["h"].dtype)}


@block(exact=True, needs=["alive"])
def tells_host(p, x):
    jax.debug.callback(on_host, x["alive"])
    return x


@jax.custom_vjp
def asking_back(h, alive):
    return h


asking_back.defvjp(
    lambda h, alive: (h, alive), lambda alive, ct: (ct * ask_host(alive).astype(ct.dtype), None)
)


@block(exact=True, needs=["alive"])
def asks_host_back(p, x):
    return x | {"h": asking_back(x["h"], x["alive"])}


@jax.custom_vjp
def telling_back(h, alive):
    return h


def _tell_back(alive, ct):
    jax.debug.callback(lambda alive, _: on_host(alive), alive, ct)
    return ct, None


telling_back.defvjp(lambda h, alive: (h, alive), _tell_back)


@block(exact=True, needs=["alive"])
def tells_host_back(p, x):
    return x | {"h": telling_back(x["h"], x["alive"])}


@block(exact=True, needs=["alive"])
def until_large(p, x):
    """Twice ``h``, after a loop that a 1 ends in three trips and a 0 never."""
    step = x["alive"].min()
    state = jax.lax.while_loop(
        lambda s: (s[0] < 3) & (s[1] < MOST_TRIPS), lambda s: (s[0] + step, s[1] + 1), (0, 0)
    )
    return x | {"h": jnp.where(state[1] == 3, 2 * x["h"], jnp.asarray(jnp.nan, x["h"].dtype))}
