"""Runs the script that is its first argument, with the others as the script's own.

Without measuring how to clip, which takes time. Started by `Fork.computing`.
"""

import runpy
import sys

from switch import share_contexts
from tanager.clipping.planning.autotune import Timings


share_contexts()
Timings.measure = lambda *arguments, **options: False
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
