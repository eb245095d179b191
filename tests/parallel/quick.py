"""Imported by the scripts here: as strict as tests are, and without what takes time."""

import jax

from switch import FULL, share_contexts
from tanager import measures
from tanager.clipping.planning.autotune import Timings
from tanager.report import run_figures


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
share_contexts()
if not FULL:
    Timings.measure = lambda *arguments, **options: False
    measures.RESAMPLES = 10  # pyrefly: ignore[bad-assignment]
    run_figures.curves = lambda *arguments: ""  # pyrefly: ignore[bad-assignment]
