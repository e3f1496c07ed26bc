"""All uses of JAX API that is private or still changes, so that a new JAX breaks only this package (``tests/test_compat.py``).

`jaxprs.py`       jaxprs and their equations: read
`calls.py`        equations that call a jaxpr: checkpoints, jits, functions with a derivative of their own
`effects.py`      what an equation does beside its outputs
`forwarding.py`   which outputs of a jaxpr are inputs, unchanged
`loops.py`        the trips of a loop, and what it carries
`evaluation.py`   equations and jaxprs: bind, rewrite, evaluate; the mesh axes that a trace may name
`primitives.py`   primitives of jaxpar's own
`memory.py`       device or host; the order of dims in memory; arrays without initial values, or not computed yet
`attention.py`    cuDNN's attention with what merges its parts
`backends.py`     the client of a run of several processes; devices for the compiler alone
`stages.py`       compiled functions
`versions.py`     faults of the installed version, and the names of XLA's flags
"""

from jax.core import Tracer
from jax.extend.core import Literal, Primitive
from jax.interpreters import partial_eval

from jaxpar._compat.attention import cudnn_attention, cudnn_attention_gradients
from jaxpar._compat.backends import (
    backend_errors,
    coordination,
    has_started,
    is_compile_only,
)
from jaxpar._compat.calls import called, constraint_of, inlined, is_remat
from jaxpar._compat.effects import has_reference_effects, has_side_effects
from jaxpar._compat.evaluation import (
    axes_named,
    bind,
    closure_converted,
    evaluate,
    rewrite,
    rewritten,
    trace_context,
)
from jaxpar._compat.forwarding import forwarded
from jaxpar._compat.jaxprs import (
    constants,
    digests_of_outputs,
    drawn_shapes,
    equations,
    inner_jaxprs,
    is_in_einsum,
    is_jaxpr,
    is_squeeze_of_user,
    linear_solve,
    literal_value,
    literals,
    opened,
    source_line,
    with_inner,
)
from jaxpar._compat.loops import has_known_trips, num_trips, scan_counts
from jaxpar._compat.memory import empty, is_computed, is_on_host, row_major
from jaxpar._compat.primitives import operation
from jaxpar._compat.stages import CompiledCopy
from jaxpar._compat.versions import (
    COND_COPIES_ON_GPU,
    EACH_KERNEL_ONCE,
    EMPTY_ARRAYS_CRASH,
    PIPELINED_ALL_GATHER,
)
