"""Settings from outside the program that can change how a sum is rounded."""

import os
import re

import jax


_PREFIXES = (
    *("XLA_", "JAX_", "PJRT_", "LIBTPU_", "TPU_", "TF_", "NPROC"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "EIGEN", "DNNL_", "ONEDNN_"),
    *("CUDA_", "CUDNN_", "CUBLAS_", "NCCL_", "NVIDIA_", "ROCM_", "HIP_"),
)
# They name files, logs, peers, secrets, or which of several equal devices to use.
_HARMLESS_VARIABLE = re.compile(
    r"CACHE|LOG|TRACEBACK|TOKEN|SECRET|PASSWORD|_KEY$|_DIR$|_PATH$|_HOME$"
    r"|ADDRESS|_PORT$|_ID$|HOSTNAME|VISIBLE_DEVICES"
)
_HARMLESS_SETTING = re.compile(
    r"cache|log|dump|trace|debug|report|warn|pprint|source|location|error"
    r"|address|timeout|distributed|preemption|recoverability|async|guard|leak"
    r"|visible_devices"
)


def variables() -> dict[str, str]:
    """Return the environment variables that XLA and its libraries may compute by.

    NPROC, for instance, sets how many threads XLA divides a sum among.
    """
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) and not _HARMLESS_VARIABLE.search(name)
    }


def jax_settings() -> dict[str, str]:
    """Return the settings of JAX that may change what is computed."""
    return {
        name: str(getattr(jax.config, name, None))
        for name in sorted(jax.config.values)
        if not _HARMLESS_SETTING.search(name)
    }
