"""The process that writes the samples of a run: `python -m surogate.generation.sample_process`.

It reads lines of JSON. The first is a `SampleTask`, to which it answers true once everything that does not change is
loaded: libraries, and the base of an adapter. Each other line names the folder of a model or an adapter, with prompts
or null for those of the task. It answers a line for each prompt: [text, tokens, finish, seconds]. An answer
{"error": text} ends it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surogate_core.errors import SurogateError

from .answers import Answer, Asked, LoadedModel, Sampling, load, load_base, with_adapter
from .model_files import ModelFiles


@dataclass(frozen=True, kw_only=True)
class SampleTask:
    """The samples of a run.

    base        the folder of the base of an adapter; None: each folder is a whole model
    loaded_by   the class of transformers that loads the model
    device      of torch
    dtype       of torch, of the model
    prompts     the tokens of each
    batch       prompts that are answered at once
    stops       tokens that end a text
    """

    base: str | None
    loaded_by: str
    device: str
    dtype: str
    prompts: Sequence[Sequence[int]]
    batch: int
    stops: Sequence[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


def serve(task: SampleTask, asked: Iterator[Mapping[str, Any]], answer: Callable[[Any], None]) -> None:
    """Answer what is asked, one folder at a time. There is never a second model in memory."""
    sampling = Sampling(
        max_new_tokens=task.max_new_tokens, temperature=task.temperature, top_p=task.top_p, seed=task.seed
    )
    base = None
    if task.base is not None:
        base = load_base(ModelFiles(Path(task.base), task.loaded_by), task.device, task.dtype)
    else:
        import transformers  # noqa: F401 (takes seconds)
    answer(True)
    model: LoadedModel | None = None
    for request in asked:
        path = Path(request["folder"])
        if base is None or task.base is None:
            model = None
            gc.collect()
            model = load(ModelFiles(path, task.loaded_by), task.device, task.dtype)
        elif model is None:
            model = LoadedModel(ModelFiles(Path(task.base), task.loaded_by, path), with_adapter(base, path).eval())
        else:
            _replace_adapter(model.model, path)
        prompts = task.prompts if request["prompts"] is None else request["prompts"]
        for first in range(0, len(prompts), task.batch):
            batch = [Asked(ids=ids) for ids in prompts[first : first + task.batch]]
            for found in model.answer_batch(batch, sampling, task.stops):
                answer(_as_data(found))


def _replace_adapter(model: Any, folder: Path) -> None:
    """Load the tensors of another adapter with the same settings. Raises ValueError for one that PEFT does not know."""
    from peft import load_peft_weights, set_peft_model_state_dict

    tensors = load_peft_weights(str(folder), device=str(model.device))
    result: Any = set_peft_model_state_dict(model, tensors)
    if result.unexpected_keys:
        raise ValueError(f"{folder}: PEFT does not know {result.unexpected_keys[0]}")


def _as_data(answer: Answer) -> list[Any]:
    return [answer.text, len(answer.tokens), answer.finish, answer.seconds]


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    lines = (line.strip() for line in sys.stdin)
    try:
        task: Mapping[str, Any] = json.loads(next(lines))
        serve(SampleTask(**task), (json.loads(line) for line in lines), answer)
    except Exception as error:  # libraries raise exceptions of many types
        reason = str(error) if isinstance(error, SurogateError) else f"{type(error).__name__}: {error}"
        answer({"error": " ".join(reason.split())})
    os._exit(0)  # taking down the modules of transformers takes 0.7 s


if __name__ == "__main__":
    main()
