"""Runs in the environment of vLLM, for `check_vllm.py`: python in_vllm.py JOBS.json. Writes each job's answer as JSON.

A job of kind `model` loads a folder in vLLM's engine, and gets the log probabilities of all tokens at each position of
`ids`, and the ids of conversations. One of kind `names` asks vLLM's own matching, for modules of a folder's files,
which of them it takes for floating point.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any


def run_model(job: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=job["folder"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_logprobs=-1,
        max_num_seqs=1,
        seed=0,
        skip_mm_profiling=True,
        enable_prefix_caching=False,
    )
    wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1, detokenize=False)
    (answer,) = engine.generate([{"prompt_token_ids": job["ids"]}], wanted, use_tqdm=False)
    rows = [[at[token].logprob for token in range(job["vocabulary"])] for at in answer.prompt_logprobs[1:]]
    np.array(rows, np.float32).tofile(f"{job['out']}.f32")
    tokenizer = engine.get_tokenizer()
    chats = [
        tokenizer.apply_chat_template(
            chat["messages"],
            tools=chat["tools"],
            add_generation_prompt=chat["prompt"],
            tokenize=True,
            return_dict=False,
        )
        for chat in job["chats"]
    ]
    del engine
    gc.collect()
    return {"chats": chats}


def match_names(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
    from vllm.model_executor.models import ModelRegistry

    config = json.loads((Path(job["folder"]) / "config.json").read_text())
    given = config["quantization_config"]
    (architecture,) = config["architectures"]
    model: Any = ModelRegistry.models[architecture].load_model_cls()
    method = {"modelopt": "modelopt_fp4"}.get(given["quant_method"], given["quant_method"])
    quantization: Any = get_quantization_config(method).from_config(given)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    packed = getattr(model, "packed_modules_mapping", {})
    if mapper is not None:
        quantization.apply_vllm_mapper(mapper.get_rename_mapper())
    quantization.packed_modules_mapping = packed

    def plain(name: str) -> bool:
        if method == "fp8":
            return bool(is_layer_skipped(name, quantization.ignored_layers, packed))
        if method == "compressed-tensors":
            return bool(should_ignore_layer(name, quantization.ignore, packed))
        return bool(quantization.is_layer_excluded(name))

    named = {name: mapper.get_rename_mapper().map_name(name) if mapper else name for name in job["modules"]}
    return {"plain": [name for name, own in named.items() if own is None or plain(own)]}


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        answer = {"model": run_model, "names": match_names}[job["kind"]](job)
        Path(job["out"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
