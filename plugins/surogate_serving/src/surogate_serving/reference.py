"""The model that a run has written, computed by transformers in this process, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from surogate import run
from surogate.checkpoints.export_source import Found
from surogate.hub.config_json import QUANTIZATION, read_config
from surogate.hub.files import WEIGHT_FILES
from surogate.machine.system import available_memory_bytes
from surogate.outputs.check_process import quiet
from surogate.runs.run import named_model
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import GIB
from surogate_core.plugins.registry import Registry

from .connection import shown
from .rounding import DTYPES, Errors

_MORE: Final = 1.3
"""Bytes of memory for a byte of weights: weights, and what one conversation needs."""


class Reference:
    """A causal language model. It may be changed, for the error that is expected of a right server."""

    def __init__(self, folder: Path, loaded_by: str, dtype: str = "auto") -> None:
        self._folder, self._loaded_by = folder, loaded_by
        self.model = self._loaded(dtype)
        self.dtype = str(self.model.dtype).removeprefix("torch.")

    def _loaded(self, dtype: str) -> Any:
        cls = getattr(transformers, self._loaded_by)
        try:
            with quiet():
                return cls.from_pretrained(
                    self._folder, local_files_only=True, dtype=dtype, trust_remote_code=False
                ).eval()
        except Exception as error:  # libraries raise exceptions of many types
            reason = " ".join(str(error).split()) or type(error).__name__
            quantized = read_config(self._folder).get(QUANTIZATION)
            remedy = (
                f"Its weights are quantized ({shown(str(quantized.get('quant_method')))}), of which transformers reads "
                "some formats only, with their packages. Serve it, and check the server."
                if isinstance(quantized, dict)
                else "Train or export it again."
            )
            raise ConfigError(f"{self._folder}: does not load in transformers: {shown(reason)}. {remedy}") from error

    @torch.no_grad()
    def log_probs(self, ids: Sequence[int], wanted: Sequence[int]) -> Tensor:
        """Return [wanted, vocabulary]: the log probabilities of the tokens at positions, given those before."""
        logits = self.model(torch.tensor([list(ids)])).logits[0]
        return torch.log_softmax(logits[[at - 1 for at in wanted]].float(), -1)

    def of_tokens(self, ids: Sequence[int], wanted: Sequence[int]) -> list[float]:
        """Return the log probabilities of a text's own tokens."""
        rows = self.log_probs(ids, wanted)
        found: list[float] = rows[torch.arange(len(wanted)), torch.tensor([ids[at] for at in wanted])].tolist()
        return found

    @torch.no_grad()
    def disturb(self, errors: Errors, own: float) -> None:
        """Add random errors to all matrices: of the dtype, of a format, and `own`, of a program."""
        random = torch.Generator().manual_seed(0)
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        outer = {id(module.weight) for module in ends if module is not None}
        for weight in self.model.parameters():
            if weight.ndim < 2:
                continue
            relative = DTYPES[self.dtype] + (errors.outer if id(weight) in outer else errors.inner + own)
            exact = weight.float()
            noise = torch.randn(weight.shape, generator=random) * exact.square().mean(-1, keepdim=True).sqrt()
            weight.copy_(exact + relative * noise)

    def adapt(self, folder: Path) -> None:
        """Load an adapter onto the model, by PEFT. Raises ConfigError if it does not load."""
        try:
            from peft import PeftModel
        except ImportError:
            raise ConfigError(
                f"{folder}: an adapter is loaded by PEFT, which is not installed. pip install peft"
            ) from None
        try:
            with quiet():
                self.model = PeftModel.from_pretrained(self.model, str(folder)).eval()
        except Exception as error:  # libraries raise exceptions of many types
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{folder}: does not load in PEFT: {shown(reason)}. Train it again.") from error

    def alone(self, base: bool) -> AbstractContextManager[object]:
        """Return a context in which the model is its base without an adapter, if `base`."""
        return self.model.disable_adapter() if base else nullcontext()

    def in_dtype(self, dtype: str) -> Reference:
        """Return the same model in another dtype."""
        return Reference(self._folder, self._loaded_by, dtype)


@contextmanager
def reference_folder(found: Found, base: str | None, config: Path | None) -> Iterator[Path]:
    """Return the folder of a run's model; of an adapter, a temporary one in which it is merged."""
    if not found.adapter:
        yield found.folder
        return
    with TemporaryDirectory(prefix="surogate-check-serving-") as folder:
        merged = Path(folder) / "merged"
        run.merge(found.folder, merged, base=base, notice=lambda line: None, config=config)
        yield merged


def open_reference(folder: Path, registry: Registry, dtype: str) -> Reference:
    """Load the model in a folder. Raises ConfigError if it is quantized, or larger than the memory."""
    config = read_config(folder)
    if QUANTIZATION in config:
        raise ConfigError(
            f"{folder}: the weights are quantized. Name the output of the run, and with --format what is served."
        )
    return open_model(folder, registry, config, dtype)


def open_model(folder: Path, registry: Registry, config: Mapping[str, Any], dtype: str) -> Reference:
    """Load the model in a folder, which may be quantized. Raises ConfigError if it is larger than the memory."""
    need = int(_MORE * sum(path.stat().st_size for pattern in WEIGHT_FILES for path in folder.glob(pattern)))
    if need > (have := available_memory_bytes()):
        raise ConfigError(
            f"{folder}: comparing log probabilities needs {need / GIB:.1f} GiB of memory, and {have / GIB:.1f} are "
            "free. Free some, or compare tokens and stops alone with --no-log-probs."
        )
    return Reference(folder, named_model(config, registry)[0].loaded_by, dtype)


def kl(ours: Tensor, served: Mapping[int, float]) -> float:
    """Return the KL divergence of a server's distribution from ours, of the listed tokens and all others together.

    Joining the others makes it a lower bound of that of the whole distributions.
    """
    tokens = [token for token in served if 0 <= token < len(ours)]
    p = ours[tokens].double().exp()
    q = torch.tensor([served[token] for token in tokens], dtype=torch.float64).exp()
    rest = [(1 - x.sum()).clamp(min=1e-9).reshape(1) for x in (p, q)]
    p, q = (torch.cat([x, more]).clamp(min=1e-30) for x, more in zip((p, q), rest, strict=True))
    return max(0.0, float((p * (p / q).log()).sum()))
