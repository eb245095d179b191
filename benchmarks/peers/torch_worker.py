"""PyTorch without privacy, Opacus, and what is built like it, one system a process."""

import sys

import numpy as np
import protocol
import torch
import torch_models
from torch import nn


class TorchWorker(protocol.Worker):
    """SGD as everyone writes it; the base of the private ones."""

    def __init__(self, system, work):
        super().__init__(system, work)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.classes = work["classes"]
        self.model_name = work["model"]
        self.layout = torch.contiguous_format
        if system.endswith(":nhwc"):
            self.layout = torch.channels_last
        self.learning_rate, self.expected_batch = 0.1, self.rows
        self.noise_multiplier = 0.0

    def compute_in(self, precision):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"

    def precision(self):
        products = torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32 == products
        return "tf32" if products else "float32"

    def build(self):
        model = torch_models.create(
            self.model_name, self.classes, self.images.shape[1:]
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                own = torch_models.name_of(name, model)
                value = torch_models.to_torch(self.initial[own])
                if torch_models.is_transposed(name, value):
                    value = value.T
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))
        self.module = model.to(self.device).train()
        if self.images.ndim == 4:
            self.module = self.module.to(memory_format=self.layout)
        self.names = {
            name: torch_models.name_of(name, model)
            for name, _ in model.named_parameters()
        }
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.module.parameters(), self.learning_rate)
        self.batch = self._to_device(self.images[: self.rows], self.labels[: self.rows])
        self.make_private()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def make_private(self):
        """Wrap model, criterion and optimizer as the library wants it."""

    def _to_device(self, images, labels):
        x = torch.from_numpy(images).to(self.device)
        if x.ndim == 4:
            x = x.permute(0, 3, 1, 2).contiguous(memory_format=self.layout)
        return x, torch.from_numpy(labels).long().to(self.device)

    def _wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def losses(self):
        images, labels = (part[:8] for part in self.batch)
        with torch.no_grad():
            found = nn.functional.cross_entropy(
                self.plain(images), labels, reduction="none"
            )
        return found.cpu().numpy()

    @property
    def plain(self):
        """The model as it was written."""
        return self.module

    def step(self):
        images, labels = self.batch
        self.optimizer.zero_grad()
        self.criterion(self.module(images), labels).backward()
        self.optimizer.step()
        self._wait()

    def logical(self, images, labels):
        self.optimizer.param_groups[0]["lr"] = self.learning_rate
        self.optimizer.zero_grad()
        for start in range(0, len(images), self.rows):
            part = slice(start, start + self.rows)
            x, y = self._to_device(images[part], labels[part])
            loss = self.criterion(self.module(x), y)
            (loss * (len(y) / self.expected_batch)).backward()
        self.optimizer.step()
        self._wait()

    def clipped_sum(self):
        raise NotImplementedError("this system does not clip")

    def _named(self, values):
        found = {}
        for name, value in values.items():
            array = value.detach().cpu().numpy()
            if torch_models.is_transposed(name, array):
                array = array.T
            found[self.names[name]] = torch_models.from_torch(array)
        return found

    def parameters(self):
        return self._named(dict(self.plain.named_parameters()))

    def logits(self, images):
        with torch.no_grad():
            x, _ = self._to_device(images, np.zeros(len(images), np.int64))
            return self.plain(x).cpu().numpy()

    def device_peak(self):
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return None

    def versions(self):
        return {"torch": torch.__version__, "threads": str(torch.get_num_threads())}


class OpacusWorker(TorchWorker):
    """Opacus, as its BatchMemoryManager drives it: virtual steps, then a real one."""

    def make_private(self):
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import (
            DPLossFastGradientClipping,
        )

        mode = self.system.split(":")[1]
        if mode == "ghost":
            from opacus.grad_sample import GradSampleModuleFastGradientClipping

            self.module = GradSampleModuleFastGradientClipping(
                self.module, max_grad_norm=self.clip_norm, use_ghost_clipping=True
            )
        else:
            from opacus.grad_sample import GradSampleModule

            self.module = GradSampleModule(
                self.module, force_functorch=mode == "functorch"
            )
        kind = DPOptimizerFastGradientClipping if mode == "ghost" else DPOptimizer
        self.optimizer = kind(
            self.optimizer,
            noise_multiplier=1.0,
            max_grad_norm=self.clip_norm,
            expected_batch_size=self.rows,
        )
        if mode == "ghost":
            self.criterion = DPLossFastGradientClipping(
                self.module, self.optimizer, self.criterion
            )

    @property
    def plain(self):
        return self.module._module

    def _accumulate(self, images, labels, last):
        self.optimizer.signal_skip_step(do_skip=not last)
        self.criterion(self.module(images), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def losses(self):
        self.module.disable_hooks()
        found = super().losses()
        self.module.enable_hooks()
        return found

    def logits(self, images):
        self.module.disable_hooks()
        found = super().logits(images)
        self.module.enable_hooks()
        return found

    def step(self):
        self._accumulate(*self.batch, last=False)
        self._wait()

    def logical(self, images, labels):
        self.optimizer.noise_multiplier = self.noise_multiplier
        self.optimizer.expected_batch_size = self.expected_batch
        self.optimizer.param_groups[0]["lr"] = self.learning_rate
        self._clear()
        starts = list(range(0, len(images), self.rows))
        for start in starts:
            part = slice(start, start + self.rows)
            batch = self._to_device(images[part], labels[part])
            self._accumulate(*batch, last=start == starts[-1])
        self._wait()

    def _clear(self):
        self.optimizer.signal_skip_step(do_skip=False)
        self.optimizer.zero_grad()
        self.optimizer._step_skip_queue.clear()
        self.optimizer._is_last_step_skipped = False
        for parameter in self.optimizer.params:
            parameter.summed_grad = None

    def clipped_sum(self):
        self._clear()
        self._accumulate(*self.batch, last=False)
        return self._named(
            {name: p.summed_grad for name, p in self.plain.named_parameters()}
        )

    def versions(self):
        import opacus

        return super().versions() | {"opacus": opacus.__version__}


class EngineWorker(TorchWorker):
    """FastDP or private_vision: an engine attached to the optimizer.

    private_vision is given per-example losses in a virtual step, which adds up clipped
    gradients as Opacus does. FastDP clips and adds noise within `backward`.
    """

    def make_private(self):
        self.library, mode = self.system.split(":")[:2]
        options = {
            "batch_size": self.rows,
            "sample_size": 50_000,
            "epochs": 1,
            "max_grad_norm": self.clip_norm,
            "noise_multiplier": 1.0,
        }
        if self.library == "fastdp":
            from fastDP import PrivacyEngine

            options |= {"clipping_mode": mode, "clipping_fn": "Abadi"}
        else:
            from private_vision import PrivacyEngine

            options |= {"ghost_clipping": True, "mixed": mode == "mixed"}
        self.engine = PrivacyEngine(self.module, **options)
        self.engine.attach(self.optimizer)

    def losses(self):
        self.module.eval()  # their hooks watch training alone
        found = super().losses()
        self.module.train()
        return found

    def step(self):
        images, labels = self.batch
        if self.library == "fastdp":
            self.criterion(self.module(images), labels).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            output = self.module(images)
            each = nn.functional.cross_entropy(output, labels, reduction="none")
            self.optimizer.virtual_step(loss=each)
        self._wait()

    def logical(self, images, labels):
        raise NotImplementedError("not measured: logical batches")

    def clipped_sum(self):
        if self.library == "fastdp":
            raise NotImplementedError("FastDP gives no sum without its noise")
        for parameter in self.module.parameters():
            if hasattr(parameter, "summed_grad"):
                del parameter.summed_grad
        self.step()
        named = self.module.named_parameters()
        return self._named({name: value.summed_grad for name, value in named})


def make(system, work):
    """Return the worker of a system."""
    library = system.split(":")[0]
    kinds = {
        "torch-sgd": TorchWorker,
        "opacus": OpacusWorker,
        "fastdp": EngineWorker,
        "private-vision": EngineWorker,
    }
    return kinds[library](system, work)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    protocol.serve(make)
