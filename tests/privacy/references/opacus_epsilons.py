"""Print what Opacus says that some mechanisms spend, as opacus_epsilons.json has it.

.venv-opacus/bin/python tests/privacy/references/opacus_epsilons.py   # Opacus 1.6.0
"""

import json

from opacus.accountants import PRVAccountant, RDPAccountant


MECHANISMS = [
    (4096 / 50_000, 3.0, 2468, 1e-5),
    (256 / 60_000, 1.1, 4000, 1e-5),
    (0.01, 1.0, 1000, 1e-6),
    (0.1, 5.0, 200, 1e-5),
    (1024 / 50_000, 2.0, 875, 1e-5),
]

rows = []
for sample_rate, noise_multiplier, steps, delta in MECHANISMS:
    row = {
        "sample_rate": sample_rate,
        "noise_multiplier": noise_multiplier,
        "steps": steps,
        "delta": delta,
    }
    for name, kind in (("rdp", RDPAccountant), ("prv", PRVAccountant)):
        accountant = kind()
        accountant.history = [(noise_multiplier, sample_rate, steps)]
        row[name] = accountant.get_epsilon(delta)
    rows.append(row)
print(json.dumps(rows, indent=1))
