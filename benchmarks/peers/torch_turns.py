"""What `extraction` and `last_layer` hold tanager against, in PyTorch's environment.

Started by them. The first line of input says what to prepare; each other line is one
turn, and is answered by a line: the seconds it took, wall and processor, and what else
is known.
"""

import json
import os
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch


class Features:
    """A network of timm in inference, fed with the same noise again and again."""

    def __init__(self, model: str, side: int):
        import timm

        network = timm.create_model(model, pretrained=False, num_classes=0)
        self.network = network.eval().to(memory_format=torch.channels_last)
        self.side = side
        self.ready: dict[tuple[int, bool], Any] = {}

    def turn(self, images: int, rows: int, frozen: bool) -> dict[str, Any]:
        """Compute the features of images, `rows` at once."""
        rows = min(rows, images)
        with torch.inference_mode():
            if (rows, frozen) not in self.ready:
                self.ready[rows, frozen] = self._prepared(rows, frozen)
            network, batch = self.ready[rows, frozen]
            started, processor = time.perf_counter(), time.process_time()
            for _ in range(images // rows):
                network(batch)
            if rest := images % rows:
                network(batch[:rest])
            return _since(started, processor)

    def _prepared(self, rows: int, frozen: bool) -> tuple[Any, torch.Tensor]:
        batch = torch.randn(rows, 3, self.side, self.side)
        batch = batch.contiguous(memory_format=torch.channels_last)
        network = self.network
        if frozen:
            network = torch.jit.freeze(torch.jit.trace(network, batch))
        for _ in range(3):  # a frozen network is optimised in its first calls
            network(batch)
        return network, batch


class Head:
    """A linear layer by Opacus: all examples in every step, in physical batches."""

    def __init__(
        self,
        files: dict[str, str],
        noise_multiplier: float,
        learning_rate: float,
        momentum: float,
        rows: int,
        seed: int,
    ):
        from opacus import PrivacyEngine
        from opacus.utils.batch_memory_manager import BatchMemoryManager

        torch.manual_seed(seed)
        with np.load(files["training"]) as data:
            x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"]).long()
        with np.load(files["test"]) as data:
            self.test = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
        module = torch.nn.Linear(x.shape[1], int(y.max()) + 1, bias=False)
        torch.nn.init.zeros_(module.weight)
        examples = torch.utils.data.TensorDataset(x, y)
        module, optimizer, loader = PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(
                module.parameters(), learning_rate, momentum=momentum
            ),
            data_loader=torch.utils.data.DataLoader(examples, batch_size=len(x)),
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
        self.module, self.optimizer = module, optimizer
        self.batches = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=rows, optimizer=optimizer
        )

    def turn(self, steps: int) -> dict[str, Any]:
        """Make steps, and look at the test examples."""
        started, processor = time.perf_counter(), time.process_time()
        with self.batches as loader:
            for _ in range(steps):
                for x, y in loader:
                    self.optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(self.module(x), y).backward()
                    self.optimizer.step()
        x, y = self.test
        with torch.inference_mode():
            right = self.module._module(x).argmax(1) == y
        accuracy = right.float().mean().item()
        return {"accuracy": accuracy, **_since(started, processor)}


def _since(started: float, processor: float) -> dict[str, float]:
    return {
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - processor,
    }


def main() -> None:
    """Answer until there is no more to do."""
    warnings.filterwarnings("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    kind, options = json.loads(sys.stdin.readline())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    worker = {"features": Features, "head": Head}[kind](**options)
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        found = worker.turn(**json.loads(line))
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
