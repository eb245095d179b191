"""What runs, searches and audits leave, as the pages read it."""

import numpy as np


RESULT = {
    "private": True,
    "epsilon": 2.99999,
    "epsilon_rdp": 3.4,
    "delta": 1e-5,
    "adjacency": "zero-out",
    "accountant": "pld",
    "sample_rate": 0.02,
    "noise_multiplier": 1.5,
    "clip_norm": 1.0,
    "steps": 20,
    "examples": 50_000,
    "batch_size": 1000,
    "risk": {
        "tpr_at_0_1_percent": 0.012301,
        "tpr_at_1_percent": 0.0679,
        "advantage": 0.3,
        "mu": 0.77001,
        "regret": 0.0123,
    },
    "test_accuracy": 0.7,
    "test_accuracy_ema": 0.75,
    "per_class": [
        {"class": "cat", "examples": 10, "accuracy": 0.5, "accuracy_ema": 0.25},
        {"class": "d|og*", "examples": 20, "accuracy": 0.9, "accuracy_ema": 1.0},
        {"class": "emu", "examples": 0, "accuracy": None, "accuracy_ema": None},
    ],
    "versions": {"dp-accounting": "0.6.0", "jax": "0.10.2"},
}

STUDY = {
    "recipe": "digits",
    "target": {"epsilon": 2.336, "delta": 1e-5, "steps": 400},
    "best": {
        "trial": 1,
        "values": {"learning_rate": 0.5, "model": "<b>"},
        "accuracy": 0.5,
        "batch_size": 16,
    },
    "prediction": None,
    "law": None,
    "bands": [],
    "trials": [
        {
            "number": 0,
            "values": {"learning_rate": 2.0},
            "state": "pruned",
            "steps": 200,
            "accuracy": 0.25,
        },
        {
            "number": 1,
            "values": {"learning_rate": 0.5, "model": "<b>"},
            "state": "complete",
            "steps": 400,
            "accuracy": 0.5,
        },
    ],
    "cost": {"trials_share": 0.03125, "winner_share": 0.5, "seconds": 120.0},
    "privacy": {
        "simulations_epsilon": {"8": None, "16": 11435.75, "32": 2e9, "64": 403.39},
        "held_out_examples": 2000,
    },
}


def audit(models=600):
    """Content of audit.json."""
    rng = np.random.default_rng(0)
    return {
        "recipe": "digits <&>",
        "method": "membership",
        "claimed_epsilon": 8.0,
        "delta": 0.01,
        "highest_advantage": 0.999,
        "mechanism": {
            "sample_rate": 0.64,
            "noise_multiplier": 1.9,
            "steps": 50,
            "adjacency": "zero-out",
        },
        "epsilon_lower_bound": 2.0,
        "trade_off_bound": 5.0,
        "confidence": 0.999,
        "violated": False,
        "models": 1200,
        "auc": 0.9,
        "advantage": 0.6,
        "setting": {"canary": "blank", "steps": 50},
        "tried": [],
        "threshold": 0.5,
        "errors": {
            "false_positives": 3,
            "outside": 540,
            "false_negatives": 200,
            "inside": 540,
        },
        "scores": {
            "inside": rng.normal(1, 1, models).tolist(),
            "outside": rng.normal(0, 1, models).tolist(),
        },
    }
